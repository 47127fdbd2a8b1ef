"""How much work the scheduler has for each worker group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hpcgpu.dask_scheduler.rpc_types import HoldSize, Load, WaitingWork, WorkerLoad
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.scaling import sizes_to_jobs
from hpcgpu.scaling.policy_data import Demand

#: Share of the workers' memory above which more workers are requested (as `Scheduler.adaptive_target` does).
_MEMORY_FULL = 0.6
#: Sums of fractions of jobs are exact to this number of digits.
_DIGITS = 6


def demands(load: Load, groups: Iterable[WorkerGroup], *, now: float) -> dict[str, Demand]:
    """Return the scheduler's demand for each group.

    `Scheduler.adaptive_target` considers neither groups nor resources; this function considers both.

    Parameters
    ----------
    load : Load
    groups : iterable of WorkerGroup
        Work without a worker counts for the first group that can run it; put the adaptive groups first. Workers that
        programs wait for are spread over all groups that can serve them, see `jobs_for_holds`.
    now : float
    """
    listed = list(groups)
    waiting: dict[str, list[WaitingWork]] = {group.name: [] for group in listed}
    for kind in load["waiting"]:
        if able := next((group for group in listed if group.can_run(kind["resources"])), None):
            waiting[able.name].append(kind)
    held = jobs_for_holds(load["holds"], [_supply(group, load["workers"], now=now) for group in listed])
    return {
        group.name: _demand(group, load["workers"], waiting[group.name], jobs)
        for group, jobs in zip(listed, held, strict=True)
    }


class Supply(NamedTuple):
    """The workers of a group that programs can hold."""

    #: Whether a program can hold workers of this group if it requests these resources.
    serves: Callable[[Mapping[str, float]], bool]
    workers_per_job: int
    #: Jobs that exist; workers of these that a program holds; those that are free or come soon.
    jobs: int
    held_workers: int
    free: int
    #: Jobs that it can have.
    maximum: int
    #: Whether it has so many jobs without any demand.
    fixed: bool


def jobs_for_holds(holds: Iterable[HoldSize], supplies: Sequence[Supply]) -> list[int]:
    """Return how many jobs of each group are needed for the workers that programs hold or wait for.

    A request takes what is there or comes in any case, first in groups of a fixed size; then new jobs, in the order of
    the groups, up to the maximum of each. What no group can have counts for the first group that serves it.
    """
    free = [supply.free for supply in supplies]
    new = [supply.workers_per_job * max(0, supply.maximum - supply.jobs) for supply in supplies]
    # workers of each group for these programs: in jobs that exist or come in any case, and in further ones
    planned, further = [supply.held_workers for supply in supplies], [0] * len(supplies)
    for hold in holds:
        able = [i for i, supply in enumerate(supplies) if supply.serves(hold["resources"])]
        if not able:
            continue
        missing = hold["workers"]
        for room, workers, order in (
            (free, planned, sorted(able, key=lambda i: not supplies[i].fixed)),
            (new, planned, [i for i in able if supplies[i].fixed]),
            (new, further, able),
        ):
            for i in order:
                part = min(missing, room[i])
                room[i] -= part
                workers[i] += part
                missing -= part
        further[able[0]] += missing
    return [
        supply.jobs + math.ceil(new_workers / supply.workers_per_job)
        if new_workers
        else math.ceil(there / supply.workers_per_job)
        for supply, there, new_workers in zip(supplies, planned, further, strict=True)
    ]


def _supply(group: WorkerGroup, workers: Mapping[str, WorkerLoad], *, now: float) -> Supply:
    held = free = 0
    active = [job for job in group.jobs if job.active]
    for job in active:
        there = [workers[name] for name in job.workers.values() if name in workers]
        held_here = sum(one["held"] for one in there)
        paused = sum(one["paused"] and not one["held"] for one in there)
        held += held_here
        free += max(0, (len(there) if job.lost_workers else group.options.workers_per_job) - held_here - paused)
    return Supply(
        serves=group.can_be_held,
        workers_per_job=group.options.workers_per_job,
        jobs=len(active),
        held_workers=held,
        free=free,
        maximum=group.possible_jobs(now=now),
        fixed=group.adaptive is None,
    )


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


def _demand(group: WorkerGroup, workers: Mapping[str, WorkerLoad], waiting: Iterable[WaitingWork], held: int) -> Demand:
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
        held=held,
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
