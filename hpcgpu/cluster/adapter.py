"""Makes the reconciler a `distributed.deploy.spec.SpecCluster`.

It forwards what upstream calls, and overrides what is broken upstream.

SpecCluster's handling of grouped workers, of dead jobs and of a dead scheduler is broken (distributed #4069, #9102), so
that planning, retirement, status, start and end are overridden.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, ClassVar, Self

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster
from distributed.security import Security

from hpcgpu.cluster.adaptive import GPUAdaptive
from hpcgpu.cluster.closing import Closing
from hpcgpu.cluster.exit import guard, unguard
from hpcgpu.cluster.log import MessageLog
from hpcgpu.cluster.notify import Callbacks, Notices
from hpcgpu.cluster.periodic import Periodic
from hpcgpu.cluster.plan import Planner
from hpcgpu.cluster.reconciler import Reconciler
from hpcgpu.cluster.scheduler_client import RpcClient
from hpcgpu.cluster.starting import Starter
from hpcgpu.cluster.state import ClusterState
from hpcgpu.cluster.waiting import what_jobs_wait_for
from hpcgpu.cluster.worker_job import WorkerJob
from hpcgpu.display.progress import Progress
from hpcgpu.display.warn import warn
from hpcgpu.display.words import listed
from hpcgpu.errors import BatchError, ClusterError, Damaged, NameLost, Superseded
from hpcgpu.options.common import Options
from hpcgpu.remote import lost
from hpcgpu.runtime.reach import no_answer
from hpcgpu.scaling import units
from hpcgpu.scaling.wanted import Command
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["Adapter"]

#: Seconds that the scheduler may take to report its software.
_ENVIRONMENT_TIMEOUT = 30.0
#: Seconds after which Cluster writes into the scheduler's metadata again what it is called. Its default is 1.
_SYNC_INTERVAL = 10.0


class Adapter(SpecCluster):  # type: ignore[misc]
    """A SpecCluster whose jobs a `Reconciler` manages.

    Parameters
    ----------
    reconciler : Reconciler
    options : Options
    security : Security
    messages : MessageLog
        The messages of the reconciler to the user.
    asynchronous, loop
        See `distributed.deploy.spec.SpecCluster`.
    """

    system: ClassVar[str]
    directory: ClusterDirectory
    _callbacks = Callbacks()

    def __init__(
        self,
        reconciler: Reconciler,
        options: Options,
        security: Security,
        messages: MessageLog,
        *,
        asynchronous: bool,
        loop: Any,
    ) -> None:
        self.options = options
        self.reconciler = reconciler
        reconciler.send = self._order
        self._messages = messages
        self._status = Status.created
        self._periodic = Periodic(reconciler, options.cluster)
        self._notices = Notices(self._state, options.cluster, self._callbacks, self)
        self._periodic.look = self._notices.look
        self._starter = Starter(reconciler, self._periodic, options, security)
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._watch_worker_status_task: asyncio.Task[None] | None = None
        if self._state.ownership.ends_at_exit:
            guard(self._state.dispatcher)
        super().__init__(
            worker={"cls": WorkerJob, "options": {}},
            asynchronous=asynchronous,
            loop=loop,
            name=options.cluster.name,
            security=security,
            scheduler_sync_interval=_SYNC_INTERVAL,
        )

    # Views, which SpecCluster has as attributes that its constructor sets

    @property
    def _state(self) -> ClusterState:
        return self.reconciler.state

    @property
    def status(self) -> Status:
        """Whether it is starting, running, failed, or closed."""
        ending = self._status in (Status.closing, Status.closed)
        return Status.failed if self._state.failed and not ending else self._status

    @status.setter
    def status(self, status: Status) -> None:
        self._status = status

    @property
    def scheduler(self) -> Any:
        """The scheduler, once it was requested: its job, or the scheduler in this process."""
        return self._state.scheduler.held if self._state.scheduler is not None else None

    @scheduler.setter
    def scheduler(self, scheduler: None) -> None:
        pass

    @property
    def workers(self) -> dict[str, WorkerJob]:
        """The jobs that are neither draining nor ended, by name."""
        return self._state.registry.active

    @workers.setter
    def workers(self, workers: object) -> None:
        pass

    @property
    def worker_spec(self) -> dict[str, Any]:
        """The same jobs, as SpecCluster specifies workers."""
        return dict.fromkeys(self._state.registry.active, self.new_spec)

    @worker_spec.setter
    def worker_spec(self, spec: object) -> None:
        pass

    @property
    def shutdown_on_close(self) -> bool:
        """Whether the end of this program closes the cluster; upstream's exit hook reads it."""
        return self._state.ownership.ends_at_exit and self._state.ownership.owner

    @shutdown_on_close.setter
    def shutdown_on_close(self, close: bool) -> None:
        pass

    @property
    def adaptive(self) -> GPUAdaptive | None:
        """Adaptive scaling of the default group, or of the first group that has it."""
        groups = self._state.registry.groups.values()
        return next((group.adaptive for group in groups if group.adaptive is not None), None)

    @property
    def _adaptive(self) -> GPUAdaptive | None:
        """The same, for distributed's widget."""
        return self.adaptive

    @_adaptive.setter
    def _adaptive(self, adaptive: object) -> None:
        pass

    @Planner
    def plan(self) -> set[str]:
        """Names of the workers that the cluster is to have."""
        return {worker for job in self.workers.values() for worker in units.workers_of(job.name, job.group.options)}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are in the plan."""
        return self.plan

    def new_worker_spec(self) -> dict[str, Any]:
        """Return name and specification of the next worker job; names are never used twice."""
        return {self._state.registry.new_name(): self.new_spec}

    # What upstream calls

    def _log(self, log: str) -> None:
        self._messages.log(log)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        joined = dict(msg["workers"]) if op == "add" else {}
        if op == "add":
            for address, worker in joined.items():
                self.reconciler.worker_joined(address, worker["name"])
        elif op == "remove":
            self.reconciler.worker_left(msg)
            if msg not in self.scheduler_info["workers"]:
                return
        Cluster._update_worker_status(self, op, msg)
        if joined:
            self.reconciler.compare_environments(joined, self.scheduler_info["workers"])
        self._state.changed.set()

    def _correct_state(self) -> asyncio.Future[Any]:
        """Submit the jobs that were planned; returns what waits for that, but not for jobs that drain."""
        self.reconciler.submitter.submit_planned()
        submits = [job.submit_task for job in self._state.registry.worker_jobs if job.submit_task is not None]
        return asyncio.gather(*submits, return_exceptions=True)

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Drain the jobs all of whose workers are named. Names of jobs count too.

        Parameters
        ----------
        workers : iterable of str
            Names of workers or of jobs.
        """
        self._check_usable()
        self.reconciler.scale_down({str(worker) for worker in workers})
        self.reconciler.submitter.submit_planned()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    def _check_usable(self) -> None:
        """Raise `ClusterError` if the cluster has failed, or if this program has closed it."""
        if self._state.failures.lost:
            raise ClusterError(self._state.failures.lost)
        if self.status in (Status.closing, Status.closed):
            raise ClusterError(self._state.ownership.why or f"cluster {self._state.name} is closed")

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Run a call in the event loop, which alone changes the state.

        Wait for it, unless that would block the caller's own loop.
        """
        self._check_usable()

        async def acted() -> None:
            act()

        if self.called_from_running_loop:
            act()
        elif self.asynchronous:
            self.loop.add_callback(act)
        else:
            self.sync(acted)

    def _act(self, act: Callable[[], None]) -> None:
        """Change the cluster, in the event loop; raise `ClusterError` if another program has taken it over."""
        self._check_usable()
        try:
            self._state.dispatcher.check_manager()
        except Superseded as error:
            why = str(error)
            self._in_loop(lambda: self._state.supersede(why))
            raise ClusterError(why) from error
        self._in_loop(act)

    def _order(self, command: Command, adaptive: GPUAdaptive | None = None) -> None:
        """Let the manager do what the user orders."""
        self._act(lambda: self.reconciler.order(command, adaptive))

    # Starting

    async def _start(self) -> None:
        if self.status in (Status.closing, Status.closed):
            self._check_usable()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_once())
            if not self.options.cluster.wait:
                submitted = asyncio.ensure_future(self._starter.submitted.wait())
                await asyncio.wait([submitted, self._starting], return_when=asyncio.FIRST_COMPLETED)
                submitted.cancel()
                if not self._starting.done():
                    self._starting.add_done_callback(self._started_in_background)
                    return
        try:
            await self._show_start(self._starting)
        except Exception as error:
            failure = self._why_not_started(error)
            self._state.failures.lose(failure)
            await self._close()
            # all of it is in the message: it need not be shown twice
            told = isinstance(error, ClusterError | BatchError)
            raise ClusterError(failure) from (None if told else error)

    async def _show_start(self, starting: asyncio.Task[None]) -> None:
        """Wait until it has started, and show what it waits for."""
        state = self._state
        with Progress(self.options.cluster.quiet) as progress:
            while not starting.done():
                entries = [job for job in state.scheduler.entries if job.job_id] if state.scheduler is not None else []
                if entries:
                    progress.update(
                        f"cluster {state.name}: waiting for the scheduler", what_jobs_wait_for(state, entries)
                    )
                else:
                    what = "looking up its jobs" if state.ownership.attached else "starting the scheduler"
                    progress.update(f"cluster {state.name}: {what}")
                await asyncio.wait([starting], timeout=0.5)
            await starting

    def _started_in_background(self, starting: asyncio.Task[None]) -> None:
        """Report why a cluster did not start, if nobody waits for it."""
        if not starting.cancelled() and (error := starting.exception()) is not None and self._closing is None:
            failure = self._why_not_started(error)
            self._state.failures.lose(failure)
            warn(failure)
            self._closing = asyncio.ensure_future(self._close_once())

    def _why_not_started(self, error: BaseException) -> str:
        """Return why the cluster did not start, or was not taken over; also if another program came first."""
        state, said = self._state, str(error) or repr(error)
        if state.ownership.attached:
            return f"Cluster {state.name} cannot be taken over: {said}"
        try:
            state.dispatcher.check_manager()
            if state.dispatcher.directory.closing and not state.closing:
                said = "another program stopped it meanwhile, by `hpcgpu stop` or a Stop button"
        except (Superseded, NameLost) as overtaken:
            said = str(overtaken)
        except (OSError, Damaged):  # the error says more than that
            pass
        return f"Cluster failed to start: {said}"

    async def _start_once(self) -> None:
        self.status = Status.starting
        state = self._state
        await self._starter.start()
        assert state.scheduler is not None
        address = state.scheduler.external_address or state.scheduler.address
        state.messages.log(f"the scheduler is at {address}")
        lost.ask(str(address), functools.partial(_why_lost, weakref.ref(state)))
        self.scheduler_comm = rpc(address, connection_args=self.security.get_connection_args("client"))
        await Cluster._start(self)
        state.client = client = RpcClient(self)
        await self._compare_with_scheduler(client)
        self.reconciler.observe_workers(client.known)
        self.reconciler.compare_environments(client.known, client.known)  # some joined before there was a comparison
        await self.reconciler.observe_load()
        self.reconciler.drainer.go_on()
        self._periodic.watch_scheduler(client)

    async def _compare_with_scheduler(self, client: RpcClient) -> None:
        """Raise or warn if the software of this program and of the scheduler is incompatible.

        If the scheduler is too busy to answer, nothing is compared.
        """
        environment = self.reconciler.environment
        if environment.mode == "off":
            return
        try:
            environment.scheduler = await client.environment(_ENVIRONMENT_TIMEOUT)
        except (OSError, TimeoutError) as error:
            self._log(f"software was not compared, because the scheduler did not answer: {no_answer(error)}")
            return
        fatal, differing = environment.check({})
        if fatal:
            raise ClusterError(fatal)
        if differing:
            self._log(differing)
            warn(differing)

    def __await__(self) -> Generator[Any, Any, Self]:
        async def _() -> Self:
            try:
                await self._start()
                await self._correct_state()
            except asyncio.CancelledError:
                if self._starting is None or not self._starter.submitted.is_set() or self.options.cluster.wait:
                    await self._close()
                raise
            return self

        return _().__await__()

    async def __aenter__(self) -> Self:
        if self._starting is None:
            await self
        return self

    # Ending

    async def _detach(self) -> None:
        state = self._state
        if state.scheduler is not None and state.scheduler.in_process:
            raise ClusterError("scheduler='local': the scheduler runs in this program, and ends with it")
        if not state.managed:
            raise ClusterError(
                state.ownership.why or state.failures.lost or f"cluster {state.name} is {self.status.name}"
            )
        submits = [job.submit_task for job in state.registry.worker_jobs if job.submit_task is not None]
        await asyncio.gather(*submits, return_exceptions=True)
        state.dispatcher.directory.detach()
        if isinstance(state.client, RpcClient):
            with suppress(TimeoutError, OSError):
                await state.client.release()
        state.ownership.detach()
        unguard(state.dispatcher)
        await self._close()

    async def _close(self) -> None:
        if self.status == Status.closed:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close_once())
        await asyncio.shield(self._closing)

    async def _close_once(self) -> None:
        """Cancel the jobs, disconnect from the scheduler if it answers, wait until the queue is empty."""
        state = self._state
        leaves = state.ownership.leaves_jobs(cancelled=state.dispatcher.closing, lost=bool(state.failures.lost))
        self.status, state.closing = Status.closing, True
        for task in [*self._periodic.tasks, *state.tasks, *([self._starting] if self._starting else [])]:
            task.cancel()
        for group in state.registry.groups.values():
            group.adaptive = None
        if leaves:
            await self._leave_jobs()
        else:
            closing = Closing(state, quiet=self.options.cluster.quiet)
            await closing.cancel()
            # at exit distributed waits 10 s for all of this
            state.tell("ended", state.failures.lost or f"cluster {state.name} was closed")
            self._notices.deliver_unsent()
            if state.scheduler is not None:
                await state.scheduler.close()
            await closing.wait()
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(Cluster._close(self), 5)
            closing.finish()
            state.ownership.close()
        await self._notices.finish()
        self.status = Status.closed
        state.changed.set()

    async def _leave_jobs(self) -> None:
        """Close the connection of this program only."""
        state, name = self._state, self._state.name
        unguard(state.dispatcher)
        with suppress(OSError):
            state.dispatcher.directory.leave(state.dispatcher.manager)
        with suppress(TimeoutError, OSError):
            if isinstance(state.client, RpcClient):
                await state.client.goodbye(state.dispatcher.manager)
            await asyncio.wait_for(Cluster._close(self), 5)
        left = "" if state.ownership.superseded else f": {listed(state.dispatcher.left())}"
        self._log(f"closed; its jobs keep running{left}")
        state.ownership.close(f"cluster {name} was detached from this program: from_name({name!r}) attaches to it")


async def _why_lost(of: weakref.ref[ClusterState]) -> str:
    """Wait until it is known why a cluster is lost, and return that; empty if this program has closed it."""
    while (state := of()) is not None and not state.closing:
        if state.failures.lost:
            return state.failures.lost.partition("\n")[0]
        del state
        await asyncio.sleep(0.1)
    return ""
