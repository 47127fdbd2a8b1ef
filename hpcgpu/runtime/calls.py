"""Calls that run on workers and are no tasks: of `Client.run`, of a library that broadcasts, of actors.

Dask's scheduler does not know of them. A worker counts those that it runs and reports the number with its heartbeats.
It sends none while a plain function runs on its event loop: the scheduler counts those that it passes on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickletools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.utils import All

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

__all__ = ["METRIC", "Calls", "count"]

#: The name of the number of calls in what a worker tells the scheduler.
METRIC = "hpcgpu-calls"
#: Operations of a worker that run code of the user.
_OPERATIONS = ("run", "run_coroutine", "actor_execute")
#: Bytes of a function in which its name is looked for.
_READ = 100_000
#: Seconds without a heartbeat after which the nanny of a worker with a call is asked, and for its answer.
_SILENT, _ANSWER = 1.0, 10.0


class Calls:
    """The calls that run on the workers of a scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Its method `broadcast` is replaced: `Scheduler.proxy` and plugins use it too.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        #: What was passed on to each worker, and has not been answered: its names.
        self._passed_on: dict[str, list[str]] = {}
        self._broadcast = scheduler.broadcast
        scheduler.broadcast = self.broadcast

    def running(self, ws: WorkerState) -> int:
        """Return how many calls a worker runs, as far as they are known here."""
        return len(self.names(ws))

    def names(self, ws: WorkerState) -> list[str]:
        """Return the names of the calls that a worker runs; empty for those that it alone knows."""
        known = self._passed_on.get(ws.address, [])
        return known + [""] * (int(ws.metrics.get(METRIC) or 0) - len(known))

    async def see_silent(self) -> None:
        """Count workers as seen whose nannies answer, and whose event loop a call holds: they send no heartbeats.

        Dask would end them, and the call, after ``distributed.scheduler.worker-ttl``. A worker whose process ends loses
        its connection to the scheduler; a node that stands still does not answer.
        """

        async def ask(ws: WorkerState) -> None:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self.scheduler.rpc(ws.nanny).identity(), _ANSWER)
                ws.last_seen = time.time()

        silent = time.time() - _SILENT
        workers = self.scheduler.workers.values()
        await asyncio.gather(*[ask(ws) for ws in workers if ws.nanny and ws.last_seen < silent and self.running(ws)])

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

        name = _function_name(msg.get("function"))

        async def pass_on(address: str) -> dict[str, Any]:
            calls = self._passed_on.setdefault(address, [])
            calls.append(name)
            try:
                answer: dict[str, Any] = await self._broadcast(msg=msg, workers=[address], **options)
                return answer
            finally:
                calls.remove(name)
                if not calls and self._passed_on.get(address) is calls:
                    del self._passed_on[address]

        return {
            address: answer
            for one in await All([pass_on(address) for address in addresses])
            for address, answer in one.items()
        }


def _function_name(function: object) -> str:
    """Return the name of a function as a client sends it; empty if it is not known.

    It is pickled, and is not unpickled here: its modules may not be there.
    """
    if isinstance(function, str):  # a method of an actor
        return function
    if not isinstance(function, bytes) or len(function) > _READ:
        return ""
    memo: list[object] = []
    strings: list[str] = []
    last: object = None
    with suppress(Exception):  # whatever it is that was sent, only its name is missing then
        for operation, argument, _ in pickletools.genops(function):
            if operation.name == "MEMOIZE":
                memo.append(last)
                continue
            last = memo[argument] if operation.name in ("BINGET", "LONG_BINGET") else argument  # type: ignore[index]
            if isinstance(last, str):
                if strings and strings[-1] == "__qualname__":  # the state of a function that is pickled by value
                    return last.rpartition(".")[2]
                strings.append(last)
            elif operation.name == "STACK_GLOBAL" and len(strings) == 2 and not strings[0].startswith("cloudpickle"):
                return strings[1] if strings[1] not in ("getattr", "partial") else ""
    return ""


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
