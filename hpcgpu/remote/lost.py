"""Whoever waits for results of a scheduler that is gone hears why: which job it was, and what the queue says.

A client of Dask knows nothing of a queue. It says "Client lost the connection", or waits for half a minute and says
that its futures were cancelled, "reason: unknown".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from distributed import Client
from distributed.client import FutureCancelledError

from hpcgpu.batch.reasons import explain
from hpcgpu.errors import BatchError
from hpcgpu.posix.threads import in_thread
from hpcgpu.remote.lookup import batch_of
from hpcgpu.runtime.reach import SchedulerWatch
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["ask", "ask_queue"]

#: Seconds that the answer may take: the queue knows of the end of a job a little later.
_PATIENCE = 25.0
_GONE = "the scheduler is gone"
#: Seconds in which a client notices that its scheduler is gone, where it fetches results.
_NOTICED = 3.0
#: By the address of a scheduler: who may know why it is gone.
_asked: dict[str, list[Callable[[], Awaitable[str]]]] = {}


def ask(address: str, why: Callable[[], Awaitable[str]]) -> None:
    """Let clients of this program ask why their scheduler is gone, before they cancel what they wait for.

    Parameters
    ----------
    address : str
        Of the scheduler.
    why : callable
        Returns the reason; empty if there is none to tell.
    """
    _asked.setdefault(address, []).append(why)
    if Client._reconnect.__module__ == __name__:
        return
    reconnect, handle_report, gather_remote = Client._reconnect, Client._handle_report, Client._gather_remote

    async def asks_and_reconnects(self: Client) -> Any:
        await _tell(self)
        return await reconnect(self)

    async def asks_at_the_end(self: Client) -> Any:
        await handle_report(self)
        if self.status == "running":  # the scheduler has closed the connection, not this client
            await _tell(self)

    async def asks_while_it_fetches(self: Client, *arguments: Any) -> Any:
        key, address = next(iter(self._gather_keys or ()), ""), self.scheduler.address
        try:
            return await gather_remote(self, *arguments)
        except OSError as error:
            if await _is_gone(self) and (reason := await _reason(address)):
                raise FutureCancelledError(key, _GONE, reason) from error
            raise

    Client._reconnect, Client._handle_report = asks_and_reconnects, asks_at_the_end
    Client._gather_remote = asks_while_it_fetches


def ask_queue(address: str, directory: ClusterDirectory) -> None:
    """Let clients of this program ask the queue why the scheduler of a cluster is gone."""
    ask(address, lambda: in_thread(_said, directory))


async def _tell(client: Client) -> None:
    """Let all that waits for results of a client fail, with the reason."""
    if client.scheduler is None or not client.futures:
        return
    if reason := await _reason(client.scheduler.address):
        for state in list(client.futures.values()):
            state.cancel(reason=_GONE, msg=reason)
        client.futures.clear()


async def _is_gone(client: Client) -> bool:
    """Whether a client has lost its scheduler, which it notices soon after a request of it has failed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_NOTICED):
            while client.status == "running" and client.scheduler_comm and not client.scheduler_comm.closed():
                await asyncio.sleep(0.05)
            return True
    return False


async def _reason(address: str) -> str:
    """Return why a scheduler is gone; empty if nobody knows."""
    if asked := _asked.get(address):
        with suppress(TimeoutError):
            for answer in asyncio.as_completed([why() for why in asked], timeout=_PATIENCE):
                if reason := await answer:
                    return reason
    return ""


def _said(directory: ClusterDirectory) -> str:
    """Return what the queue says of the end of a scheduler job."""
    name, until = directory.path.name, time.monotonic() + _PATIENCE - 5
    try:
        batch = batch_of(directory)
        queue = SchedulerWatch(directory, batch)
        while time.monotonic() < until:
            status = queue.poll(now=time.monotonic())
            if status is not None and status.state.ended:
                log = saved.logs(directory) / batch.log_name(status.name, status.job_id)
                return (
                    f"the scheduler of cluster {name} is gone: scheduler job {status.job_id} {status.state.value}: "
                    f"{explain(status, kind='scheduler')}. Log: {log}"
                )
            time.sleep(0.5)
        if directory.closing:
            return f"cluster {name} was closed; its logs are in {directory.logs}"
    except (BatchError, OSError, ValueError):  # the directory was removed, or the queue is away
        pass
    return ""
