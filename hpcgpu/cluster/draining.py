"""Takes Dask workers out of a running cluster without losing what they hold or run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hpcgpu.cluster.jobs import WorkerJob

__all__ = ["close_finished", "move_data"]


async def move_data(scheduler: Any, jobs: Collection[WorkerJob]) -> list[WorkerJob]:
    """Take all workers of these jobs out of the game together: no new tasks come, and their data moves; what runs goes on.

    Parameters
    ----------
    scheduler : distributed.core.rpc
    jobs : collection of WorkerJob

    Returns
    -------
    list of WorkerJob
        Those whose data fits nowhere else; they are as they were.
    """
    asked, moved = set[str](), set[str]()
    try:
        while coming := _remaining(jobs):  # more than once where workers join meanwhile
            asked |= coming.keys()
            moved |= (await scheduler.retire_workers(names=list(coming.values()), close_workers=False, remove=False)).keys()
            for job in jobs:
                job.retired |= asked & job.workers.keys()
    except OSError:  # the network, or a busy scheduler: `close_finished` asks again before any worker is closed
        return []
    stuck = [job for job in jobs if any(address in asked and address not in moved for address in job.workers)]
    await _resume(scheduler, stuck)
    return stuck


async def close_finished(scheduler: Any, jobs: Collection[WorkerJob], *, at_once: bool) -> tuple[list[WorkerJob], list[WorkerJob]]:
    """Close the workers of those of these jobs that have finished what they ran, once the results have moved.

    Parameters
    ----------
    scheduler : distributed.core.rpc
    jobs : collection of WorkerJob
        Whose data `move_data` has moved.
    at_once : bool
        Do not wait for running tasks: they are run again elsewhere.

    Returns
    -------
    closed, stuck : list of WorkerJob
        Those whose results fit nowhere else are stuck; they take tasks again.
    """
    kept = await move_data(scheduler, jobs) if _remaining(jobs) else []  # a nanny may have restarted a worker
    jobs = [job for job in jobs if job not in kept]
    try:
        unfinished = {} if at_once else await scheduler.hpcgpu_unfinished(names=_names(jobs))
        done = [job for job in jobs if not any(unfinished.get(name) for name in job.workers.values())]
        names = _names(done)
        closed = await scheduler.retire_workers(names=names, close_workers=True, remove=True) if names else {}
    except OSError:  # the network, or a busy scheduler, may come back: their data is worth another try
        return [], kept
    stuck = [job for job in done if any(address in job.retired and address not in closed for address in job.workers)]
    await _resume(scheduler, stuck)
    return [job for job in done if job not in stuck and not _remaining([job])], [*kept, *stuck]


async def _resume(scheduler: Any, jobs: Collection[WorkerJob]) -> None:
    for job in jobs:
        job.retired.clear()
    if names := _names(jobs):
        await scheduler.hpcgpu_resume(names=names)


def _remaining(jobs: Collection[WorkerJob]) -> dict[str, str]:
    """Return the workers that have not been told to retire: names by address."""
    return {address: name for job in jobs for address, name in job.workers.items() if address not in job.retired}


def _names(jobs: Collection[WorkerJob]) -> list[str]:
    return [name for job in jobs for name in job.workers.values()]
