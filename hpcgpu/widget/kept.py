"""The picture that stays in the file of a notebook: the last known state of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcgpu.remote.snapshot import Snapshot

__all__ = ["Kept", "due"]

#: Seconds between two pictures while the state stays the same: each changes the file, and where JupyterLab has not our
#: extension it draws the whole output anew.
_PAUSE = 600.0


def due(kept: Snapshot, new: Snapshot) -> bool:
    """Whether a new picture replaces the one that is kept: its jobs tell the cluster from a later one of its name."""
    if new.state == "unreachable":  # for a moment, perhaps: what is kept is still the last known state
        return False
    if new.jobs and not kept.jobs:
        return True
    return new.state != kept.state or (new.time - kept.time >= _PAUSE and _facts(new) != _facts(kept))


def _facts(snapshot: Snapshot) -> Any:
    """Return what is more than the time that passes."""
    groups = [(group["name"], group["target"], group["maximum"], group["paused"]) for group in snapshot.groups]
    jobs = [(job.name, job.state) for job in snapshot.jobs]
    return snapshot.workers, snapshot.warnings, snapshot.problem, groups, jobs


class Kept:
    """Replaces the picture in the outputs that show a cluster.

    Parameters
    ----------
    replace : callable
        Puts the picture of another snapshot into these outputs.
    """

    def __init__(self, replace: Callable[[Snapshot], None]) -> None:
        self._replace = replace
        self._kept: Snapshot | None = None

    def shown(self, snapshot: Snapshot) -> None:
        """Record that an output was made with this one."""
        self._kept = snapshot

    def keep(self, snapshot: Snapshot, *, last: bool = False) -> None:
        """Replace the picture if it is time, or if this is the last one and differs."""
        if self._kept is None:
            return
        if due(self._kept, snapshot) or (last and _facts(snapshot) != _facts(self._kept)):
            self._kept = snapshot
            self._replace(snapshot)
