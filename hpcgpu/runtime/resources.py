"""Tasks that need resources of a worker: how many run at once, and which ones another worker could run now.

Distributed gives such a task to a worker as soon as there is one that could ever run it, and moves it later only if
that worker has more tasks than threads (dask/distributed#1851). Eight tasks, of which a worker with eight threads can
run one at a time, would stay on the first worker that connects, and run one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState
    from distributed.stealing import WorkStealing

__all__ = ["at_once", "move_waiting"]

#: This number of tasks is looked at, all workers together; at least two for each thread.
_SAMPLE = 1000
#: This number of workers that could run a task now is compared.
_CHOICE = 20
#: Amounts are sums of floating-point numbers.
_EXACT = 1e-9

Amounts = dict[str, float]


def at_once(worker: WorkerState, at_most: int) -> int:
    """Return how many tasks such as a worker has it can run at once, with its threads and its resources.

    `at_most` tasks are looked at.
    """
    there = worker.resources
    sample = list(itertools.islice(worker.processing, at_most)) if there else []
    share = max((amount / there[name] for name, amount in _used(sample).items() if there.get(name)), default=0.0)
    slots = math.floor(len(sample) / share + _EXACT) if share else worker.nthreads
    return max(1, min(int(worker.nthreads), slots))


def move_waiting(scheduler: Scheduler) -> None:
    """Move tasks that wait for the resources of their worker to workers that have these resources free now.

    The stealing of distributed moves them: it asks the worker first, which keeps what it has begun. Without stealing
    (``distributed.scheduler.work-stealing``) nothing moves.
    """
    stealing: WorkStealing | None = scheduler.extensions.get("stealing")
    if stealing is not None:
        for task, victim, thief in _moves(scheduler, stealing):
            stealing.move_task_request(task, victim, thief)


def _moves(scheduler: Scheduler, stealing: WorkStealing) -> list[tuple[TaskState, WorkerState, WorkerState]]:
    """Return which tasks move, from where, and to where."""
    waiting = _waiting(scheduler, stealing)
    if (first := next(waiting, None)) is None:  # nearly always, and it is asked five times a second
        return []
    coming = defaultdict(list)
    for task, info in stealing.in_flight.items():
        coming[info["thief"]].append(task)
    free = {
        worker: _Room(worker, [*worker.processing, *coming[worker]])
        for worker in scheduler.running
        if worker.resources and len(worker.processing) + len(coming[worker]) < worker.nthreads
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


class _Room:
    """The threads and the resources that a worker has beside some tasks."""

    def __init__(self, worker: WorkerState, tasks: Collection[TaskState]) -> None:
        used = _used(tasks)
        self.threads = worker.nthreads - len(tasks)
        self.left = {name: amount - used.get(name, 0.0) for name, amount in worker.resources.items()}

    def fits(self, needs: Amounts) -> bool:
        """Whether another task that needs this could run at once."""
        return self.threads > 0 and all(self.left.get(name, 0.0) >= amount - _EXACT for name, amount in needs.items())

    def take(self, needs: Amounts) -> None:
        """Count a task that needs this as one that runs."""
        self.threads -= 1
        for name, amount in needs.items():
            self.left[name] = self.left.get(name, 0.0) - amount


def _needs(task: TaskState) -> Amounts:
    return task.resource_restrictions or {}


def _used(tasks: Iterable[TaskState]) -> Amounts:
    """Return what tasks need together."""
    used: Amounts = defaultdict(float)
    for task in tasks:
        for name, amount in _needs(task).items():
            used[name] += amount
    return used


def _waiting(scheduler: Scheduler, stealing: WorkStealing) -> Iterator[tuple[WorkerState, TaskState]]:
    """Yield the tasks with resources that their worker cannot run at once, those of the highest priority first."""
    at_most = math.ceil(_SAMPLE / max(1, len(scheduler.workers)))
    for worker in scheduler.workers.values():
        if not worker.resources or len(worker.processing) < 2:
            continue
        begun = {*worker.executing, *worker.long_running}  # as of its last heartbeat
        room = _Room(worker, begun)
        sample = itertools.islice(worker.processing, max(at_most, 2 * worker.nthreads))
        there = [task for task in sample if task not in begun and task not in stealing.in_flight]
        for task in sorted(there, key=lambda task: task.priority):
            if room.fits(_needs(task)):
                room.take(_needs(task))
            elif _needs(task):
                yield worker, task


def _best(scheduler: Scheduler, task: TaskState, victim: WorkerState, fitting: list[WorkerState]) -> WorkerState | None:
    """Return the worker to which a task moves: the one that has most of its data.

    None if none may run it, or if its data would take longer than another task of its kind.
    """
    if task.worker_restrictions or task.host_restrictions:
        allowed = scheduler.valid_workers(task) or ()
        fitting = [worker for worker in fitting if worker in allowed]
    if not fitting:
        return None
    costs = {worker: scheduler.get_comm_cost(task, worker) for worker in fitting}
    best = min(fitting, key=lambda worker: (costs[worker], len(worker.processing)))
    gain = scheduler._get_prefix_duration(task.prefix)
    return best if costs[best] <= scheduler.get_comm_cost(task, victim) + gain else None
