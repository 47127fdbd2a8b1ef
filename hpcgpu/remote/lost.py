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
    reconnect, handle_report = Client._reconnect, Client._handle_report

    async def asks_and_reconnects(self: Client) -> Any:
        await _tell(self)
        return await reconnect(self)

    async def asks_at_the_end(self: Client) -> Any:
        await handle_report(self)
        if self.status == "running":  # the scheduler has closed the connection, not this client
            await _tell(self)

    Client._reconnect, Client._handle_report = asks_and_reconnects, asks_at_the_end


def ask_queue(address: str, directory: ClusterDirectory) -> None:
    """Let clients of this program ask the queue why the scheduler of a cluster is gone."""
    ask(address, lambda: in_thread(_said, directory))


async def _tell(client: Client) -> None:
    """Let all that waits for results of a client fail, with the reason."""
    asked = _asked.get(client.scheduler.address) if client.scheduler is not None else None
    if not asked or not client.futures:
        return
    reason = ""
    with suppress(TimeoutError):
        for answer in asyncio.as_completed([why() for why in asked], timeout=_PATIENCE):
            if reason := await answer:
                break
    if reason:
        for state in list(client.futures.values()):
            state.cancel(reason="the scheduler is gone", msg=reason)
        client.futures.clear()


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
