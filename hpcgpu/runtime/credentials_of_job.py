"""The credentials of a cluster whose scheduler runs in a job: made for the life of the job, removed at its end."""

from __future__ import annotations

import contextlib
import time

from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.runtime.before_walltime import end_of_walltime
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.directory import ClusterDirectory


def make_credentials(directory: ClusterDirectory, own: OwnJob | None, batch: BatchSystem) -> None:
    """Make the credentials of a cluster that lives in this job; they are valid as long as the job."""
    end = end_of_walltime(own, batch) if own is not None else None
    certificates_and_keys.create(directory, end - time.time() if end is not None else None, waits=False)


def remove_secrets(directory: ClusterDirectory, token: str, job_id: str) -> None:
    """Remove the credentials of a cluster whose scheduler job ends.

    Scripts of ``hpcgpu render`` keep theirs, because they may be launched again.

    Only the scheduler job of the contact removes them; without a contact, the scheduler job of the journal.
    """
    with contextlib.suppress(OSError):
        contact = directory.contact()
        known = {submit.job_id for submit in directory.submits() if submit.kind == "scheduler"} - {None}
        own = contact.job_id == job_id if contact is not None else job_id in known or not known
        if own and directory.has_token(token) and not (directory.path / "launch.sh").exists():
            directory.remove_secrets()
