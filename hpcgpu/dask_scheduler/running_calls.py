"""Calls that run on workers and are no tasks: by `Client.run`, by a library that broadcasts, of actors.

Dask's scheduler does not count such calls. A worker counts the calls that it runs (`hpcgpu.dask_worker.count_calls`),
and reports the number with its heartbeats. It sends no heartbeats while a plain function runs on its event loop. So the
scheduler counts the calls that it passes on.
"""

from __future__ import annotations

import asyncio
import pickletools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.utils import All
from tornado.ioloop import PeriodicCallback

from hpcgpu.dask_worker.count_calls import METRIC, OPERATIONS

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState


#: Bytes of a pickled function in which its name is searched.
_READ = 100_000
#: Least seconds without a heartbeat after which the nanny of a worker with a call is queried; seconds for the answer.
_SILENT, _ANSWER = 1.0, 10.0


class Calls:
    """The calls that run on the workers of a scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Its method `broadcast` is replaced: `Scheduler.proxy` and plugins use it too.
    held : callable
        Whether a program holds a worker. That counts as a call.
    """

    def __init__(self, scheduler: Scheduler, held: Callable[[WorkerState], bool] = lambda ws: False) -> None:
        self.scheduler, self._held = scheduler, held
        #: The names of the calls that were passed on to each worker and are not answered yet.
        self._forwarded: dict[str, list[str]] = {}
        self._broadcast = scheduler.broadcast
        scheduler.broadcast = self.broadcast
        self.silent = PeriodicCallback(self.see_silent, _SILENT * 1000)

    def running(self, ws: WorkerState) -> int:
        """Return how many calls a worker runs, as far as the scheduler knows."""
        return len(self.names(ws)) + self._held(ws)

    def names(self, ws: WorkerState) -> list[str]:
        """Return the names of the calls that a worker runs; a name is empty if only the worker knows it."""
        known = self._forwarded.get(ws.address, [])
        return known + [""] * (int(ws.metrics.get(METRIC) or 0) - len(known))

    async def see_silent(self) -> None:
        """Count a worker as seen if its nanny answers while a call blocks the event loop and so its heartbeats.

        Dask would end such a worker, and the call, after ``distributed.scheduler.worker-ttl``. If the process of a
        worker ends, its connection to the scheduler breaks; the nanny on a node that hangs does not answer.
        """
        if not (limit := self.scheduler.worker_ttl):  # the user has switched this timeout off
            return

        async def query_nanny(ws: WorkerState) -> None:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self.scheduler.rpc(ws.nanny).identity(), _ANSWER)
                ws.last_seen = time.time()

        silent = time.time() - max(limit / 4, _SILENT)
        workers = self.scheduler.workers.values()
        await asyncio.gather(
            *[query_nanny(ws) for ws in workers if ws.nanny and ws.last_seen < silent and self.running(ws)]
        )

    async def broadcast(
        self, *, msg: dict[str, Any], workers: Any = None, hosts: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Send a message to workers as `Scheduler.broadcast` does; count it as a call until a worker answers."""
        if msg.get("op") not in OPERATIONS:
            answers: dict[str, Any] = await self._broadcast(msg=msg, workers=workers, hosts=hosts, **options)
            return answers
        known = self.scheduler.host_info
        addresses = list(workers) if workers is not None else [] if hosts is not None else list(self.scheduler.workers)
        addresses += [address for host in hosts or () for address in known.get(host, {}).get("addresses", ())]

        name = _function_name(msg.get("function"))

        async def forward(address: str) -> dict[str, Any]:
            calls = self._forwarded.setdefault(address, [])
            calls.append(name)
            try:
                answer: dict[str, Any] = await self._broadcast(msg=msg, workers=[address], **options)
                return answer
            finally:
                calls.remove(name)
                if not calls and self._forwarded.get(address) is calls:
                    del self._forwarded[address]

        return {
            address: answer
            for one in await All([forward(address) for address in addresses])
            for address, answer in one.items()
        }


def _function_name(function: object) -> str:
    """Return the name of a function as a client sends it; empty if it is not known.

    The function is pickled, and is not unpickled here: its modules may be missing.
    """
    if isinstance(function, str):  # a method of an actor
        return function
    if not isinstance(function, bytes) or len(function) > _READ:
        return ""
    memo: list[object] = []
    strings: list[str] = []
    last: object = None
    with suppress(Exception):  # for any content: only the name is missing then
        for operation, argument, _ in pickletools.genops(function):
            if operation.name == "MEMOIZE":
                memo.append(last)
                continue
            last = memo[argument] if operation.name in ("BINGET", "LONG_BINGET") else argument  # type: ignore[index]
            if isinstance(last, str):
                if strings and strings[-1] == "__qualname__":  # the state of a function pickled by value
                    return last.rpartition(".")[2]
                strings.append(last)
            elif operation.name == "STACK_GLOBAL" and len(strings) == 2 and not strings[0].startswith("cloudpickle"):
                return strings[1] if strings[1] not in ("getattr", "partial") else ""
    return ""
