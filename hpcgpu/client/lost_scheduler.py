"""Says that the scheduler of a cluster is lost, and why: in one sentence, also to a client that waits for results.

A Dask client has no access to a queue. It reports "Client lost the connection", or waits for half a minute and reports
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
from hpcgpu.existing_clusters.lookup import batch_of
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.scheduler_connection import SchedulerWatch
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory

#: Seconds that the answer may take: the queue reports the end of a job with a delay.
_TIMEOUT = 25.0
_GONE = "the scheduler is gone"
#: If the scheduler ran in this process.
IN_PROCESS = "the scheduler in this process has ended: make a new cluster"
#: Seconds in which a client that fetches results notices that its scheduler is gone.
_NOTICED = 3.0
#: By the address of a scheduler: the functions that may return why it is gone.
_explanations: dict[str, list[Callable[[], Awaitable[str]]]] = {}


def loss(cluster: str, job: str, consequence: str = "") -> str:
    """Return the sentence that the scheduler of a cluster is lost; `job` says how its job ended."""
    return f"the scheduler of cluster {cluster} is gone{consequence}: {job}"


def explain_loss(address: str, why: Callable[[], Awaitable[str]]) -> None:
    """Let clients of this program look up why their scheduler is gone, before they cancel their futures.

    Parameters
    ----------
    address : str
        Address of the scheduler.
    why : callable
        Returns the reason; empty if it is not known.
    """
    _explanations.setdefault(address, []).append(why)
    if Client._reconnect.__module__ == __name__:
        return
    reconnect, handle_report, gather_remote = Client._reconnect, Client._handle_report, Client._gather_remote

    async def explain_and_reconnect(self: Client) -> Any:
        await _cancel_all(self)
        return await reconnect(self)

    async def explain_at_the_end(self: Client) -> Any:
        await handle_report(self)
        if self.status == "running":  # the scheduler has closed the connection, not this client
            await _cancel_all(self)

    async def explain_while_it_fetches(self: Client, *arguments: Any) -> Any:
        address = self.scheduler.address
        try:
            return await gather_remote(self, *arguments)
        except OSError as error:
            if await _is_gone(self) and (reason := await _reason(address)):
                raise FutureCancelledError("a result", _GONE, reason) from error
            raise

    Client._reconnect, Client._handle_report = explain_and_reconnect, explain_at_the_end
    Client._gather_remote = explain_while_it_fetches


def explain_loss_by_queue(address: str, directory: ClusterDirectory) -> None:
    """Let clients of this program query the queue why the scheduler of a cluster is gone."""
    explain_loss(address, lambda: in_thread(_end_in_queue, directory))


async def _cancel_all(client: Client) -> None:
    """Let all waiting futures of a client fail, with the reason."""
    if client.scheduler is None or not client.futures:
        return
    if reason := await _reason(client.scheduler.address):
        for state in list(client.futures.values()):
            state.cancel(reason=_GONE, msg=reason)
        client.futures.clear()


async def _is_gone(client: Client) -> bool:
    """Whether a client has lost its scheduler. The client notices that soon after one of its requests has failed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_NOTICED):
            while client.status == "running" and client.scheduler_comm and not client.scheduler_comm.closed():
                await asyncio.sleep(0.05)
            return True
    return False


async def _reason(address: str) -> str:
    """Return why a scheduler is gone; empty if nobody knows."""
    if explanations := _explanations.get(address):
        with suppress(TimeoutError):
            for answer in asyncio.as_completed([why() for why in explanations], timeout=_TIMEOUT):
                if reason := await answer:
                    return reason
    return ""


def _end_in_queue(directory: ClusterDirectory) -> str:
    """Return a sentence about the end of a scheduler job, as the queue reports it."""
    name, until = directory.path.name, time.monotonic() + _TIMEOUT - 5
    try:
        batch = batch_of(directory)
        queue = SchedulerWatch(directory, batch)
        while time.monotonic() < until:
            status = queue.poll(now=time.monotonic())
            if status is not None and status.state.ended:
                log = saved_options.logs(directory) / batch.log_name(status.name, status.job_id)
                how = f"{status.state.value}: {explain(status, kind='scheduler')}. Log: {log}"
                return loss(name, f"scheduler job {status.job_id} {how}")
            time.sleep(0.5)
        if directory.closing:
            return f"cluster {name} was closed; its logs are in {directory.logs}"
    except (BatchError, OSError, ValueError):  # the directory was removed, or the queue does not answer
        pass
    return ""
