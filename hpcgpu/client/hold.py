"""Workers that a program holds, for work that is not tasks: a communicator, a training, a query on all workers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

from distributed import Client
from distributed.comm import CommClosedError
from distributed.core import connect

from hpcgpu.client.held_set import HeldWorker, HeldWorkers, HoldWait, OwnCluster, blocks, member, own_cluster, still_run
from hpcgpu.client.lost_scheduler import next_address
from hpcgpu.client.reported_wait import ReportedWait
from hpcgpu.dask_scheduler.held_workers import lost_words
from hpcgpu.dask_scheduler.rpc_types import HeldWorkerInfo
from hpcgpu.dask_worker.run_ranked import free_port
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.display.progress import Progress
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError, OptionError
from hpcgpu.options import values
from hpcgpu.posix.standard_streams import write_stderr

_T = TypeVar("_T")

#: Seconds between two checks of a client that waits for a scheduler.
_INTERVAL = 0.2
#: Seconds in which workers answer; then it is reported which of them have not.
_ANSWER = 5.0
#: Seconds in which the scheduler reports the loss of a worker that has not answered.
_LOST = 10.0


class _Used(Protocol):
    """A client, or a cluster whose blocks have clients of their own."""

    @property
    def asynchronous(self) -> bool: ...


class _Cluster(OwnCluster, _Used, Protocol):
    """A cluster that this program has."""

    scheduler_address: str

    def sync(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any: ...


class Hold:
    """A block of a program that holds workers; `hold` and `GPUCluster.hold` make it.

    Parameters
    ----------
    used : distributed.Client or GPUCluster
        A client, or a cluster: its block has a client of its own.
    make : callable, optional
        Makes the client of a cluster that this program does not manage itself.
    **others
        As those of `hold`; the timeout in seconds.
    """

    client: Client

    def __init__(
        self,
        used: _Used,
        n_workers: int,
        *,
        resources: Mapping[str, float] | None,
        timeout: float | None,
        quiet: bool,
        make: Callable[[], Client] | None = None,
    ) -> None:
        self._used, self._make = used, make
        #: Whether the client ends with the block.
        self.own_client = not isinstance(used, Client)
        self._cluster = cast(_Cluster, used) if self.own_client and make is None else None
        if isinstance(used, Client):
            self.client = used
        self.n_workers, self.timeout = n_workers, timeout
        self.resources = dict(values.resources("hold: resources", resources)) if resources else None
        self.quiet = quiet
        self._until = math.inf
        #: Whether its block runs.
        self._active = False
        #: How many workers are free, and why there are not more.
        self._free, self._why = "0 free", ""
        self._around: list[HeldWorker] = []
        #: The calls of earlier programs that still run on the workers.
        self._calls: dict[str, list[str]] = {}
        self._comm: Any = None
        self._runs_in: object = None
        #: The jobs of its workers, and the scheduler job, as their own processes report them.
        self._needs: tuple[list[dict[str, Any]], dict[str, Any] | None] = [], None

    def __enter__(self) -> HeldWorkers:
        self._begin(threading.current_thread(), asynchronous=False)
        while self._cluster is not None:
            self._cluster.sync(self._wait_for_cluster, self._cluster)
            address = self._cluster.scheduler_address
            try:
                self.client = Client(self._cluster, set_as_default=False)
                break
            except OSError:  # the scheduler may have just ended
                if not self._cluster.sync(next_address, address):
                    raise
        if self._make is not None:
            self.client = self._make()
        try:
            workers: HeldWorkers = self.client.sync(self._enter)
        except BaseException:
            self._active = False
            if self._comm is not None:  # Ctrl-C may come when the workers are there already
                self.client.loop.add_callback(self._comm.abort)
            if self.own_client:
                self.client.close()
            raise
        return workers

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._active = False
        try:
            if self.client.loop.asyncio_loop.is_closed():  # the program has closed its client in the block
                self._workers.abandon()
            else:
                self.client.sync(self._workers.let_go, error)
        finally:
            if self.own_client:
                self.client.close()

    async def __aenter__(self) -> HeldWorkers:
        self._begin(asyncio.current_task(), asynchronous=True)
        if self._cluster is not None:
            await self._wait_for_cluster(self._cluster)
            self.client = Client(self._cluster, asynchronous=True, set_as_default=False)
        elif self._make is not None:
            self.client = self._make()
        try:
            await self.client
            return await self._enter()
        except BaseException:
            if self.own_client:
                await self.client.close()
            raise

    async def _enter(self) -> HeldWorkers:
        try:
            async with asyncio.timeout(self._left) as limit:
                members = await self._members()
            self._workers = HeldWorkers(self.client, members, self._comm, self._runs_in)
            self._active = True
            if self._calls:
                warn(f"hold: the block begins, but earlier {still_run(self._calls)}")
            with suppress(TimeoutError):  # the workers are there, so a queue that answers late is no error
                async with asyncio.timeout_at(limit.when()):
                    await self._show_first_end()
            return self._workers
        except BaseException as error:
            self._active = False
            if self._comm is not None:
                self._comm.abort()
            if isinstance(error, TimeoutError) and self.timeout is not None:
                raise self._too_late() from None
            if isinstance(error, CommClosedError):
                raise ClusterError("hold: the scheduler or a worker was lost before the block began") from error
            raise

    def _begin(self, runs_in: object, *, asynchronous: bool) -> None:
        """Begin; ``with`` on an asynchronous client or cluster, and ``async with`` on another one, are refused."""
        if self._used.asynchronous != asynchronous:
            words = "is not asynchronous: write `with`" if asynchronous else "is asynchronous: write `async with`"
            raise OptionError(f"hold: this {'cluster' if self.own_client else 'client'} {words}")
        if self._active:  # else nobody would let the first workers go
            raise OptionError("hold: this block has begun already: call `hold` for each block")
        self._runs_in, self._comm = runs_in, None
        self._until = time.monotonic() + (math.inf if self.timeout is None else self.timeout)

    @property
    def _left(self) -> float | None:
        """Seconds of the timeout that are left."""
        return None if self.timeout is None else max(0.0, self._until - time.monotonic())

    def _too_late(self) -> TimeoutError:
        wanted = f"hold: {counted(self.n_workers, 'worker')} requested{_beside(self._around)}"
        why = f": {self._why}" if self._why else ""
        return TimeoutError(f"{wanted}; after {self.timeout:g} s {self._free}{why}")

    async def _wait_for_cluster(self, cluster: _Cluster) -> None:
        """Wait until a cluster has a scheduler, in its event loop: a client would wait for it without end."""
        starting = asyncio.ensure_future(cluster.manager.start())
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([starting], timeout=self._left)
        if not starting.done():
            self._why = await cluster.manager.hold_wait(self.n_workers, self.resources or {}, []).check()
            raise self._too_late()
        await starting

    async def _members(self) -> list[HeldWorker]:
        """Wait until the workers are there; if the scheduler ends and another one follows, also for that one.

        If a worker is lost before the block has begun, wait for another one.
        """
        while True:
            self._comm = comm = await self._connect()
            address, self._around = self.client.scheduler.address, self._held_around()
            infos = list[HeldWorkerInfo]()
            try:
                size = {"n_workers": self.n_workers, "resources": self.resources}
                await comm.write({"op": "hpcgpu_hold", **size, "nested": bool(self._around)})
                self._free = "the scheduler has not answered"
                infos = await self._wait(comm, self._around)
                self._calls = {one["name"]: one["calls"] for one in infos if one["calls"]}
                ports = await self._ports(infos)
            except CommClosedError:
                lost = bool(infos) and await _worker_lost(comm)
                comm.abort()
                if not lost and (self._around or not await self._show_while(next_address(address))):
                    raise
            else:
                return [member(one, port) for one, port in zip(infos, ports, strict=True)]

    async def _ports(self, infos: Sequence[HeldWorkerInfo]) -> list[int]:
        """Return a free port of each worker, another one for each worker of a node.

        Report which do not answer: a call may block them.
        """
        asked = [asyncio.ensure_future(self._port(one["address"], one["host"])) for one in infos]
        answers = asyncio.gather(*asked)
        self._free, self._why = "some have not answered", ""
        try:
            await asyncio.wait([answers], timeout=_ANSWER)
            if not answers.done():
                silent = [one for one, port in zip(infos, asked, strict=True) if not port.done()]
                self._why = f"perhaps {still_run({one['name']: one['calls'] for one in silent})}"
                warn(f"hold: the block waits for workers that do not answer: {self._why}")
                await answers
                self._calls = await self.client.scheduler.hpcgpu_calls(workers=[one["address"] for one in infos])
            found = dict[tuple[str, int], str]()
            for one, port in zip(infos, await answers, strict=True):
                while (one["host"], port) in found:  # the workers have chosen without each other
                    port = await self._port(one["address"], one["host"])
                found[one["host"], port] = one["address"]
            return [port for _, port in found]
        finally:
            answers.cancel()

    async def _port(self, address: str, host: str) -> int:
        """Return a free port of a worker. While a call blocks it, the scheduler may not be able to connect to it."""
        while True:
            try:  # this is the client's event loop, so `run` returns an awaitable
                return int((await self.client.run(free_port, host, workers=[address]))[address])
            except CommClosedError:
                raise
            except OSError:
                if not await self.client.scheduler.hpcgpu_calls(workers=[address]):
                    raise

    async def _connect(self) -> Any:
        """Connect to the scheduler of the client; the client may still wait for the next one."""
        client = self.client
        while True:
            address = client.scheduler.address
            connecting = asyncio.ensure_future(connect(address, **client.connection_args))
            connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                while client.status == "running" and client.scheduler.address == address:
                    await asyncio.wait([connecting], timeout=_INTERVAL)
                    if connecting.done():
                        self._why = ""
                        return connecting.result()
            finally:
                connecting.cancel()
            await self._show_while(_while_it_connects(client))
            if client.status != "running":
                raise ClusterError("hold: the client is closed")

    async def _show_while(self, waits: Coroutine[Any, Any, _T]) -> _T:
        """Wait for the next scheduler, and show what it waits for."""
        own, waiting = own_cluster(self.client), asyncio.ensure_future(waits)
        wait = own.manager.hold_wait(self.n_workers, self.resources or {}, []) if own is not None else None
        self._free, self._why = "0 free", "its scheduler is lost"
        try:
            with Progress(self.quiet) as progress:
                while not waiting.done():
                    progress.update(f"waiting for {counted(self.n_workers, 'worker')} to hold", self._why)
                    await asyncio.wait([waiting], timeout=_INTERVAL)
                    self._why = await wait.check() if wait is not None else self._why
            return waiting.result()
        finally:
            waiting.cancel()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._active = False
        try:
            await self._workers.let_go(error)
        finally:
            if self.own_client:
                await self.client.close()

    async def _show_first_end(self) -> None:
        if not self.quiet and (ends := await self._workers.first_end(*self._needs)):
            write_stderr(f"{counted(len(self._workers), 'worker')} held; {ends}")

    def _held_around(self) -> list[HeldWorker]:
        """Return the workers that the blocks around this one hold: they are free only after this block has ended."""
        address = self.client.scheduler.address
        own = [held for held, runs_in in list(blocks.items()) if runs_in is self._runs_in and held.scheduler == address]
        return [worker for held in own for worker in held]

    async def _wait(self, comm: Any, around: Sequence[HeldWorker]) -> list[HeldWorkerInfo]:
        """Wait until the scheduler gives the workers, beside those that the blocks around this one hold."""
        reading = _read_in_background(comm)
        wait: HoldWait = ReportedWait(self.client, self.resources or {})
        if (own := own_cluster(self.client)) is not None:
            wait = own.manager.hold_wait(self.n_workers, self.resources or {}, [worker.job for worker in around])
        began = time.monotonic()
        with Progress(self.quiet) as progress:
            while True:
                done, _ = await asyncio.wait([reading], timeout=1.0)
                if done:
                    message = reading.result()
                    if not isinstance(message, dict):  # it does not know this request
                        raise ClusterError(f"hold: {comm.peer_address} is no scheduler of a cluster of hpcgpu")
                    if "held" in message:
                        found: list[HeldWorkerInfo] = message["held"]
                        self._needs = [one["job"] for one in found if one["job"]], message.get("scheduler")
                        return found
                    if "lost" in message:
                        raise ClusterError(lost_words(message["lost"], message["job"]))
                    kept = message["reserved"]
                    self._free = f"{message['free']} free" + f", {kept} of them for earlier requests" * bool(kept)
                    reading = _read_in_background(comm)
                try:
                    self._why = await wait.check()
                except ClusterError as error:
                    if not around:
                        raise
                    wanted = counted(self.n_workers, "worker")
                    raise ClusterError(f"hold: {wanted} requested{_beside(around)}: {error}") from error
                progress.update(
                    f"waiting for {counted(self.n_workers, 'worker')} to hold",
                    f"{self._free}, for {duration(time.monotonic() - began)}{'; ' if self._why else ''}{self._why}",
                )


async def _while_it_connects(client: Client) -> None:
    while client.status == "connecting":
        await asyncio.sleep(_INTERVAL)


def hold(
    client: Client,
    n_workers: int,
    *,
    resources: Mapping[str, float] | None = None,
    timeout: float | str | None = None,
    quiet: bool = False,
) -> Hold:
    """Hold workers for a block of a program: ``with hpcgpu.hold(client, 8) as workers:``.

    The block begins when so many workers are free, and no earlier request waits for them. Until it ends, hpcgpu ends or
    replaces none of them, and no other program can hold them. They still take tasks. If one of them is lost,
    `HeldWorkers.run` raises an error at once, and so do tasks that may run on that worker only; the others are free
    again.

    Parameters
    ----------
    client : distributed.Client
        A client of a cluster of hpcgpu: from `connect`, of a cluster, or of `SlurmGPURunner`. ``async with`` if it is
        asynchronous.
    n_workers : int
    resources : mapping, optional
        The Dask resources that each of them must have. Default: workers with a GPU.
    timeout : number or str, optional
        Seconds to wait, or a text with a unit. Default: none; the queue may take days.
    quiet : bool, default False
        Show no progress.

    Returns
    -------
    Hold
        A context manager. Its block gets `HeldWorkers`.

    Raises
    ------
    OptionError
        `n_workers`, `resources` or `timeout` has a value that is not allowed.
    TimeoutError
        Not so many workers were free within `timeout`.
    ClusterError
        A worker was lost, or a block of this program around this one holds the workers that this one would need.
    """
    _check_number("n_workers", n_workers)
    limit = values.time_limit("hold: timeout", timeout)
    return Hold(client, n_workers, resources=resources, timeout=limit, quiet=quiet)


def check_size(n_workers: int | None, jobs: int | None) -> None:
    """Raise `OptionError` unless one of the two is given, and is a number of workers or jobs."""
    if (n_workers is None) == (jobs is None):
        raise OptionError("hold: write either n_workers or jobs")
    _check_number(*(("n_workers", n_workers) if jobs is None else ("jobs", jobs)))


def _check_number(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise OptionError(f"hold: {name} must be a whole number from 1 on, not {number!r}")


def _beside(around: Collection[HeldWorker]) -> str:
    """Return how many workers the blocks around a block hold, in words; empty if there are none."""
    return f", beside {len(around)} that this program holds already" if around else ""


async def _worker_lost(comm: Any) -> bool:
    """Whether the scheduler lives and reports the loss of a worker that it has given to this program."""
    with suppress(OSError):
        async with asyncio.timeout(_LOST):
            return "lost" in await comm.read()
    return False


def _read_in_background(comm: Any) -> asyncio.Future[Any]:
    """Read a message in the background; if nobody waits for it any more, an error is none."""
    reading: asyncio.Future[Any] = asyncio.ensure_future(comm.read())
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    return reading
