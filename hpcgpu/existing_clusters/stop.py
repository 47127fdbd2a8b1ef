"""Stops a cluster whose client is gone: cancels all its jobs, and no others."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.batch.reasons import why_it_stays
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.errors import ClusterError
from hpcgpu.existing_clusters.lookup import batch_of
from hpcgpu.existing_clusters.query_jobs import check_queue, live_jobs, note_ends, submitting
from hpcgpu.polling.queue_monitor import presumed_ended
from hpcgpu.store.directory import ClusterDirectory

#: Seconds after which a remaining job is cancelled again.
_CANCEL_AGAIN = 10.0


def stop(
    directory: ClusterDirectory,
    batch: BatchSystem,
    *,
    timeout: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> list[JobStatus]:
    """Cancel every job of a cluster, and no other; return those that are left after the timeout.

    Its client, if it is alive, stops when the scheduler is gone. Jobs that it submits meanwhile are cancelled too.

    Raises
    ------
    BatchUnavailable
        The queue does not answer, or is not that of the cluster: the state of the jobs is not known.
    """
    check_queue(directory, batch)
    directory.remove_secrets()
    with suppress(OSError):  # on a full disk the jobs are nevertheless cancelled
        if not directory.closing:
            directory.begin_close()
    seen = dict[str, JobStatus]()

    def jobs() -> list[JobStatus]:
        there = live_jobs(directory, batch)
        seen.update({job.job_id: job for job in there})
        return there

    def more() -> bool:
        return submitting(directory, now=time.time())

    left = cancel_until_gone(jobs, batch, more, timeout=timeout, sleep=sleep)
    if not left and not more():
        note_ends(directory, batch, seen)
        directory.close()
    return left


def cancel_until_gone(
    jobs: Callable[[], list[JobStatus]],
    batch: BatchSystem,
    more: Callable[[], bool] = lambda: False,
    *,
    timeout: float,
    sleep: Callable[[float], None],
) -> list[JobStatus]:
    """Cancel jobs until the queue has none of them; return those that are left after the timeout.

    Jobs that only have an epilog left do not count. One answer of the queue without a job does not count either.

    Parameters
    ----------
    jobs : callable
        Returns the jobs that have not ended, as the queue reports.
    batch : BatchSystem
    more : callable, optional
        Whether a submit that is under way may bring another job.
    timeout : float
    sleep : callable
    """
    deadline, empty, stuck, again = time.monotonic() + timeout, 0, 0, dict[str, float]()
    while True:
        there = jobs()
        empty = 0 if there else empty + 1
        if presumed_ended(missing=0.0, answers=empty, cancelled=True) and not more():
            return []
        stuck = stuck + 1 if there and all(map(why_it_stays, there)) else 0
        late = time.monotonic() > deadline and (there or more())
        if late or (stuck > 1 and not more()):
            # an epilog may take minutes, but the job cannot continue
            return [job for job in there if job.state is not JobState.COMPLETING or why_it_stays(job)]
        now = time.monotonic()
        if any(now >= again.get(job.job_id, now) for job in there):
            batch.cancel([job.job_id for job in there])
            again = {job.job_id: now + _CANCEL_AGAIN for job in there}
        sleep(1.0)


def stop_all(directory: ClusterDirectory) -> None:
    """Cancel every job of a cluster, as `stop` does.

    Raises
    ------
    ClusterError
        Jobs are left.
    BatchUnavailable
        The queue does not answer.
    """
    if left := stop(directory, batch_of(directory)):
        raise ClusterError(what_stays(left, "Stop the cluster again"))


def what_stays(left: list[JobStatus], again: str) -> str:
    """Return what messages report about the jobs that `stop` leaves; `again` is how to stop them again."""
    ids = listed([job.job_id for job in left if not why_it_stays(job)], ", ")
    others = f"still in the queue: {ids}. {again}. If they stay, cancel them with the batch system's own command"
    return "\n".join([*filter(None, map(why_it_stays, left)), *([others] if ids else [])])
