"""Reports that the scheduler of a cluster is lost, and why: in one sentence, also to a client that waits for results.

A Dask client has no access to a queue. It reports "Client lost the connection", or waits for half a minute and reports
that its futures were cancelled, "reason: unknown".
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from hpcgpu.batch.base import JobStatus
from hpcgpu.batch.reasons import explain
from hpcgpu.client import futures_to_replay
from hpcgpu.client.futures_to_replay import FuturesToReplay
from hpcgpu.client.replayed_graphs import Plan
from hpcgpu.display.warn import warn
from hpcgpu.errors import BatchError, ClusterWarning, HpcgpuError
from hpcgpu.existing_clusters.lookup import batch_of
from hpcgpu.existing_clusters.query_jobs import ended_by_itself
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.scheduler_connection import ConnectionResult, SchedulerWatch, identify
from hpcgpu.scaling.scheduler_restarts import ended_too_early
from hpcgpu.store import saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.present_scheduler import waits_to_follow

#: Seconds that the answer may take, and those of them in which the queue may report the end of a job with a delay.
_TIMEOUT, END_REPORTED = 25.0, 20.0
_GONE, _SILENT = "the scheduler is gone", "the scheduler does not answer"
#: What follows if the scheduler is restarted.
RESTARTED = (
    " and another one is started. The worker jobs wait for it. It has the uploaded packages, and the published "
    "datasets that were saved; all other results and the plugins are lost. A block of `replay` submits its futures "
    "again; without it, run your work again"
)
#: What is reported in its place if no scheduler has followed.
NOT_RESTARTED = ", and no other one has followed, so start a new cluster"
#: What follows if it is not.
CANCELLED = ", and its worker jobs are cancelled"
_NOT_KNOWN = "the connection to the scheduler is broken: run your work again"
#: If the scheduler ran in this process.
IN_PROCESS = "the scheduler in this process has ended: make a new cluster"
#: Seconds in which a client that fetches results notices that its scheduler is gone.
_NOTICED = 3.0
#: The same in a block of `replay`: a node that is switched off breaks the connections of a client one after the other.
_NOTICED_BY_ALL = 15.0
#: Seconds that the next scheduler may take to answer, and the last one, if it lives.
_CONNECT, _CONNECT_AGAIN = 30.0, 5.0
#: Seconds between two checks for the next scheduler.
_INTERVAL = 1.0
#: Requests that go to all workers there are, and how many seconds they wait for the first worker of the next scheduler.
_FOR_WORKERS, _WORKERS_COME = ("broadcast", "scatter"), 60
#: By the address of a scheduler: the functions that may return why it is gone.
_explanations: dict[str, list[Callable[[], Awaitable[str]]]] = {}
#: By the address of a scheduler: the function that waits for the next scheduler of its cluster.
_successors: dict[str, Callable[[], Awaitable[str]]] = {}


#: By the address of a scheduler that clients of this program have followed: the directory of its cluster.
followed: dict[str, Path] = {}


def loss(cluster: str, job: str, consequence: str = "") -> str:
    """Return the sentence that the scheduler of a cluster is lost; `job` describes how its job ended."""
    return f"the scheduler of cluster {cluster} is gone{consequence}: {job}"


def no_answer(cluster: str, status: JobStatus) -> str:
    """Return the sentence that the scheduler of a cluster does not answer, and why its job may do nothing."""
    words = explain(status, kind="scheduler")
    return f"the scheduler of cluster {cluster} does not answer: scheduler job {status.job_id} runs, but {words}"


def _what(reason: str) -> str:
    """Return in short what a reason reports of the scheduler: its job has ended, or only that it does not answer."""
    return _SILENT if re.match(r"the scheduler of cluster \S+ does not answer:", reason) else _GONE


def follow(address: str, next_address: Callable[[], Awaitable[str]]) -> None:
    """Let clients of this program go on with the next scheduler of a cluster.

    Parameters
    ----------
    address : str
        Address of the present scheduler.
    next_address : callable
        Waits for the next one and returns its address; empty if there is none, or if the present one lives.
    """
    _successors[address] = next_address


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
    # unwrapped, it does not log the close of a client as an error
    reconnect, handle_report = inspect.unwrap(Client._reconnect), Client._handle_report
    gather_remote = Client._gather_remote

    async def explain_and_reconnect(self: Client) -> Any:
        await _follow(self, reconnect)

    async def explain_at_the_end(self: Client) -> Any:
        await handle_report(self)
        if self.status == "running":  # the scheduler has closed the connection, not this client
            await _cancel_all(self)

    async def explain_while_it_fetches(self: Client, *arguments: Any) -> Any:
        address = self.scheduler.address
        try:
            return await gather_remote(self, *arguments)
        except OSError as error:
            if futures_to_replay.of(self) is not None:
                if self.scheduler.address != address or await _is_gone(self, _NOTICED_BY_ALL):
                    return {"status": "error", "keys": []}  # it waits for the futures again
            elif await _is_gone(self) and (reason := await _reason(address)):
                raise FutureCancelledError("a result", _what(reason), reason) from error
            raise

    Client._reconnect, Client._handle_report = explain_and_reconnect, explain_at_the_end
    Client._gather_remote = explain_while_it_fetches


def explain_loss_by_queue(contact: Contact, directory: ClusterDirectory) -> None:
    """Let clients of this program query the queue why the scheduler of a cluster is gone."""
    address = contact.client
    explain_loss(address, lambda: end_in_queue(directory, contact.job_id))
    if address not in _successors:  # the manager of the cluster, if it is in this program, has it sooner
        follow(address, lambda: next_contact(directory, address, contact.job_id))


async def next_address(address: str) -> str:
    """Wait for the next scheduler after the one at this address; return its address, or nothing if none follows."""
    wait = _successors.get(address)
    return await wait() if wait is not None else ""


async def next_contact(directory: ClusterDirectory, address: str, job_id: str = "") -> str:
    """Wait until a cluster has another scheduler, and return its address; empty if there is none, or this one lives.

    Parameters
    ----------
    directory : ClusterDirectory
    address : str
        Of the last scheduler.
    job_id : str, optional
        The job of the last scheduler, if a program asks that does not manage the cluster.
    """
    began, queue = time.monotonic(), FollowingJobs(directory)
    while True:
        follows = await in_thread(restarts_scheduler, directory, job_id, queue)
        if follows := follows or time.monotonic() - began < await in_thread(waits_for_a_manager, directory):
            await asyncio.sleep(_INTERVAL)
        contact = await in_thread(directory.contact)
        if contact is not None and (contact.client != address or (job_id and contact.job_id != job_id)):
            if contact.client == address:  # what is known of this address is about an earlier job
                _explanations.pop(address, None)
                _successors.pop(address, None)
            explain_loss_by_queue(contact, directory)
            followed[contact.client] = directory.path
            return contact.client
        lives = contact is not None and await in_thread(identify, contact, directory) is ConnectionResult.ACCEPTED
        if lives or not follows:
            return ""


class FollowingJobs:
    """The scheduler jobs of a cluster that should follow the present one, as the queue reports them.

    If no program manages the cluster, the journal does not have the end of such a job.
    """

    def __init__(self, directory: ClusterDirectory) -> None:
        self._directory = directory
        self._watches: dict[str, SchedulerWatch] = {}

    def may_come(self, job_id: str) -> bool:
        """Whether one of them may follow this job. If the queue does not answer, it may."""
        following = waits_to_follow(self._directory.submits(), job_id)
        return any(one.job_id is not None and not self._has_ended(one.job_id) for one in following)

    def _has_ended(self, job_id: str) -> bool:
        if job_id not in self._watches:
            self._watches[job_id] = SchedulerWatch(self._directory, batch_of(self._directory), job_id=job_id)
        status = self._watches[job_id].poll(now=time.monotonic())
        return status is not None and status.state.ended


def restarts_scheduler(directory: ClusterDirectory, job_id: str, following: FollowingJobs) -> bool:
    """Whether another scheduler follows that of a cluster, which ran in this job; false if the cluster ends.

    A program restarts it, or has submitted the next scheduler job before it was killed.
    """
    with suppress(HpcgpuError, OSError):
        settings, manager = saved_options.read(directory).options.cluster, directory.manager()
        if settings.on_scheduler_end == "restart" and not directory.closing and not ended_by_itself(directory):
            left = manager is None or manager.left or manager.in_scheduler_job  # that one has ended with the scheduler
            managed = manager is not None and not left and manager.lives is not False
            return managed or following.may_come(job_id)
    return False


def waits_for_a_manager(directory: ClusterDirectory) -> float:
    """Return how many seconds a program may take to take a cluster over whose manager was killed; 0 if nobody waits.

    The worker jobs wait as long for the scheduler that this program submits, or longer.
    """
    with suppress(HpcgpuError, OSError):
        options, manager = saved_options.read(directory).options, directory.manager()
        managed = manager is not None and not (manager.left and directory.detached)
        restarts = options.cluster.on_scheduler_end == "restart" and not directory.closing
        if managed and restarts and not ended_by_itself(directory):
            wait = options.cluster.restart_wait
            return options.worker.death_timeout if wait is None else wait
    return 0.0


async def _cancel_all(client: Client, *, always: bool = False, follows: bool = True) -> None:
    """Let the futures that a client has now fail, with the reason; `always` also if it is unknown.

    Those of later submits are not lost: they may wait for another scheduler. If none `follows`, the reason says so: the
    journal may still have a job that should have followed.
    """
    lost = dict(client.futures)
    if client.scheduler is None or not lost:
        return
    reason = await _reason(client.scheduler.address)
    if not follows:
        reason = reason.replace(RESTARTED, NOT_RESTARTED)
    for key, state in lost.items() if reason or always else ():
        if reason:
            state.cancel(reason=_what(reason), msg=reason)
        else:  # perhaps the scheduler lives
            state.cancel(reason="scheduler-connection-lost", msg=_NOT_KNOWN)
        if client.futures.get(key) is state:
            del client.futures[key]


class _NextScheduler:
    """In place of the connection of a client that waits for the next scheduler: its requests wait, too.

    They would fail after Dask's ``comm.timeouts.connect``, 30 seconds, because they try the address of the last one.
    """

    def __init__(self, client: Client) -> None:
        self.address = client.scheduler.address
        #: Set when the client has another scheduler, or none.
        self.replaced = asyncio.Event()
        self._client = client

    async def identity(self, **_: Any) -> dict[str, Any]:
        """What a notebook shows of the client, and what `Client.wait_for_workers` polls, does not wait."""
        who = {"type": "Scheduler", "id": "", "address": self.address, "services": {}, "started": time.time()}
        return {**who, "workers": {}, "n_workers": 0, "total_threads": 0, "total_memory": 0}

    def __getattr__(self, request: str) -> Callable[..., Awaitable[Any]]:
        async def wait_and_send(**arguments: Any) -> Any:
            limit = arguments.get("timeout")
            async with asyncio.timeout(limit if isinstance(limit, (int, float)) else None):
                await self.replaced.wait()
            if self._client.scheduler is None:
                raise CommClosedError(f"the client was closed before there was a scheduler for its request {request}")
            if request in _FOR_WORKERS and not arguments.get("workers"):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_WORKERS_COME):
                        while not (await self._client.scheduler.identity())["workers"]:
                            await asyncio.sleep(0.1)
            return await getattr(self._client.scheduler, request)(**arguments)

        return wait_and_send


async def _follow(client: Client, reconnect: Callable[[Client], Awaitable[Any]]) -> None:
    """Connect again: to the next scheduler of the cluster if there is one. What is submitted meanwhile goes there."""
    last, waiting, kept = client.scheduler, _NextScheduler(client), futures_to_replay.of(client)
    if last.address in _successors:
        client.scheduler = waiting
    try:
        if kept is not None:
            kept.begin()
        else:
            await _cancel_all(client, always=True)
        while address := await next_address(last.address):
            client.scheduler = last = client.rpc(address)
            if await _connects(client):
                if kept is not None:
                    await _submit_again(client, kept, waiting.address)
                return
            client.scheduler = waiting
        client.scheduler = last
        if kept is not None and await _connects(client, timeout=_CONNECT_AGAIN):  # only the network was broken
            await _submit_again(client, kept, waiting.address)
            return
        await _cancel_all(client, always=True, follows=False)  # also what was submitted since the scheduler was lost
        if kept is not None:
            kept.end()
        if client.status == "connecting":  # it was not closed meanwhile
            await _reconnect(client, reconnect)
    finally:
        if client.scheduler is waiting:
            client.scheduler = last
        waiting.replaced.set()
        if kept is not None:
            kept.end()


async def _reconnect(client: Client, reconnect: Callable[[Client], Awaitable[Any]]) -> None:
    """Connect again to the same scheduler, as Dask does: it tries for 30 s, then closes the client.

    What is submitted meanwhile fails with the reason as soon as it is known.
    """

    async def cancel_again() -> None:
        while True:
            await asyncio.sleep(_INTERVAL)
            await _cancel_all(client, follows=False)

    cancelling = asyncio.ensure_future(cancel_again())
    try:
        await reconnect(client)  # in this task: it closes the client, which waits for this task, but not for itself
    finally:
        cancelling.cancel()


async def _connects(client: Client, *, timeout: float = _CONNECT) -> bool:
    """Connect a client to the scheduler of its cluster; return whether that answers. The futures stay."""
    with suppress(OSError, ImportError):
        await client._ensure_connected(timeout=timeout)
        return True
    return False


async def _submit_again(client: Client, kept: FuturesToReplay, ended: str) -> None:
    """Submit what a client holds to the next scheduler, and report what that is."""
    try:
        plan = await kept.submit_again()
    except OSError:  # the next scheduler has ended, too: the client notices that
        return
    except Exception as error:  # else nobody would read what the scheduler sends
        plan = Plan(lost=dict.fromkeys(list(client.futures), repr(error)))
    if plan.lost:
        reason = await _reason(ended) or _NOT_KNOWN
        for key, why in plan.lost.items():
            kept.cancel(key, _what(reason), f"it is not submitted again, because {why}\n{reason}")
    if text := str(plan):
        with suppress(ClusterWarning):  # a program may turn it into an error
            warn(f"replay, after the end of the scheduler at {ended}: {text}")


async def _is_gone(client: Client, within: float = _NOTICED) -> bool:
    """Whether a client has lost its scheduler. The client notices that soon after one of its requests has failed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            while client.status == "running" and client.scheduler_comm and not client.scheduler_comm.closed():
                await asyncio.sleep(0.05)
            return True
    return False


