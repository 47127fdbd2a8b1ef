"""Calls that run on workers and are no tasks: of `Client.run`, of a library that broadcasts, of actors.

Dask's scheduler does not know of them. A worker counts those that it runs and reports the number with its heartbeats.
It sends none while a plain function runs on its event loop: the scheduler counts those that it passes on.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from distributed.utils import All

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

__all__ = ["METRIC", "Calls", "count"]

#: The name of the number of calls in what a worker tells the scheduler.
METRIC = "hpcgpu-calls"
#: Operations of a worker that run code of the user.
_OPERATIONS = ("run", "run_coroutine", "actor_execute")


class Calls:
    """The calls that run on the workers of a scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Its method `broadcast` is replaced: `Scheduler.proxy` and plugins use it too.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._passed_on: Counter[str] = Counter()
        self._broadcast = scheduler.broadcast
        scheduler.broadcast = self.broadcast

    def running(self, ws: WorkerState) -> int:
        """Return how many calls a worker runs, as far as they are known here."""
        return max(self._passed_on[ws.address], int(ws.metrics.get(METRIC) or 0))

    async def broadcast(
        self, *, msg: dict[str, Any], workers: Any = None, hosts: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Send a message to workers as `Scheduler.broadcast` does, and count what runs on each until it answers."""
        if msg.get("op") not in _OPERATIONS:
            answers: dict[str, Any] = await self._broadcast(msg=msg, workers=workers, hosts=hosts, **options)
            return answers
        known = self.scheduler.host_info
        addresses = list(workers) if workers is not None else [] if hosts is not None else list(self.scheduler.workers)
        addresses += [address for host in hosts or () for address in known.get(host, {}).get("addresses", ())]

        async def pass_on(address: str) -> dict[str, Any]:
            self._passed_on[address] += 1
            try:
                answer: dict[str, Any] = await self._broadcast(msg=msg, workers=[address], **options)
                return answer
            finally:
                self._passed_on[address] -= 1
                self._passed_on += Counter()  # forgets the workers that run none

        return {
            address: answer
            for one in await All([pass_on(address) for address in addresses])
            for address, answer in one.items()
        }


def count(worker: Any) -> None:
    """Let a worker count the calls that it runs, and report their number with its heartbeats."""
    begun: set[object] = set()
    for operation in _OPERATIONS:
        worker.handlers[operation] = _counted(worker, worker.handlers[operation], begun)
    worker.metrics[METRIC] = lambda worker: len(begun)


def _counted(worker: Any, handler: Callable[..., Any], begun: set[object]) -> Callable[..., Awaitable[Any]]:
    """Return a handler of a worker that puts each of its calls into `begun` for as long as it runs."""

    @functools.wraps(handler)  # distributed looks at the names of its arguments
    async def counted(*arguments: Any, **options: Any) -> Any:
        call = object()
        begun.add(call)
        before = set(worker._ongoing_background_tasks._ongoing_tasks)
        try:
            answer = handler(*arguments, **options)
            return await answer if inspect.isawaitable(answer) else answer
        finally:
            begun.discard(call)
            if options.get("wait") is False:  # it goes on after the answer
                for task in set(worker._ongoing_background_tasks._ongoing_tasks) - before:
                    begun.add(task)
                    task.add_done_callback(begun.discard)

    return counted
