"""How much work the scheduler has for each worker group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hpcgpu.dask_scheduler.rpc_types import Load, WaitingWork, WorkerLoad
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.scaling import sizes_to_jobs
from hpcgpu.scaling.policy_data import Demand

#: Share of the workers' memory above which more workers are requested (as `Scheduler.adaptive_target` does).
_MEMORY_FULL = 0.6
#: Sums of fractions of jobs are exact to this number of digits.
_DIGITS = 6


def demands(load: Load, groups: Iterable[WorkerGroup]) -> dict[str, Demand]:
    """Return the scheduler's demand for each group.

    `Scheduler.adaptive_target` considers neither groups nor resources; this function considers both.

    Parameters
    ----------
    load : Load
    groups : iterable of WorkerGroup
        Work without a worker counts for the first group that can run it, and workers that a program waits for count for
        the first group that can serve it; put the adaptive groups first.
    """
    listed = list(groups)
    waiting: dict[str, list[WaitingWork]] = {group.name: [] for group in listed}
    for kind in load["waiting"]:
        if able := next((group for group in listed if group.can_run(kind["resources"])), None):
            waiting[able.name].append(kind)
    requested: dict[str, int] = {group.name: 0 for group in listed}
    for size in load["holds"]:
        if able := next((group for group in listed if group.can_be_held(size["resources"])), None):
            requested[able.name] += size["workers"]
    return {group.name: _demand(group, load["workers"], waiting[group.name], requested[group.name]) for group in listed}


class _Work(NamedTuple):
    """Tasks in one place: on one worker, or waiting for a worker."""

    tasks: int
    #: The number of these tasks that no thread runs yet.
    late: int
    #: Seconds that all these tasks will take.
    seconds: float
    #: How many such tasks one worker runs at a time.
    at_once: int

    @property
    def late_seconds(self) -> float:
        return self.seconds * self.late / self.tasks if self.late else 0.0


def _demand(
    group: WorkerGroup, workers: Mapping[str, WorkerLoad], waiting: Iterable[WaitingWork], requested: int
) -> Demand:
    there = [
        workers[name] for job in group.jobs if not job.draining for name in job.workers.values() if name in workers
    ]
    work = [
        _Work(w["processing"], max(0, w["processing"] - w["nthreads"]), w["occupancy"], w["at_once"])
        for w in there
        if w["processing"]
    ]
    work += [_Work(k["tasks"], k["tasks"], k["seconds"], _tasks_at_once(group, k["resources"])) for k in waiting]
    tasks = sum(each.tasks for each in work)
    seconds = sum(each.seconds for each in work)
    duration = group.adaptive.target_duration if group.adaptive is not None else math.inf
    needed = min(tasks, max(1, math.ceil(seconds / duration)))
    # The number of workers that would run all tasks at once, times the share of the tasks that must run at once.
    wanted = sum(each.tasks / each.at_once for each in work) * needed / max(1, tasks)
    threads = sum(worker["nthreads"] for worker in there)
    late = sum(each.late for each in work)
    return Demand(
        jobs=math.ceil(round(wanted / group.options.workers_per_job, _DIGITS)),
        seconds=seconds / threads if threads else (math.inf if tasks else 0.0),
        waiting=sum(each.late_seconds / each.at_once for each in work) / group.options.workers_per_job,
        task=sum(each.late_seconds for each in work) / late if late else 0.0,
        memory=math.ceil(len(there) / group.options.workers_per_job) + 1 if _is_full(there, tasks) else 0,
        held=math.ceil((requested + sum(worker["held"] for worker in there)) / group.options.workers_per_job),
    )


def _is_full(workers: Iterable[WorkerLoad], tasks: int) -> bool:
    """Return whether so much of the workers' memory is in use that another job is needed.

    A paused worker has no room for results, even if Dask does not know what fills its memory. Without tasks, only
    wanted data counts, because another job would stay for it. Otherwise that job would start and end again and again.
    """
    limit, used = 0, 0
    for worker in workers:
        limit += worker["memory_limit"]
        room = worker["memory_limit"] if worker["paused"] else 0
        used += max(room, worker["nbytes"]) if tasks else worker["wanted"]
    return used > _MEMORY_FULL * limit > 0


def _tasks_at_once(group: WorkerGroup, resources: Mapping[str, float]) -> int:
    """Return how many tasks that need these resources one worker runs at a time, with its threads and resources."""
    there = dict(group.options.worker_resources())
    slots = [there[name] // amount for name, amount in resources.items() if amount > 0]
    return max(1, int(min([sizes_to_jobs.threads_per_worker(group.options), *slots])))
