"""Workers that a program holds, for work that is not tasks: a communicator, a training, a query on all workers."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, overload, runtime_checkable

from distributed import Client
from distributed.comm import CommClosedError
from distributed.core import connect

from hpcgpu.batch.base import JobState
from hpcgpu.client.connect import directory_of
from hpcgpu.client.held_client import HeldClient
from hpcgpu.client.lost_scheduler import next_address
from hpcgpu.dask_scheduler.held_workers import lost_words
from hpcgpu.dask_scheduler.rpc_types import HeldWorkerInfo
from hpcgpu.dask_worker.run_ranked import free_port, run_ranked
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.progress import Progress
from hpcgpu.errors import ClusterError, HpcgpuError, OptionError
from hpcgpu.existing_clusters.snapshot import Observer
from hpcgpu.options import values
from hpcgpu.posix.threads import in_thread
from hpcgpu.store.directory import ClusterDirectory

_T = TypeVar("_T")

#: Seconds in which the scheduler reports the loss of a worker after a call on it has failed.
_REPORTED = 10.0
#: Seconds in which queue and scheduler report the jobs of a cluster.
_ANSWERED = 10.0
#: Seconds in which the queue reports the end of a job whose worker is lost.
_ENDED = 20.0
#: Seconds between two looks at what a client does that waits for a scheduler.
_LOOK = 0.2

#: The workers that this program holds, each set with the thread or the asyncio task that runs its block. Each of the
#: program's event loops adds and removes its own sets, in its own thread.
_blocks: dict[HeldWorkers, object] = {}


class _HoldWait(Protocol):
    """Notices that a cluster will not have the workers that a program waits for."""

    async def check(self) -> str: ...


@runtime_checkable
class _Manager(Protocol):
    """What manages the jobs of a cluster."""

    def hold_wait(self, n_workers: int, resources: Mapping[str, float], beside: Collection[str]) -> _HoldWait: ...
    async def start(self) -> None: ...


class _OwnCluster(Protocol):
    """A cluster that this program has: it can query the queue."""

    @property
    def manager(self) -> _Manager: ...
    @property
    def jobs(self) -> Iterable[JobInfo]: ...


class _Cluster(_OwnCluster, Protocol):
    """A cluster whose blocks have clients of their own."""

    scheduler_address: str

    def sync(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any: ...


def _own_cluster(client: Client) -> _OwnCluster | None:
    """Return the cluster of a client; None if this program has only connected to it."""
    cluster = client.cluster
    return cast(_OwnCluster, cluster) if isinstance(getattr(cluster, "manager", None), _Manager) else None


@dataclass(frozen=True, kw_only=True)
class HeldWorker:
    """A worker that a program holds, and its place among the others.

    Attributes
    ----------
    address, name : str
        Of the Dask worker.
    job : str
        Name of its worker job; empty if a person started the worker.
    job_id : str
    node : str
    host : str
        The address of its node in the network of the workers.
    port : int
        A port of `host` on which nothing listened when the block began.
    rank : int
        Its number among all held workers. Those of a node follow each other.
    local_rank : int
        Its number among those of its node and job.
    world_size : int
        The number of all held workers.
    """

    address: str
    name: str
    job: str
    job_id: str
    node: str
    host: str
    port: int
    rank: int
    local_rank: int
    world_size: int


class HeldWorkers(Sequence[HeldWorker]):
    """The workers that a program holds, in the order of their ranks.

    Attributes
    ----------
    client : distributed.Client
        A client whose calls and tasks use only these workers, for libraries that use all workers of a client.
    """

    def __init__(self, client: Client, members: list[HeldWorker], comm: Any, runs_in: object) -> None:
        self._client = client
        self._members = members
        self._comm = comm
        self._scheduler = str(client.scheduler.address)
        self._ended = False
        self._lost = asyncio.Event()
        self._observer: Observer | None = None
        self.client = cast(Client, HeldClient(client, self.addresses, self._watched))
        self._watching = asyncio.ensure_future(self._watch())
        _blocks[self] = runs_in
        self._watching.add_done_callback(lambda _: _blocks.pop(self, None))

    @overload
    def __getitem__(self, index: int) -> HeldWorker: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HeldWorker]: ...
    def __getitem__(self, index: int | slice) -> HeldWorker | Sequence[HeldWorker]:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"<HeldWorkers: {', '.join(worker.name for worker in self)}>"

    @property
    def scheduler(self) -> str:
        """The address of the scheduler; empty if these workers are free again."""
        return "" if self._ended or self._lost.is_set() or self._watching.done() else self._scheduler

    @property
    def addresses(self) -> list[str]:
        """The addresses of the Dask workers, as the argument `workers` of Dask's methods takes them."""
        return [worker.address for worker in self]

    @property
    def environments(self) -> dict[str, dict[str, str]]:
        """The variables that `run` sets, by the address of the worker: those of ``torchrun``.

        ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, and ``MASTER_ADDR`` and ``MASTER_PORT`` of the first worker.
        """
        first = self[0]
        return {
            worker.address: {
                "RANK": str(worker.rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "MASTER_ADDR": first.host,
                "MASTER_PORT": str(first.port),
            }
            for worker in self
        }

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a function on all these workers at the same time; return its results in the order of the ranks.

        Meanwhile each worker has the variables of `environments`. A worker sees its own GPU as device 0.

        Parameters
        ----------
        function : callable
            It runs in a thread of its own. What it raises on one worker is raised here.
        *arguments, **options
            The arguments of the function.

        Raises
        ------
        ClusterError
            A worker was lost. The function may still run on the others.
        RuntimeError
            The function has called ``sys.exit`` with an error: the worker stays. ``sys.exit(0)`` returns None.
        """
        return self._client.sync(self._run, function, arguments, options)

    async def _run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        run = self._client.run  # this is the client's event loop, so it returns an awaitable
        answers = await self._watched(
            lambda: run(run_ranked, function, *given, self.environments, workers=self.addresses)
        )
        return [answers[address] for address in self.addresses]

    async def _watched(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        """Begin a call on these workers, and wait for it; raise `ClusterError` as soon as one of them is lost."""
        if self._ended:
            raise ClusterError("the block that held these workers has ended")
        if self._watching.done():
            await self._watching
        call = asyncio.ensure_future(begin())
        try:
            await asyncio.wait([call, self._watching], return_when=asyncio.FIRST_COMPLETED)
            if not call.done() or isinstance(call.exception(), CommClosedError):
                await self._raise_loss()
            return call.result()
        finally:
            call.cancel()
            call.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _raise_loss(self) -> None:
        """Raise `ClusterError` if a worker was lost; the scheduler may notice that a moment after the program."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _REPORTED)
            await self._watching

    async def _watch(self) -> None:
        """Raise `ClusterError` when a worker is lost."""
        try:
            message = await self._comm.read()
        except OSError as error:
            self._lost.set()
            raise ClusterError("the scheduler is gone, and with it all held workers: hold workers again") from error
        self._lost.set()
        name, job = message["lost"], message["job"]
        known = _own_cluster(self._client) is not None or directory_of(self._client) is not None
        why = await self._why_lost(job["id"], job["name"]) if job and known else ""
        raise ClusterError(f"{lost_words(name, job)}{': ' if why else ''}{why}. The other workers are free again")

    async def _why_lost(self, job_id: str, name: str) -> str:
        """Return how the job of a lost worker has ended, as the queue reports it soon; empty if it does not."""
        until, self._observer = time.monotonic() + _ENDED, None
        while True:
            job = next((job for job in await self._jobs() if (job.id, job.name) == (job_id, name)), None)
            state, late = JobState(job.state) if job is not None else JobState.UNKNOWN, time.monotonic() > until
            if job is not None and state.ended:
                return f"{job.reason}. Log: {job.log}"
            if job is not None and late and state is not JobState.UNKNOWN:
                return f"its process has ended, and its job still runs. Log: {job.log}"
            if late:
                return ""
            await asyncio.sleep(0.5)

    async def _jobs(self) -> Iterable[JobInfo]:
        """Return the jobs of the cluster; none if they are not known within seconds."""
        with suppress(TimeoutError, OSError, ValueError, HpcgpuError):
            return await asyncio.wait_for(in_thread(self._jobs_now), _ANSWERED)
        return []

    def _jobs_now(self) -> Iterable[JobInfo]:
        if (own := _own_cluster(self._client)) is not None:
            return own.jobs
        if self._observer is None and (path := directory_of(self._client)) is not None:
            self._observer = Observer(ClusterDirectory.existing(path))
            self._observer.soon()  # the queue shows the end of a job with a delay
        return self._observer.snapshot().jobs if self._observer is not None else []

    async def first_end(self) -> str:
        """Return which job ends first, and when; empty if that is not known."""
        names, jobs = {worker.job for worker in self}, await self._jobs()
        ends = [(job.time_left, job.name) for job in jobs if job.name in names and job.time_left is not None]
        return f"job {min(ends)[1]} ends first, in {duration(min(ends)[0])}" if ends else ""

    async def let_go(self, error: BaseException | None) -> None:
        """Let the workers go; raise `ClusterError` if one was lost and the block failed for that reason."""
        failed = isinstance(error, Exception) and not isinstance(error, ClusterError)
        try:
            if failed and (isinstance(error, CommClosedError) or self._lost.is_set()):
                await self._raise_loss()
        finally:
            self._ended = True
            self._comm.abort()
            self._watching.cancel()
            self._watching.add_done_callback(lambda done: done.cancelled() or done.exception())


class Hold:
    """A block of a program that holds workers; `hold` and `GPUCluster.hold` make it.

    Parameters
    ----------
    used : distributed.Client or GPUCluster
        A client, or a cluster: its block has a client of its own.
    **others
        As those of `hold`; the timeout in seconds.
    """

    client: Client

    def __init__(
        self,
        used: Client | _Cluster,
        n_workers: int,
        *,
        resources: Mapping[str, float] | None,
        timeout: float | None,
        quiet: bool,
    ) -> None:
        self._cluster: _Cluster | None = None
        if isinstance(used, Client):
            self.client = used
        else:
            self._cluster = used
        self.n_workers, self.timeout = n_workers, timeout
        self.resources = dict(values.resources("hold: resources", resources)) if resources else None
        self.quiet = quiet
        self._until = math.inf
        #: How many workers are free, and why there are not more.
        self._free, self._why = "0 free", ""
        self._around: list[HeldWorker] = []
        self._comm: Any = None
        self._runs_in: object = None

    def __enter__(self) -> HeldWorkers:
        self._runs_in = threading.current_thread()
        self._begin()
        while self._cluster is not None:
            self._cluster.sync(self._wait_for_cluster, self._cluster)
            address = self._cluster.scheduler_address
            try:
                self.client = Client(self._cluster, set_as_default=False)
                break
            except OSError:  # the scheduler may have just ended
                if not self._cluster.sync(next_address, address):
                    raise
        try:
            workers: HeldWorkers = self.client.sync(self.__aenter__)
        except BaseException:
            if self._comm is not None:  # Ctrl-C may come when the workers are there already
                self.client.loop.add_callback(self._comm.abort)
            if self._cluster is not None:
                self.client.close()
            raise
        return workers

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.client.sync(self._workers.let_go, error)
        finally:
            if self._cluster is not None:
                self.client.close()

    async def __aenter__(self) -> HeldWorkers:
        if not self._runs_in:
            self._runs_in = asyncio.current_task()
            self._begin()
            if self._cluster is not None:
                await self._wait_for_cluster(self._cluster)
                self.client = Client(self._cluster, asynchronous=True, set_as_default=False)
        if self.client.asynchronous:
            await self.client
        try:
            async with asyncio.timeout(self._left) as limit:
                members = await self._members()
            self._workers = HeldWorkers(self.client, members, self._comm, self._runs_in)
            with suppress(TimeoutError):  # the workers are there, so a queue that answers late is no error
                async with asyncio.timeout_at(limit.when()):
                    await self._show_first_end()
            return self._workers
        except BaseException as error:
            if self._comm is not None:
                self._comm.abort()
            if isinstance(error, TimeoutError) and self.timeout is not None:
                raise self._too_late() from None
            if isinstance(error, CommClosedError):
                raise ClusterError("hold: the scheduler or a worker was lost before the block began") from error
            raise

    def _begin(self) -> None:
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
        """Wait until the workers are there; if the scheduler ends and another one follows, also for that one."""
        while True:
            self._comm = comm = await self._connect()
            address, self._around = self.client.scheduler.address, self._held_around()
            try:
                size = {"n_workers": self.n_workers, "resources": self.resources}
                await comm.write({"op": "hpcgpu_hold", **size, "nested": bool(self._around)})
                infos = await self._wait(comm, self._around)
                run = self.client.run  # this is the client's event loop, so it returns an awaitable
                ports = await asyncio.gather(*[run(free_port, one["host"], workers=[one["address"]]) for one in infos])
            except CommClosedError:
                comm.abort()
                if self._around or not await self._show_while(next_address(address)):
                    raise
            else:
                return [_member(one, port[one["address"]]) for one, port in zip(infos, ports, strict=True)]

    async def _connect(self) -> Any:
        """Connect to the scheduler of the client; the client may still wait for the next one."""
        client = self.client
        while True:
            address = client.scheduler.address
            connecting = asyncio.ensure_future(connect(address, **client.connection_args))
            connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                while client.status == "running" and client.scheduler.address == address:
                    await asyncio.wait([connecting], timeout=_LOOK)
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
        own, waiting = _own_cluster(self.client), asyncio.ensure_future(waits)
        wait = own.manager.hold_wait(self.n_workers, self.resources or {}, []) if own is not None else None
        self._free, self._why = "0 free", "its scheduler is lost"
        try:
            with Progress(self.quiet) as progress:
                while not waiting.done():
                    progress.update(f"waiting for {counted(self.n_workers, 'worker')} to hold", self._why)
                    await asyncio.wait([waiting], timeout=_LOOK)
                    self._why = await wait.check() if wait is not None else self._why
            return waiting.result()
        finally:
            waiting.cancel()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self._workers.let_go(error)
        finally:
            if self._cluster is not None:
                await self.client.close()

    async def _show_first_end(self) -> None:
        if not self.quiet and (ends := await self._workers.first_end()):
            print(f"hpcgpu: {counted(len(self._workers), 'worker')} held; {ends}", file=sys.stderr)

    def _held_around(self) -> list[HeldWorker]:
        """Return the workers that the blocks around this one hold: they are free only after this block has ended."""
        address, blocks = self.client.scheduler.address, list(_blocks.items())
        own = [held for held, runs_in in blocks if runs_in is self._runs_in and held.scheduler == address]
        return [worker for held in own for worker in held]

    async def _wait(self, comm: Any, around: Sequence[HeldWorker]) -> list[HeldWorkerInfo]:
        """Wait until the scheduler gives the workers, beside those that the blocks around this one hold."""
        reading, wait = _reading(comm), None
        if (own := _own_cluster(self.client)) is not None:
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
                        return found
                    if "lost" in message:
                        raise ClusterError(lost_words(message["lost"], message["job"]))
                    kept = message["reserved"]
                    self._free = f"{message['free']} free" + f", {kept} of them for earlier requests" * bool(kept)
                    reading = _reading(comm)
                if wait is not None:
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
        await asyncio.sleep(_LOOK)


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
    check_number("n_workers", n_workers)
    limit = None if timeout is None else values.time_limit("hold: timeout", timeout)
    return Hold(client, n_workers, resources=resources, timeout=limit, quiet=quiet)


def check_number(name: str, number: object) -> None:
    """Raise `OptionError` for what is no number of workers or jobs."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise OptionError(f"hold: {name} must be a whole number from 1 on, not {number!r}")


def _beside(around: Collection[HeldWorker]) -> str:
    """Return how many workers the blocks around a block hold, in words; empty if there are none."""
    return f", beside {len(around)} that this program holds already" if around else ""


def _reading(comm: Any) -> asyncio.Future[Any]:
    """Read a message in the background; if nobody waits for it any more, an error is none."""
    reading: asyncio.Future[Any] = asyncio.ensure_future(comm.read())
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    return reading


def _member(one: HeldWorkerInfo, port: int) -> HeldWorker:
    return HeldWorker(
        address=one["address"],
        name=one["name"],
        job=one["job"].get("name", ""),
        job_id=one["job"].get("id", ""),
        node=one["node"],
        host=one["host"],
        port=port,
        rank=one["rank"],
        local_rank=one["local_rank"],
        world_size=one["world_size"],
    )
