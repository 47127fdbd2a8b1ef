"""The credentials of a cluster whose scheduler runs in a job: made for the life of the job, removed at its end."""

from __future__ import annotations

import contextlib
import signal
import time

from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.runtime.before_walltime import end_of_walltime
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.directory import ClusterDirectory


def make_credentials(directory: ClusterDirectory, own: OwnJob | None, batch: BatchSystem) -> None:
    """Make the credentials of a cluster that lives in this job; they are valid as long as the job."""
    end = end_of_walltime(own, batch) if own is not None else None
    certificates_and_keys.create(directory, end - time.time() if end is not None else None, waits=False)


#: What closes the scheduler of this process: SIGTERM; 0 if it was something else, and None if it does not close.
_closed_by: int | None = None


def scheduler_closes() -> None:
    """Record what closes the scheduler of this process, from within its close.

    Dask's program has a handler for SIGTERM until the signal comes; then it puts the earlier one back
    (`wait_for_signals` in distributed/_signals.py).
    """
    global _closed_by  # noqa: PLW0603  there is one scheduler in a process
    handler = signal.getsignal(signal.SIGTERM)
    _closed_by = 0 if getattr(handler, "__module__", "").startswith("distributed.") else signal.SIGTERM


def ended_as_intended() -> bool:
    """Whether the scheduler of this process closes because it was asked to, or had no work for `idle_timeout`."""
    return _closed_by == 0


def exit_code() -> int:
    """Return the exit code of a scheduler that Dask has closed: Dask exits with 0, as if nobody had ended it."""
    return 128 + _closed_by if _closed_by else 0


def remove_secrets(directory: ClusterDirectory, token: str, job_id: str, *, restarts: bool = False) -> None:
    """Remove the credentials of a cluster whose scheduler job ends.

    Scripts of ``hpcgpu render`` keep theirs, because they may be launched again. So does a cluster whose scheduler
    `restarts`, unless the scheduler has ended as intended.

    Only the scheduler job of the contact removes them; without a contact, the scheduler job of the journal.
    """
    if restarts and not ended_as_intended():
        return
    with contextlib.suppress(OSError):
        contact = directory.contact()
        known = {submit.job_id for submit in directory.submits() if submit.kind == "scheduler"} - {None}
        own = contact.job_id == job_id if contact is not None else job_id in known or not known
        if own and directory.has_token(token) and not (directory.path / "launch.sh").exists():
            directory.remove_secrets()
