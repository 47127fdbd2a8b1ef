"""Tasks that need resources of a worker: how many run at once, and which of them another worker could run now.

distributed gives such a task to a worker as soon as there is one that could ever run it, and moves it later only if
that worker has more tasks than threads (dask/distributed#1851). For example, a worker has eight threads, but its
resources allow one such task at a time. Eight of these tasks would stay on the first worker that connects, and run one
after the other.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import dask
from dask.utils import parse_timedelta

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskPrefix, TaskState, WorkerState
    from distributed.stealing import WorkStealing


#: Most tasks that are examined, all workers together; but at least two for each thread.
_SAMPLE = 1000
#: Most workers that are compared for a task, among those that could run it now.
_CHOICE = 20
#: Amounts are sums of floating-point numbers.
_EXACT = 1e-9

Amounts = dict[str, float]


def at_once(worker: WorkerState, at_most: int) -> int:
    """Return how many tasks like its present ones a worker can run at once, with its threads and its resources.

    `at_most` tasks are examined.
    """
    there = worker.resources
    sample = list(itertools.islice(worker.processing, at_most)) if there else []
    share = max((amount / there[name] for name, amount in _used(sample).items() if there.get(name)), default=0.0)
    slots = math.floor(len(sample) / share + _EXACT) if share else worker.nthreads
    return max(1, min(int(worker.nthreads), slots))


def move_waiting(scheduler: Scheduler) -> None:
    """Move tasks that wait for the resources of their worker to workers that have these resources free now.

    The work stealing of distributed moves them. It asks the worker first, which keeps the tasks that it has begun. A
    task whose worker has not answered yet is requested again, which does nothing. Without stealing
    (``distributed.scheduler.work-stealing``) nothing moves.
    """
    stealing: WorkStealing | None = scheduler.extensions.get("stealing")
    if stealing is not None:
        for task, victim, thief in _moves(scheduler):
            stealing.move_task_request(task, victim, thief)


def _moves(scheduler: Scheduler) -> list[tuple[TaskState, WorkerState, WorkerState]]:
    """Return which tasks move, from where, and to where."""
    waiting = _waiting(scheduler)
    if (first := next(waiting, None)) is None:  # nearly always; this runs five times a second
        return []
    free = {
        worker: _FreeCapacity(worker, worker.processing)
        for worker in scheduler.running
        if worker.resources and len(worker.processing) < worker.nthreads
    }
    most: Amounts = {}
    for room in free.values():
        most |= {name: max(amount, most.get(name, 0.0)) for name, amount in room.left.items()}
    moves = []
    unplaced: set[tuple[tuple[str, float], ...]] = set()
    for victim, task in itertools.chain([first], waiting) if free else ():
        needs = _needs(task)
        kind = tuple(sorted(needs.items()))
        if kind in unplaced or any(most.get(name, 0.0) < amount - _EXACT for name, amount in kind):
            continue
        fits = (worker for worker, room in free.items() if worker is not victim and room.fits(needs))
        fitting = list(itertools.islice(fits, _CHOICE))
        if not fitting:
            unplaced.add(kind)
        elif thief := _best(scheduler, task, victim, fitting):
            moves.append((task, victim, thief))
            free[thief].take(needs)
            if not free[thief].threads:
                del free[thief]
    return moves


class _FreeCapacity:
    """The free threads and resources of a worker that runs some tasks."""

    def __init__(self, worker: WorkerState, tasks: Collection[TaskState]) -> None:
        used = _used(tasks)
        self.threads = worker.nthreads - len(tasks)
        self.left = {name: amount - used.get(name, 0.0) for name, amount in worker.resources.items()}

    def fits(self, needs: Amounts) -> bool:
        """Whether one more task with these needs could run now."""
        return self.threads > 0 and all(self.left.get(name, 0.0) >= amount - _EXACT for name, amount in needs.items())

    def take(self, needs: Amounts) -> None:
        """Count a task with these needs as running."""
        self.threads -= 1
        for name, amount in needs.items():
            self.left[name] = self.left.get(name, 0.0) - amount


def _needs(task: TaskState) -> Amounts:
    return task.resource_restrictions or {}


def _used(tasks: Iterable[TaskState]) -> Amounts:
    """Return the sum of the resources that tasks need."""
    used: Amounts = defaultdict(float)
    for task in tasks:
        for name, amount in _needs(task).items():
            used[name] += amount
    return used


def _waiting(scheduler: Scheduler) -> Iterator[tuple[WorkerState, TaskState]]:
    """Yield the tasks with resources that their worker cannot run now, in the order of their priority."""
    at_most = math.ceil(_SAMPLE / max(1, len(scheduler.workers)))
    for worker in scheduler.workers.values():
        if not worker.resources or len(worker.processing) < 2:
            continue
        begun = {*worker.executing, *worker.long_running}  # as of its last heartbeat
        room = _FreeCapacity(worker, begun)
        sample = itertools.islice(worker.processing, max(at_most, 2 * worker.nthreads))
        there = [task for task in sample if task not in begun]
        for task in sorted(there, key=lambda task: task.priority):
            if room.fits(_needs(task)):
                room.take(_needs(task))
            elif _needs(task):
                yield worker, task


def _best(scheduler: Scheduler, task: TaskState, victim: WorkerState, fitting: list[WorkerState]) -> WorkerState | None:
    """Return the worker to which a task moves: the one that has most of its data.

    None if no worker may run the task, or if moving its data would take longer than another task of its kind.
    """
    if task.worker_restrictions or task.host_restrictions:
        allowed = scheduler.valid_workers(task) or ()
        fitting = [worker for worker in fitting if worker in allowed]
    if not fitting:
        return None
    costs = {worker: scheduler.get_comm_cost(task, worker) for worker in fitting}
    best = min(fitting, key=lambda worker: (costs[worker], len(worker.processing)))
    gain = expected_duration(task.prefix)
    return best if costs[best] <= scheduler.get_comm_cost(task, victim) + gain else None


def expected_duration(kind: TaskPrefix) -> float:
    """Return how many seconds a task of this kind takes, as distributed's own adaptive scaling estimates it."""
    if kind.duration_average >= 0:
        return float(kind.duration_average)
    if kind.max_exec_time > 0:  # no task of this kind has ended yet
        return 2 * float(kind.max_exec_time)
    return float(parse_timedelta(dask.config.get("distributed.scheduler.unknown-task-duration")))
