"""Manages one cluster: starts it or takes it over, keeps its jobs as the user wants them, leaves it or ends it.

The user's program, the scheduler job, and a program that takes a cluster over use the same class. It does not depend on
Dask's cluster classes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from distributed.core import Status
from distributed.security import Security

from hpcgpu.batch.base import BatchSystem, JobState
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.display.job_table import JobTable
from hpcgpu.display.progress import Progress
from hpcgpu.display.warn import warn
from hpcgpu.errors import BatchError, ClusterError, Damaged, NameLost, Superseded
from hpcgpu.jobs.program_exit import cancel_at_exit, keep_at_exit
from hpcgpu.jobs.submit_and_cancel import Dispatcher, Ending
from hpcgpu.manager import start_cluster
from hpcgpu.manager.answer_clients import answer_clients
from hpcgpu.manager.closing import Closing
from hpcgpu.manager.connect_to_scheduler import Connector
from hpcgpu.manager.periodic_tasks import Periodic
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.manager.restart_scheduler import SchedulerRestarts
from hpcgpu.manager.submit_planned import wait_for_submits
from hpcgpu.manager.wait_for_workers import HoldWait, what_drains_wait_for, what_jobs_wait_for
from hpcgpu.notify import Callbacks, Notices
from hpcgpu.options.shared_options_and_defaults import Options, WorkerOptions
from hpcgpu.runtime.scheduler_connection import unreachable
from hpcgpu.scaling.wanted_state import Close, Command, Detach
from hpcgpu.software.compare_environments import EnvironmentCheck
from hpcgpu.state.cluster_phases import Kind, Ownership
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.state.message_log import MessageLog
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.directory import ClusterDirectory

#: Seconds for the queue's answer to a program that asks when its jobs end.
_ANSWERED = 5.0
#: Seconds for drains when this program leaves its cluster: by `detach`; by `close`, which may run at exit.
_DETACH_TIMEOUT, _LEAVE_TIMEOUT = 30.0, 5.0
#: Seconds that the scheduler has after that for its last answers, all together: it may hang.
_LAST_ANSWERS = 5.0
#: How often a task is cancelled, half a second apart.
_CANCELS = 10
#: A phase as distributed calls it.
_STATUS = {
    Kind.CREATED: Status.created,
    Kind.STARTING: Status.starting,
    Kind.RUNNING: Status.running,
    Kind.RESTARTING: Status.starting,
    Kind.CLOSING: Status.closing,
    Kind.CLOSED: Status.closed,
}


class Manager:
    """The manager of one cluster. All its coroutines run in one event loop.

    Parameters
    ----------
    options : Options
    dispatcher : Dispatcher
    ownership : Ownership
    groups : mapping of str to WorkerOptions, optional
        Further worker groups of a cluster that the manager takes over.
    callbacks : Callbacks, optional
        Functions of the user's program.
    cluster : object, optional
        The argument of `Callbacks.on_ending`.
    """

    def __init__(
        self,
        options: Options,
        dispatcher: Dispatcher,
        ownership: Ownership,
        *,
        groups: Mapping[str, WorkerOptions] | None = None,
        callbacks: Callbacks | None = None,
        cluster: object = None,
    ) -> None:
        directory = dispatcher.directory
        self.options = options
        self.messages = MessageLog(lambda: self.status == Status.starting and not self.state.phase.restarting)
        registry = start_cluster.registry_of(options, groups or {}, dispatcher)
        name = options.cluster.name
        self.state = ClusterState(name, dispatcher, registry, ownership, self.messages, time.time)
        self.state.wanted = start_cluster.wanted_first(registry.groups, options.cluster.jobs)
        self.reconciler = Reconciler(self.state, EnvironmentCheck(options.cluster.environment_check))
        try:
            self.security = certificates_and_keys.security(directory) if options.cluster.security else Security()
        except FileNotFoundError:
            if not ownership.attached:
                raise
            self.security = Security()  # the cluster has ended: the start raises the error
        self._periodic = Periodic(self.reconciler, options)
        self.groups = self._periodic.groups
        self._notices = Notices(self.state, options.cluster, callbacks or Callbacks(), cluster)
        self._periodic.check_notices = self._notices.check
        self._starter = start_cluster.Starter(self.reconciler, self._periodic, options, self.security)
        self._connector = Connector(self.reconciler, self.security)
        if options.cluster.on_scheduler_end == "restart":
            self.reconciler.restarts = SchedulerRestarts(
                self.state, self._starter.scheduler_job, self._connector.connect, self._manage_through
            )
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        #: Until when the scheduler may answer, while this program leaves the cluster: `time.monotonic`.
        self._answers_until = math.inf
        if ownership.ends_at_exit:
            cancel_at_exit(dispatcher)

    @classmethod
    def of_existing(  # noqa: PLR0913  # what a take-over depends on
        cls,
        directory: ClusterDirectory,
        batch: BatchSystem,
        *,
        ends_jobs: bool,
        wait: bool = True,
        in_scheduler_job: bool = False,
        after: int | None = None,
        callbacks: Callbacks | None = None,
        cluster: object = None,
        **given: Any,
    ) -> Manager:
        """Return a manager for a cluster that exists; its `start` takes the cluster over.

        Parameters
        ----------
        directory : ClusterDirectory
        batch : BatchSystem
            Its batch system.
        ends_jobs : bool
            Whether `close` ends its jobs.
        wait : bool, default True
            Whether `start` waits for the scheduler.
        in_scheduler_job : bool, default False
            Whether this program runs in the scheduler job, and ends with it.
        after : int, optional
            The number of the manager from which it takes the cluster over. Default: any.
        callbacks, cluster
            See `Manager`.
        **given
            Options that replace those of the cluster's start, such as ``quiet``. None and empty values are ignored.

        Raises
        ------
        HpcgpuError
            It cannot be taken over; see `hpcgpu.cluster.gpucluster.GPUCluster.from_name`.
        """
        kept = start_cluster.attachable(directory, batch.name)
        name, parent = directory.path.name, directory.path.parent
        settings = replace(kept.options.cluster, cluster_directory=parent, name=name, jobs=0, wait=wait)
        settings = replace(settings, **{option: value for option, value in given.items() if value not in (None, "")})
        batch.check()
        # 0: this program takes the cluster over when it knows that it can, see `hpcgpu.manager.take_over`
        dispatcher = Dispatcher(batch, directory, 0)
        ends = not directory.detached
        ownership = Ownership(ends_jobs, ends, attached=True, in_scheduler_job=in_scheduler_job, after=after)
        options = replace(kept.options, cluster=settings)
        return cls(options, dispatcher, ownership, groups=kept.groups, callbacks=callbacks, cluster=cluster)

    @property
    def status(self) -> Status:
        """Whether it is starting, running, failed, or closed."""
        phase = self.state.phase
        if phase.failed and not phase.closing:
            return Status.failed
        begun = phase.of(*_STATUS)
        return _STATUS[begun.kind if begun is not None else Kind.CREATED]

    @property
    def client(self) -> SchedulerClient | None:
        """The connection to the scheduler, once there is one."""
        return self.state.present_client()

    @property
    def managing(self) -> bool:
        """Whether it manages the jobs: it is open, the cluster has not failed, and nobody has taken it over."""
        return self.state.phase.kind in (Kind.STARTING, Kind.RUNNING, Kind.RESTARTING)

    def check_usable(self) -> None:
        """Raise `ClusterError` if the cluster has failed, or if this program has closed it."""
        if self.state.phase.lost:
            raise ClusterError(self.state.phase.lost)
        if self.state.phase.closing:
            raise ClusterError(self.state.phase.not_ours or f"cluster {self.state.name} is closed")

    def order(self, command: Command) -> None:
        """Carry out a command of the user; see `Reconciler.order`."""
        self.reconciler.order(command)

    def hold_wait(self, n_workers: int, resources: Mapping[str, float], beside: Collection[str]) -> HoldWait:
        """Return the wait of a program for workers to hold; see `HoldWait`."""
        return HoldWait(self.state, n_workers, resources, beside)

    async def poll(self, job_ids: Collection[str], *, recent: bool = False) -> bool:
        """Query the queue once for these jobs; return whether it has answered.

        If `recent`, an answer since their starts is enough that is younger than `poll_interval`; else all jobs are
        queried, so that the next call has such an answer.
        """
        if recent and self._runs_as_answered(job_ids):
            return True
        if recent:
            job_ids = self.state.dispatcher.monitor.alive()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.state.poll(job_ids), _ANSWERED)
            return not self.state.dispatcher.monitor.error
        return False

    def _runs_as_answered(self, job_ids: Collection[str]) -> bool:
        """Whether the queue has reported within the last `poll_interval` that these jobs run."""
        monitor = self.state.dispatcher.monitor
        views = [monitor.views.get(job_id) for job_id in job_ids]
        young = monitor.answered_at is not None and self.state.now - monitor.answered_at < monitor.cadence.poll_interval
        return young and all(view is not None and view.status.state is JobState.RUNNING for view in views)

    async def settle(self) -> None:
        """Wait until the requested jobs are submitted, and the draining jobs have finished and are cancelled.

        Raises
        ------
        ClusterError
            The cluster has failed, or a job was refused.
        """
        state = self.state
        await self._submits_and_drains()
        if not state.phase.closing:
            await state.poll()  # `jobs` now shows the result
            await self.reconciler.refresh()
        state.check()

    @property
    def jobs(self) -> JobTable:
        """The jobs of the cluster: all that have not ended, and the last thousand that have."""
        state = self.state
        jobs, answered = list(state.registry.jobs.values()), state.dispatcher.monitor.answered_at
        age = state.now - answered if answered is not None and any(job.alive for job in jobs) else 0.0
        return JobTable((job.info(now=state.now) for job in jobs), age, state.now)

    # Start

    @property
    def begun(self) -> bool:
        """Whether its start has begun."""
        return self._starting is not None

    @property
    def starting(self) -> bool:
        """Whether it starts now."""
        return self._starting is not None and not self._starting.done()

    @property
    def may_stay(self) -> bool:
        """Whether the jobs stay if the program that waits for the start is interrupted."""
        return self._starting is not None and self._starter.submitted.is_set() and not self.options.cluster.wait

    async def start(self) -> None:
        """Start the cluster, or take it over, and wait for its scheduler; with ``wait=False``, for the submits only.

        Raises
        ------
        ClusterError
            The cluster did not start. No job is left then, or the jobs stay with the other manager.
        """
        if self.state.phase.closing:
            self.check_usable()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            if not self.options.cluster.wait:
                submitted = asyncio.ensure_future(self._starter.submitted.wait())
                await asyncio.wait([submitted, self._starting], return_when=asyncio.FIRST_COMPLETED)
                submitted.cancel()
                if not self._starting.done():
                    self._starting.add_done_callback(self._started_in_background)
                    return
        restarts = self.reconciler.restarts
        if restarts is not None and self.state.phase.restarting:  # Dask's client waits here before it connects
            await self._show_start(asyncio.ensure_future(restarts.wait_until_done()))
            self.check_usable()
            return
        try:
            await self._show_start(self._starting)
            await self._starting
        except Exception as error:
            failure = self._why_not_started(error)
            self.state.lose(failure)
            await self.close()
            # the message has the whole error, so the traceback does not show it again
            explained = isinstance(error, ClusterError | BatchError)
            raise ClusterError(failure) from (None if explained else error)

    async def _show_start(self, start: asyncio.Task[None]) -> None:
        """Wait until it has started, or has another scheduler, and show what it waits for."""
        state = self.state
        with Progress(self.options.cluster.quiet) as progress:
            while not start.done():
                entries = [job for job in state.scheduler.entries if job.job_id] if state.scheduler is not None else []
                waits_for = self._connector.waits_for
                if state.ownership.attached and waits_for:  # the scheduler may have run for days, and may hang
                    progress.update(f"cluster {state.name}: waiting for an answer of the scheduler at {waits_for}")
                elif entries:
                    progress.update(
                        f"cluster {state.name}: waiting for the scheduler", what_jobs_wait_for(state, entries)
                    )
                else:
                    what = "looking up its jobs" if state.ownership.attached else "starting the scheduler"
                    progress.update(f"cluster {state.name}: {what}")
                await asyncio.wait([start], timeout=0.5)

    def _started_in_background(self, start: asyncio.Task[None]) -> None:
        """Report why a cluster did not start, if nobody waits for it."""
        if not start.cancelled() and (error := start.exception()) is not None and self._closing is None:
            failure = self._why_not_started(error)
            self.state.lose(failure)
            warn(failure)
            self._closing = asyncio.ensure_future(self._close())

    def _why_not_started(self, error: BaseException) -> str:
        """Return why the cluster did not start, or was not taken over; for example, another program was faster."""
        state, reason = self.state, str(error) or repr(error)
        if state.ownership.attached:
            why = unreachable("its scheduler", error) if isinstance(error, OSError) else reason
            return f"Cluster {state.name} cannot be taken over: {why}"
        try:
            state.dispatcher.check_manager()
            if state.dispatcher.directory.closing and not state.phase.closing:
                reason = "another program stopped it meanwhile, by `hpcgpu stop` or a Stop button"
        except (Superseded, NameLost) as overtaken:
            reason = str(overtaken)
        except (OSError, Damaged):  # the first error explains more
            pass
        return f"Cluster failed to start: {reason}"

    async def _start(self) -> None:
        state = self.state
        state.starts()
        client: SchedulerClient | None = None

        async def connect() -> None:
            nonlocal client
            assert state.scheduler is not None
            address = str(state.scheduler.external_address or state.scheduler.address)
            if client is not None and client.address != address:  # that scheduler has ended meanwhile
                await client.close()
                client = None
            client = client or await self._connector.connect(address)

        try:
            if state.ownership.attached:  # if the scheduler cannot be used, the cluster keeps its present manager
                client = await self._connector.connect_to_running(security=bool(self.options.cluster.security))
            await self._starter.start(connect)
            self.check_usable()
            if state.phase.superseded:
                raise ClusterError(state.phase.not_ours)
        except BaseException:
            if client is not None:
                await client.close()
            raise
        if state.client is None:
            assert client is not None
            await self._manage_through(client)
        elif client is not None:  # another scheduler has followed meanwhile
            await client.close()

    async def _manage_through(self, client: SchedulerClient) -> None:
        """Manage the cluster through this connection to its scheduler from now on."""
        state = self.state
        answer_clients(state, client.address, restarts=self.reconciler.restarts is not None)
        state.runs()
        state.client = client
        self.reconciler.observe_workers(client.known)
        # some workers joined before the first comparison
        self.reconciler.compare_environments(client.known, client.known)
        await self.reconciler.observe_load()
        self.reconciler.drainer.continue_drains()
        self._periodic.watch_scheduler(client)

    # End

    async def detach(self) -> None:
        """Leave the cluster: its jobs continue.

        Raises
        ------
        ClusterError
            The jobs cannot continue alone, they do not belong to this program, or the detach cannot be recorded.
        """
        state = self.state
        if not state.managed:
            raise ClusterError(
                state.phase.not_ours or state.phase.lost or f"cluster {state.name} is {self.status.name}"
            )
        await wait_for_submits(state.registry.worker_jobs)
        self.reconciler.order(Detach())  # whatever happens to this program now, the jobs stay
        try:
            await self._leave(_DETACH_TIMEOUT)
        finally:
            state.detaches()
        await self.close()

    async def _leave(self, seconds: float) -> None:
        """Complete submits and drains before this program leaves the cluster: perhaps no other program manages it.

        A job that still works after this time takes tasks again. The next manager drains it.
        """
        state = self.state
        state.leaves_when_done, self._answers_until = True, time.monotonic() + seconds + _LAST_ANSWERS
        self.reconciler.decide()
        await _cancel_tasks(await self._submits_and_drains(seconds))
        if staying := await self.reconciler.drainer.return_unfinished(self._seconds_for_answer):
            state.messages.warn(
                f"{listed(staying)} of cluster {state.name} should end, but still works. It continues after this "
                "program has left the cluster; the next program that manages the cluster ends it"
            )
        await self._report_to_scheduler(SchedulerClient.release)

    async def _submits_and_drains(self, seconds: float = math.inf) -> list[asyncio.Task[None]]:
        """Wait for submits and drains, and show what they wait for; return those that do not end in this time."""
        state, until = self.state, time.monotonic() + seconds
        with Progress(self.options.cluster.quiet) as progress:
            while (tasks := [task for task in state.tasks if not task.done()]) and time.monotonic() < until:
                progress.update(f"cluster {state.name}: waiting for {what_drains_wait_for(state.registry.draining)}")
                await asyncio.wait(tasks, timeout=min(0.5, seconds))
        return tasks

    @property
    def _seconds_for_answer(self) -> float:
        """Seconds that the scheduler has for an answer while this program leaves the cluster."""
        return max(0.0, min(_LAST_ANSWERS, self._answers_until - time.monotonic()))

    async def _report_to_scheduler(self, call: Callable[[SchedulerClient], Awaitable[None]]) -> None:
        """Report to the scheduler that this program leaves the cluster; it may not answer."""
        if self.client is not None:
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(call(self.client), self._seconds_for_answer)

    async def close(self, *, release: bool = True) -> None:
        """End the jobs, or leave them; `Ownership` determines which.

        Parameters
        ----------
        release : bool, default True
            Whether jobs that are left need no manager from now on. Otherwise they end by the lease.
        """
        if self.state.phase.kind is Kind.CLOSED:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(release=release))
        await asyncio.shield(self._closing)

    async def _close(self, *, release: bool = True) -> None:
        """Cancel the jobs, disconnect from the scheduler if it answers, wait until the queue is empty."""
        state = self.state
        self._observe_take_over()
        # before it has taken the cluster over, the jobs are not this program's to end
        theirs = state.ownership.attached and not state.dispatcher.manager
        leaves = theirs or state.ownership.leaves_jobs(state.phase, cancelled=state.dispatcher.closing)
        if not leaves:
            self.reconciler.order(Close())
        elif release and state.managed and self._starter.submitted.is_set():
            try:
                self.reconciler.order(Detach())
            except (ClusterError, BatchError, OSError) as error:
                if state.managed:
                    state.messages.warn(str(error))
            else:
                await self._leave(_LEAVE_TIMEOUT)
        state.closes()
        restarts = self.reconciler.restarts
        restart = restarts.tasks if restarts is not None else set()
        await _cancel_tasks(
            [*self._periodic.tasks, *state.tasks, *([self._starting] if self._starting else []), *restart]
        )
        for group in state.registry.groups.values():
            group.adaptive = None
        if leaves:
            left = await self._leave_jobs()
        else:
            closing = Closing(self.reconciler, quiet=self.options.cluster.quiet)
            await closing.cancel()
            # at exit distributed waits 10 s for all of this
            if state.dispatcher.ending is not Ending.OVERTAKEN:
                state.notify("ended", state.phase.lost or f"cluster {state.name} was closed")
            self._notices.deliver_unsent()
            if state.scheduler is not None:
                await state.scheduler.close()
            await closing.wait()
            await self._disconnect()
            closing.finish()
            left = ""
        await self._notices.finish()
        state.closed(left)

    def _observe_take_over(self) -> None:
        """Notice at once if another program has taken the cluster over: then the jobs are not this program's to end."""
        if self.state.dispatcher.manager:  # else this program has not taken the cluster over yet
            try:
                self.state.dispatcher.check_manager()
            except Superseded as error:
                self.state.supersede(str(error))
            except (OSError, Damaged, NameLost):  # `Dispatcher.cancel_all` decides what to cancel
                pass

    async def _leave_jobs(self) -> str:
        """Close the connection of this program only; return how to come back to the cluster."""
        state, name = self.state, self.state.name
        keep_at_exit(state.dispatcher)
        with suppress(OSError):
            state.dispatcher.directory.leave(state.dispatcher.manager)
        await self._report_to_scheduler(lambda client: client.goodbye(state.dispatcher.manager))
        await self._disconnect()
        jobs = "" if state.phase.superseded else f": {listed(state.dispatcher.left())}"
        self.messages.log(f"closed; its jobs keep running{jobs}")
        return f"cluster {name} was detached from this program: from_name({name!r}) attaches to it"

    async def _disconnect(self) -> None:
        if self.client is not None:
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(self.client.close(), 5)


async def _cancel_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks until they end: a call of Dask may turn a cancel into an OSError, and then a drain tries again."""
    for _ in range(_CANCELS):
        for task in tasks:
            task.cancel()
        tasks = [task for task in tasks if not task.done()]
        if not tasks:
            break
        await asyncio.wait(tasks, timeout=0.5)
