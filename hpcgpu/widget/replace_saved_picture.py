"""The picture in the file of a notebook: the last known state of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcgpu.existing_clusters.snapshot import Snapshot

#: Seconds between two pictures while the state stays the same. Each picture changes the file, and a JupyterLab without
#: our extension draws the whole output again.
_PAUSE = 600.0


def must_replace(kept: Snapshot, new: Snapshot) -> bool:
    """Whether a new picture replaces the kept one. Its jobs distinguish the cluster from a later one of its name."""
    if new.state == "unreachable":  # perhaps only for a moment: the kept picture is still the last known state
        return False
    if new.jobs and not kept.jobs:
        return True
    return new.state != kept.state or (new.time - kept.time >= _PAUSE and _facts(new) != _facts(kept))


def _facts(snapshot: Snapshot) -> Any:
    """Return the values that do not change merely with time."""
    groups = [(group["name"], group["target"], group["maximum"], group["paused"]) for group in snapshot.groups]
    jobs = [(job.name, job.state) for job in snapshot.jobs]
    return snapshot.workers, snapshot.warnings, snapshot.problem, groups, jobs


class SavedPicture:
    """Replaces the picture in the outputs that show a cluster.

    Parameters
    ----------
    replace : callable
        Puts the picture of another snapshot into these outputs.
    """

    def __init__(self, replace: Callable[[Snapshot], None]) -> None:
        self._replace = replace
        self._is_shown = False
        self._latest: Snapshot | None = None

    def shown(self, snapshot: Snapshot | None) -> None:
        """Record that an output was made with this snapshot, or without one: then the next one is its picture."""
        self._is_shown, self._latest = True, snapshot

    def update(self, snapshot: Snapshot, *, last: bool = False) -> None:
        """Replace the picture if there is none, if it is due, or if this is the last snapshot and differs."""
        kept = self._latest
        if not self._is_shown:
            return
        if kept is None or must_replace(kept, snapshot) or (last and _facts(snapshot) != _facts(kept)):
            self._latest = snapshot
            self._replace(snapshot)
