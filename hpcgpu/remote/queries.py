"""What the queue says of the jobs of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.errors import BatchError, Damaged, OtherQueue
from hpcgpu.posix.printable import printable
from hpcgpu.store.directory import ClusterDirectory, Submit
from hpcgpu.store.journal import End

__all__ = ["check_queue", "known", "looked_up", "note_ends", "query"]


def check_queue(directory: ClusterDirectory, batch: BatchSystem) -> None:
    """Refuse to query another queue than the one that the cluster's jobs are in.

    Two systems may share a home directory.

    A queue that does not say which it is, and a cluster that was made where none did, are not refused.

    Raises
    ------
    OtherQueue
        The cluster is in another queue.
    """
    there = ""
    with suppress(OSError, Damaged):
        there = directory.queue
    here = batch.identity() if there else ""
    if there != here and here:
        raise OtherQueue(
            f"cluster {directory.path.name} belongs to the queue {printable(there)!r} of batch system "
            f"{batch.name!r}, but this machine uses the queue {here!r}. Run this on a machine that uses "
            f"{printable(there)!r}. If that queue no longer exists, remove {directory.path}"
        )


def query(jobs: Mapping[str, Submit], batch: BatchSystem) -> dict[str, JobStatus]:
    """Return what the queue says of these jobs. One whose id belongs to another name by now is not the cluster's."""
    statuses = batch.poll(list(jobs))
    return {i: statuses[i] for i, submit in jobs.items() if i in statuses and statuses[i].name == submit.name}


def looked_up(jobs: Mapping[str, Submit], batch: BatchSystem) -> dict[str, JobStatus]:
    """Return what the queue says of these jobs, and of those that it has forgotten, the accounting."""
    statuses = query(jobs, batch)
    if gone := set(jobs) - set(statuses):
        ended = batch.ended(gone)
        statuses |= {i: ended[i] for i in gone if i in ended and ended[i].name == jobs[i].name}
    return statuses


def known(directory: ClusterDirectory, batch: BatchSystem, more: Iterable[Submit] = ()) -> dict[str, JobStatus]:
    """Return by id what queue or accounting know of the jobs whose end the journal does not explain.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    more : iterable of Submit
        Further jobs.

    Raises
    ------
    BatchError
        The queue does not answer, or is not that of the cluster.
    """
    check_queue(directory, batch)
    submits = [*directory.submits(), *more]
    jobs = {submit.job_id: submit for submit in submits if submit.job_id is not None and submit.how is None}
    return looked_up(jobs, batch)


def note_ends(
    directory: ClusterDirectory, batch: BatchSystem, cancelled: Mapping[str, JobStatus] | None = None
) -> None:
    """Write into the journal how the jobs of a cluster ended: the queue forgets it.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    cancelled : mapping of job id to JobStatus, optional
        Jobs that were cancelled, as they were before: how they ended is known, also if the queue forgets it at once.
    """
    with suppress(BatchError, OSError):
        found = {i: replace(one, state=JobState.CANCELLED, end=time.time()) for i, one in (cancelled or {}).items()}
        found |= {job_id: status for job_id, status in known(directory, batch).items() if status.state.ended}
        if found:
            how = {one.name: End(state=one.state.value, start=one.start, end=one.end) for one in found.values()}
            directory.ended({one.name: job_id for job_id, one in found.items()}, how)
