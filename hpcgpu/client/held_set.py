"""The workers that a program holds: their ranks, calls on them, and the loss of one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, overload, runtime_checkable

from distributed import Client
from distributed.comm import CommClosedError

from hpcgpu.batch.base import JobState
from hpcgpu.client import held_calls
from hpcgpu.client.connect import directory_of
from hpcgpu.client.first_end_of_held_workers import first_end
from hpcgpu.client.held_calls import Answers, ranks
from hpcgpu.client.held_client import HeldClient
from hpcgpu.client.questions_by_ssh import Questions
from hpcgpu.client.reached_by_ssh import cluster_of
from hpcgpu.dask_scheduler.held_workers import lost_words
from hpcgpu.dask_scheduler.rpc_types import HeldWorkerInfo
from hpcgpu.dask_worker.run_ranked import run_ranked
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.existing_clusters.snapshot import Observer
from hpcgpu.posix.threads import in_thread
from hpcgpu.store.directory import ClusterDirectory

#: Seconds in which the scheduler reports the loss of a worker after a call on it has failed.
_REPORTED = 10.0
#: Seconds in which a call fails on the other workers after the loss of one is explained.
_NOTICED = 1.0
#: Seconds in which queue and scheduler report the jobs of a cluster.
_ANSWERED = 10.0
#: Seconds in which the queue reports the end of a job whose worker is lost: of one whose other workers are there, and
#: of one that has none any more.
_STAYS, _ENDED = 2.5, 20.0
#: Seconds in which the scheduler reports which calls still run.
_CALLS = 2.0
#: Most workers that a warning names.
_SHOWN = 8

#: The workers that this program holds, each set with the thread or the asyncio task that runs its block. Each of the
#: program's event loops adds and removes its own sets, in its own thread.
blocks: dict[HeldWorkers, object] = {}


class HoldWait(Protocol):
    """Notices that a cluster will not have the workers that a program waits for."""

    async def check(self) -> str: ...


@runtime_checkable
class Manager(Protocol):
    """What manages the jobs of a cluster."""

    def hold_wait(self, n_workers: int, resources: Mapping[str, float], beside: Collection[str]) -> HoldWait: ...
    async def start(self) -> None: ...
    async def poll(self, job_ids: Collection[str], *, recent: bool = False) -> bool: ...


class OwnCluster(Protocol):
    """A cluster that this program has: it can query the queue."""

    @property
    def manager(self) -> Manager: ...
    @property
    def jobs(self) -> Iterable[JobInfo]: ...


def own_cluster(client: Client) -> OwnCluster | None:
    """Return the cluster of a client; None if this program has only connected to it."""
    cluster = client.cluster
    return cast(OwnCluster, cluster) if isinstance(getattr(cluster, "manager", None), Manager) else None


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
        Its number among the held ones of its node.
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
        #: Whether the connection to the scheduler is broken.
        self._cut = False
        #: The calls that have begun and may still run.
        self._begun: set[object] = set()
        self._lost = asyncio.Event()
        self._observer: Observer | Questions | None = None
        self.client = cast(Client, HeldClient(client, self.addresses, self._call, self._watched))
        self._watching = asyncio.ensure_future(self._watch())
        blocks[self] = runs_in
        self._watching.add_done_callback(lambda _: blocks.pop(self, None))

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
            It runs in a thread of its own. What it raises on one worker is raised here, soon and not after the others
            have ended. A note of the exception, which the traceback shows, says which rank and worker it was.
        *arguments, **options
            The arguments of the function.

        Raises
        ------
        ClusterError
            A worker was lost. The function may still run on the others. The cause is what the function has raised
            there, if it has noticed the loss.
        RuntimeError
            The function has called ``sys.exit`` with an error: the worker stays. ``sys.exit(0)`` returns None.
        """
        if self._client.status in ("closing", "closed"):
            raise ClusterError("the client of this block is closed")
        return self._client.sync(self._run, function, arguments, options)

    async def _run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        answers = await self._call(run_ranked, (function, *given, self.environments), {}, self.addresses)
        return [answers[address] for address in self.addresses]

    async def _call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        workers: Collection[str],
    ) -> dict[str, Any]:
        """Run a function on workers; raise what it raises on the first of them that fails, or the loss of a worker."""
        answers: Answers = await self._watched(
            lambda: held_calls.call(self._client, function, arguments, options, workers)
        )
        if answers.first is None:
            return {address: answers.results[address] for address in workers}  # as `Client.run` orders them
        address, error = answers.first
        others = set(workers) - answers.results.keys() - answers.errors.keys() - answers.broken.keys()
        if others:
            self._begun.add(object())  # until the block ends
        if answers.broken or self._lost.is_set():
            await self._raise_loss(error)
        with suppress(Exception):  # an exception may take no notes
            for note in self._notes(address, set(answers.errors), others):
                error.add_note(note)
        raise error

    def _notes(self, first: str, errors: Collection[str], others: Collection[str]) -> Iterable[str]:
        """Report where a call has failed, and where it still runs; by the addresses of the workers."""
        for held in self:
            if held.address == first:
                yield _raised_on(held)
        if failed := [held for held in self if held.address in errors and held.address != first]:
            yield f"It also failed on {ranks(held.rank for held in failed)}"
        if running := [held for held in self if held.address in others]:
            yield (
                f"The call still runs on {ranks(held.rank for held in running)}, and may wait for the other ranks: "
                "`workers.client.restart_workers(workers.addresses)` ends it"
            )

    async def _watched(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        """Begin a call on these workers, and wait for it; raise `ClusterError` as soon as one of them is lost."""
        if self._ended:
            raise ClusterError("the block that held these workers has ended")
        if self._watching.done():
            await self._watching
        call = asyncio.ensure_future(begin())
        self._begun.add(call)
        try:
            await asyncio.wait([call, self._watching], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([call], timeout=_NOTICED)  # what a loss has caused explains it
            if not call.done() or isinstance(call.exception(), CommClosedError):
                await self._raise_loss(call.exception() if call.done() else None)
            answer = call.result()
            self._begun.discard(call)
            return answer
        finally:
            call.cancel()
            call.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _raise_loss(self, noticed: BaseException | None) -> None:
        """Raise `ClusterError` if a worker was lost; the scheduler may notice that a moment after the program.

        `noticed` is what the loss has caused.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _REPORTED)
            try:
                await self._watching
            except ClusterError as loss:
                raise loss from (noticed or loss.__cause__)

    async def _watch(self) -> None:
        """Raise `ClusterError` when a worker is lost."""
        try:
            message = await self._comm.read()
        except OSError as error:
            self._cut = True
            self._lost.set()
            raise ClusterError(_CUT) from error
        self._lost.set()
        name, job = message["lost"], message["job"]
        known = any(found(self._client) is not None for found in (own_cluster, directory_of, cluster_of))
        why = await self._why_lost(job["id"], job["name"]) if job and known else ""
        raise ClusterError(f"{lost_words(name, job)}{': ' if why else ''}{why}. The other workers are free again")

    async def _why_lost(self, job_id: str, name: str) -> str:
        """Return how the job of a lost worker has ended, as the queue reports it soon; empty if it does not."""
        began, asked, self._observer = time.monotonic(), False, None
        while True:
            job = next((job for job in await self._jobs() if (job.id, job.name) == (job_id, name)), None)
            state = JobState(job.state) if job is not None else JobState.UNKNOWN
            if job is not None and state.ended:
                return f"{job.reason}. Log: {job.log}"
            if job is not None and asked and state is JobState.RUNNING:
                return f"its job still runs, so its process has probably crashed. Log: {job.log}"
            stays = state is not JobState.COMPLETING and await self._has_workers(name)
            if time.monotonic() <= began + (_STAYS if stays else _ENDED):
                asked = False
                await asyncio.sleep(0.5)
            elif asked or not (asked := await self._ask(job_id)):
                return ""

    async def _ask(self, job_id: str) -> bool:
        """Query the queue for a job now, as its state may be old; return whether it has answered."""
        with suppress(HpcgpuError):
            own = own_cluster(self._client)
            return own is None or await own.manager.poll([job_id])  # the observer of another cluster does so
        return False

    async def _has_workers(self, job: str) -> bool:
        """Whether a job has workers now, perhaps the one that its nanny has started again."""
        with suppress(TimeoutError, OSError, AttributeError):  # a client that is closed has no scheduler
            async with asyncio.timeout(_CALLS):
                return bool(await self._client.scheduler.hpcgpu_workers_of_job(job=job))
        return False

    async def _jobs(self) -> Iterable[JobInfo]:
        """Return the jobs of the cluster; none if they are not known within seconds."""
        with suppress(TimeoutError, OSError, ValueError, HpcgpuError):
            return await asyncio.wait_for(in_thread(self._jobs_now), _ANSWERED)
        return []

    def _jobs_now(self) -> Iterable[JobInfo]:
        if (own := own_cluster(self._client)) is not None:
            return own.jobs
        if self._observer is None and (observer := _observer_of(self._client)) is not None:
            self._observer = observer
            observer.soon()  # the queue shows the end of a job with a delay
        return self._observer.snapshot().jobs if self._observer is not None else []

    async def first_end(self, jobs: Iterable[Mapping[str, Any]], scheduler: Mapping[str, Any] | None) -> str:
        """Return which job ends first, and when; see `hpcgpu.client.first_end_of_held_workers`."""
        own = own_cluster(self._client)
        return await first_end(
            jobs, scheduler, self._jobs, partial(own.manager.poll, recent=True) if own is not None else None
        )

    async def let_go(self, error: BaseException | None) -> None:
        """Let the workers go; raise `ClusterError` if one was lost and the block failed for that reason.

        Warn if a call still runs on them.
        """
        failed = isinstance(error, Exception) and not isinstance(error, ClusterError)
        try:
            if failed and (isinstance(error, CommClosedError) or self._lost.is_set()):
                await self._raise_loss(error)
        finally:
            try:
                with suppress(OSError):  # this ends a connection of which a forked process has a copy, too
                    await self._comm.close()
            finally:  # also if the block is cancelled meanwhile
                self.abandon()
            if self._begun and not self._cut and self._client.status == "running":
                await self._warn_of_calls()

    def abandon(self) -> None:
        """Let the workers go; the event loop of the client may have ended."""
        self._ended = True
        blocks.pop(self, None)
        with suppress(RuntimeError):  # the event loop is closed, and so are its connections
            self._comm.abort()
            self._watching.cancel()
            self._watching.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _warn_of_calls(self) -> None:
        """Warn of the calls of this block that still run: the next program would share the GPUs with them."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_CALLS):
                found = await self._client.scheduler.hpcgpu_calls(workers=self.addresses)
            if found:
                warn(f"hold: the block has ended, but {still_run(found)}. Other blocks get these workers last")


def _observer_of(client: Client) -> Observer | Questions | None:
    """Return what queries the jobs of a cluster to which this program has only connected; None if it is not known."""
    if (path := directory_of(client)) is not None:
        return Observer(ClusterDirectory.existing(path))
    reached = cluster_of(client)
    return Questions(reached.login, reached.scheduler.directory) if reached is not None else None


#: What is known if the connection to the scheduler breaks.
_CUT = (
    "the connection to the scheduler is broken: the scheduler is gone, or the network was interrupted, or this "
    "computer has slept. This program holds no worker any more, and its calls may still run: hold workers again"
)


def still_run(calls: Mapping[str, Collection[str]]) -> str:
    """Return the sentence that calls still run on workers, and what ends them; the names of the calls by worker."""
    names, workers = sorted({name for found in calls.values() for name in found if name}), sorted(calls)
    what = f"calls ({', '.join(names)})" if names else "calls"
    shown = ", ".join(workers[:_SHOWN]) + f" and {len(workers) - _SHOWN} more" * (len(workers) > _SHOWN)
    ends = f"`client.restart_workers({workers[:_SHOWN]})` of a client of the cluster ends them"
    return f"{what} still run on {shown}: {ends}"


def _raised_on(held: HeldWorker) -> str:
    """Return which rank, worker, job and node it was, in words."""
    job = f" of job {held.job_id} ({held.job})" if held.job else ""
    return f"Raised on rank {held.rank}: worker {held.name}{job}, node {held.node}"


def member(one: HeldWorkerInfo, port: int) -> HeldWorker:
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