async def _reason(address: str) -> str:
    """Return why a scheduler is gone; empty if that is unknown."""
    if explanations := _explanations.get(address):
        with suppress(TimeoutError):
            for answer in asyncio.as_completed([why() for why in explanations], timeout=_TIMEOUT):
                if reason := await answer:
                    return reason
    return ""


async def end_in_queue(directory: ClusterDirectory, job_id: str) -> str:
    """Wait until the queue reports the end of a scheduler job, and return a sentence about it.

    If it reports no end in time, the sentence says why the job may do nothing; empty if the queue reports nothing.
    """
    return await in_thread(_end_in_queue, directory, job_id)


def _end_in_queue(directory: ClusterDirectory, job_id: str) -> str:
    name = directory.path.name
    status: JobStatus | None = None
    try:
        batch = batch_of(directory)
        queue = SchedulerWatch(directory, batch, job_id=job_id)
        until = time.monotonic() + END_REPORTED
        while not (why := directory.why_ended()):
            status = queue.poll(now=time.monotonic())
            if status is not None and status.state.ended:
                log = saved_options.logs(directory) / batch.log_name(status.name, status.job_id)
                how = f"{status.state.value}: {explain(status, kind='scheduler')}. Log: {log}"
                follows = ended_too_early(status.state) and restarts_scheduler(
                    directory, job_id, FollowingJobs(directory)
                )
                return loss(name, f"scheduler job {status.job_id} {how}", RESTARTED if follows else "")
            if time.monotonic() > until:
                break
            time.sleep(0.5)
        if why or directory.closing:
            return directory.how_it_ended()
        if status is not None and status.halted:
            return no_answer(name, status)
    except (BatchError, OSError, ValueError):  # the directory was removed, or the queue does not answer
        pass
    return ""
