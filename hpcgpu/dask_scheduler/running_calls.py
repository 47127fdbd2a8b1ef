"""Calls that run on workers and are no tasks: by `Client.run`, by a library that broadcasts, of actors.

Dask's scheduler does not count such calls. A worker counts the calls that it runs (`hpcgpu.dask_worker.count_calls`),
and reports the number with its heartbeats. It sends no heartbeats while a plain function runs on its event loop. So the
scheduler counts the calls of clients that it passes on to workers.
"""

from __future__ import annotations

import asyncio
import pickletools
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.utils import All
from tornado.ioloop import PeriodicCallback

from hpcgpu.dask_worker.count_calls import METRIC, OPERATIONS
from hpcgpu.dask_worker.run_ranked import run_ranked

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

    from hpcgpu.dask_scheduler.time_limits import Silence


#: Bytes of a pickled function in which its name is searched.
_READ = 100_000
#: Least seconds without a heartbeat after which the nanny of a worker with a call is queried; seconds for the answer.
_SILENT, _ANSWER = 1.0, 10.0
#: Seconds after the failure of a call on one worker in which the others answer, or their loss is noticed.
_SETTLES = 2.0


class Calls:
    """The calls that run on the workers of a scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    silence : Silence
        Of its workers.
    held : callable
        Whether a program holds a worker. That counts as a call.
    """

    def __init__(
        self, scheduler: Scheduler, silence: Silence, held: Callable[[WorkerState], bool] = lambda ws: False
    ) -> None:
        self.scheduler, self._silence, self._is_held = scheduler, silence, held
        #: The names of the calls that were passed on to each worker and are not answered yet.
        self._forwarded: dict[str, list[str]] = {}
        self.silent = PeriodicCallback(self.query_silent_workers, _SILENT * 1000)

    def running(self, ws: WorkerState) -> int:
        """Return how many calls a worker runs, as far as the scheduler has a record."""
        return len(self.names(ws)) + self._is_held(ws)

    def names(self, ws: WorkerState) -> list[str]:
        """Return the names of the calls that a worker runs; a name is empty if only the worker has it."""
        known = self._forwarded.get(ws.address, [])
        return known + [""] * (int(ws.metrics.get(METRIC) or 0) - len(known))

    def forwarded(self, ws: WorkerState) -> list[str]:
        """Return the names of the calls that were passed on to a worker and are not answered yet."""
        return self._forwarded.get(ws.address, [])

    async def calls(self, workers: Collection[str]) -> dict[str, list[str]]:
        """Return which calls that were passed on still run on these workers: names of calls by the name of a worker."""
        known = [self.scheduler.workers[address] for address in workers if address in self.scheduler.workers]
        return {str(ws.name): list(self.forwarded(ws)) for ws in known if self.forwarded(ws)}

    async def query_silent_workers(self) -> None:
        """End the silence of a worker whose nanny answers while a call blocks the event loop and so its heartbeats.

        Such a worker would be restarted, and the call lost, after ``distributed.scheduler.worker-ttl``. If the process
        of a worker ends, its connection to the scheduler breaks; the nanny on a node that hangs does not answer.
        """
        if not (limit := self._silence.limit):  # the user has switched this timeout off
            return

        async def query_nanny(ws: WorkerState) -> None:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self.scheduler.rpc(ws.nanny).identity(), _ANSWER)
                self._silence.end(ws)

        least, workers = max(limit / 4, _SILENT), self.scheduler.workers.values()
        silent = [ws for ws in workers if ws.nanny and self._silence.seconds(ws) > least and self.running(ws)]
        await asyncio.gather(*map(query_nanny, silent))

    async def broadcast(
        self,
        *,
        msg: dict[str, Any],
        workers: Any = None,
        hosts: Any = None,
        until_failure: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Send a message to workers as `Scheduler.broadcast` does; count it as a call until a worker answers.

        With `until_failure`, return the answers in their order: all, or those that are there soon after one failed. The
        others may wait for that one for ever.
        """
        if msg.get("op") not in OPERATIONS:
            answers: dict[str, Any] = await self.scheduler.broadcast(msg=msg, workers=workers, hosts=hosts, **options)
            return answers
        known = self.scheduler.host_info
        addresses = list(workers) if workers is not None else [] if hosts is not None else list(self.scheduler.workers)
        addresses += [address for host in hosts or () for address in known.get(host, {}).get("addresses", ())]

        name = _function_name(msg.get("function"))
        if name == run_ranked.__name__:  # the user's function is its first argument
            name = _function_name(bytes((msg.get("args") or b"")[:_READ]))

        async def forward(address: str) -> dict[str, Any]:
            calls = self._forwarded.setdefault(address, [])
            calls.append(name)
            try:
                answer: dict[str, Any] = await self.scheduler.broadcast(msg=msg, workers=[address], **options)
                return answer
            finally:
                calls.remove(name)
                if not calls and self._forwarded.get(address) is calls:
                    del self._forwarded[address]

        calls = [forward(address) for address in addresses]
        answered = await (_until_failure(calls) if until_failure else All(calls))
        return {address: answer for one in answered for address, answer in one.items()}


#: The calls of which nobody reads the answer any more; asyncio does not keep them.
_unread: set[asyncio.Future[dict[str, Any]]] = set()


async def _until_failure(calls: Iterable[Coroutine[Any, Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return answers in the order in which they come: all, or those that come within `_SETTLES` after a failure."""
    answers: list[dict[str, Any]] = []
    running = {asyncio.ensure_future(call) for call in calls}
    ended = asyncio.Queue[asyncio.Future[dict[str, Any]]]()
    _unread.update(running)
    for call in running:
        call.add_done_callback(_unread.discard)
        call.add_done_callback(ended.put_nowait)
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            while len(answers) < len(running):
                answers.append((await ended.get()).result())
                if limit.when() is None and any(_failed(answer) for answer in answers[-1].values()):
                    limit.reschedule(asyncio.get_running_loop().time() + _SETTLES)
    return answers


def _failed(answer: Any) -> bool:
    """Whether a worker has answered that a call failed, or cannot be reached: then the answer is a pickled error."""
    return isinstance(answer, bytes) or answer["status"] == "error"


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
