"""Places tasks in few jobs while jobs without tasks may end, so that a few long tasks do not keep all jobs.

distributed gives tasks that need no data to its workers by turns. Six tasks of an hour would take some workers of each
of four jobs with four workers, though two jobs are enough. All four are paid for that hour.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcgpu.runtime.job_identity import JOB

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: Seconds for which the order of the jobs counts as current: with thousands of workers, it takes 10 ms to make.
_CURRENT = 0.2


def install(scheduler: Scheduler, jobs_that_stay: Callable[[], int | None]) -> None:
    """Let a task that needs no data, and may run anywhere, run in the job with the fewest free threads.

    distributed chooses among the workers of that job. Tasks that need data go where the data is, as usual.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    jobs_that_stay : callable
        How many jobs stay without tasks; None if all do.
    """
    upstream, jobs = scheduler.valid_workers, _FullestJobs(scheduler)

    def valid_workers(ts: TaskState) -> set[WorkerState] | None:
        found: set[WorkerState] | None = upstream(ts)
        if found is None and not ts.dependencies and not ts.actor and (staying := jobs_that_stay()) is not None:
            return jobs.free_workers(staying) or None
        return found

    scheduler.valid_workers = valid_workers


class _FullestJobs:
    """The jobs that have free threads, in the order in which they get tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: The next one is the last one.
        self._jobs: list[list[WorkerState]] = []
        self._count = 0
        self._until = 0.0

    def free_workers(self, staying: int) -> set[WorkerState]:
        """Return the workers with free threads of the next job.

        None if all threads are taken, or if no job can end: there are no more than `staying`.
        """
        now = time.monotonic()
        if now > self._until:
            self._jobs, self._until = self._ordered(), now + _CURRENT
            self._count = len(self._jobs)
        if self._count <= staying:
            return set()
        while self._jobs:
            if free := {ws for ws in self._jobs[-1] if ws in self._scheduler.running and _free(ws)}:
                return free
            self._jobs.pop()
        return set()

    def _ordered(self) -> list[list[WorkerState]]:
        """Return the workers of each job; jobs without tasks come first, those with the least data before others."""
        jobs: defaultdict[str, list[WorkerState]] = defaultdict(list)
        for ws in self._scheduler.running:
            jobs[str((ws.extra.get(JOB) or {}).get("id", ws.address))].append(ws)

        def fullness(job: str) -> tuple[bool, int, float, str]:
            return (
                any(ws.processing for ws in jobs[job]),
                -sum(map(_free, jobs[job])),
                sum(ws.nbytes for ws in jobs[job]),
                job,
            )

        return [jobs[job] for job in sorted(jobs, key=fullness)]


def _free(ws: WorkerState) -> int:
    """Return how many more tasks a worker can run now."""
    return max(0, int(ws.nthreads) - len(ws.processing))
