"""Queries the queue about the jobs of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.errors import BatchError, ClusterExists, Damaged, OtherQueue
from hpcgpu.posix.printable import printable
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End, Submit

#: Seconds that the submit of a killed client may take.
_SUBMIT = 10.0


def check_queue(directory: ClusterDirectory, batch: BatchSystem) -> None:
    """Refuse to query a queue that does not contain the cluster's jobs.

    Two systems may share a home directory.

    The query is allowed if the queue does not report its identity, or did not when the cluster was made.

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
    """Return the queue's status of these jobs. A job with the id but another name does not belong to the cluster."""
    statuses = batch.poll(list(jobs))
    return {i: statuses[i] for i, submit in jobs.items() if i in statuses and statuses[i].name == submit.name}


def query_with_accounting(jobs: Mapping[str, Submit], batch: BatchSystem) -> dict[str, JobStatus]:
    """Return the status of these jobs from the queue, or from the accounting if the queue has forgotten them."""
    statuses = query(jobs, batch)
    if gone := set(jobs) - set(statuses):
        ended = batch.ended(gone)
        statuses |= {i: ended[i] for i in gone if i in ended and ended[i].name == jobs[i].name}
    return statuses


def jobs_without_end(
    directory: ClusterDirectory, batch: BatchSystem, more: Iterable[Submit] = ()
) -> dict[str, JobStatus]:
    """Return the status of the jobs whose end the journal does not explain, by id, from queue or accounting.

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
    return query_with_accounting(jobs, batch)


def note_ends(
    directory: ClusterDirectory, batch: BatchSystem, cancelled: Mapping[str, JobStatus] | None = None
) -> None:
    """Write into the journal how the jobs of a cluster ended, before the queue forgets it.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    cancelled : mapping of job id to JobStatus, optional
        The status of cancelled jobs before the cancel: their end is known even if the queue forgets it at once.
    """
    with suppress(BatchError, OSError):
        over = [status for status in jobs_without_end(directory, batch).values() if status.state.ended]
        how = {one.name: End.of(one, gone=time.time(), cancelled=True) for one in (cancelled or {}).values()}
        how |= {one.name: End.of(one) for one in over}
        if how:
            directory.ended({one.name: one.job_id for one in [*(cancelled or {}).values(), *over]}, how)


def submitted(directory: ClusterDirectory, batch: BatchSystem) -> dict[str, Submit]:
    """Return the jobs of a cluster that are not known to have ended, by id.

    A job without a known id is looked up by its name.

    Raises
    ------
    BatchUnavailable
        The queue does not answer, or is not that of the cluster.
    """
    check_queue(directory, batch)
    jobs: dict[str, Submit] = {}
    for submit in directory.submits():
        if submit.refused or submit.ended:
            continue
        ids = [submit.job_id] if submit.job_id is not None else batch.find(submit.name)
        jobs |= dict.fromkeys(ids, submit)
    return jobs


def without_id(directory: ClusterDirectory) -> list[Submit]:
    """Return the submits of which the journal has no outcome: the job may be in the queue, or come into it."""
    return [one for one in directory.submits() if one.job_id is None and not one.refused and not one.ended]


def live_jobs(directory: ClusterDirectory, batch: BatchSystem) -> list[JobStatus]:
    """Return the jobs of a cluster that have not ended, as its queue reports.

    Raises
    ------
    BatchUnavailable
        The queue does not answer, or is not that of the cluster.
    """
    return [status for status in query(submitted(directory, batch), batch).values() if not status.state.ended]


def live_and_unknown(directory: ClusterDirectory, batch: BatchSystem) -> tuple[list[JobStatus], list[str]]:
    """Return the jobs of a cluster that live, and those that may live: ids, or names of jobs without a known id.

    A job may live if the queue does not report it, and neither the journal nor the accounting proves its end. In two
    cases there is no such job: on its own machine, the embedded queue reports every job that lives; and a scheduler job
    that ends removes the keys of its cluster.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    """
    jobs = submitted(directory, batch)
    answer = query(jobs, batch)
    live = [status for status in answer.values() if not status.state.ended]
    accounted = batch.ended(set(jobs) - set(answer))
    over = {i for i, status in accounted.items() if status.state.ended and i in jobs and status.name == jobs[i].name}
    found = list(jobs.values())
    no_id = [submit.name for submit in without_id(directory) if submit not in found]
    manager = directory.manager()
    remembered = batch.remembers and manager is not None and manager.lives is not None
    return live, [] if remembered or ended_by_itself(directory) else [
        *(i for i in jobs if i not in answer and i not in over),
        *no_id,
    ]


def ended_by_itself(directory: ClusterDirectory) -> bool:
    """Whether the scheduler job has removed the keys at its end.

    `stop` removes them too, before the jobs have ended.
    """
    return not directory.tls.is_dir() and not directory.dashboard_token() and not directory.closing


def unended(directory: ClusterDirectory, batch: BatchSystem) -> list[str]:
    """Return the ids of the jobs of a cluster that have not ended.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    ClusterExists
        It is not known whether they have ended.
    """
    try:
        live, unknown = live_and_unknown(directory, batch)
    except OtherQueue as error:
        raise ClusterExists(f"{error}. Or choose another name") from None
    if unknown and not live:
        raise ClusterExists(
            f"a cluster named {directory.path.name!r} may still have jobs (see {directory.path}): "
            f"{unknown_jobs(directory, unknown)}. Or choose another name"
        )
    return sorted(job.job_id for job in live)


def unknown_jobs(directory: ClusterDirectory, jobs: list[str]) -> str:
    """Return what messages report about jobs that the queue does not know."""
    return (
        f"the queue of this machine does not know its jobs {listed(jobs, ', ')}. They may be in the queue of another "
        f"machine. If they have ended, run: hpcgpu stop {directory.in_shell}"
    )


def submitting(directory: ClusterDirectory, *, now: float) -> bool:
    """Whether a submit of a killed client may still be in progress.

    The submit command has its own session, and survives the client.
    """
    return any(now - submit.time < _SUBMIT for submit in without_id(directory))
