"""The state of one cluster, which all parts of the reconciler share. Only the event loop's thread changes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcgpu.batch.reasons import explain
from hpcgpu.client.lost_scheduler import explain_loss_by_queue
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.errors import ClusterError, Damaged, Superseded
from hpcgpu.jobs.job import Job
from hpcgpu.jobs.job_registry import Registry
from hpcgpu.jobs.program_exit import keep_at_exit
from hpcgpu.jobs.submit_and_cancel import Dispatcher, Ending
from hpcgpu.scaling.replace_failed_jobs import ClusterFailures
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.state.cluster_phases import Kind, Ownership, Phase
from hpcgpu.state.message_log import MessageLog

if TYPE_CHECKING:
    from hpcgpu.jobs.local_scheduler import InProcessScheduler
    from hpcgpu.jobs.scheduler_job import SchedulerJob


@dataclass
class ClusterState:
    """One cluster as this program has recorded it.

    Attributes
    ----------
    name : str
    dispatcher : Dispatcher
        Calls the batch system, and writes the journal.
    registry : Registry
        All jobs, and the groups of the worker jobs.
    ownership : Ownership
    messages : MessageLog
    clock : callable
        Returns epoch seconds.
    failures : ClusterFailures
    wanted : Wanted
        What the user wants.
    restarted : list of float
        Epoch seconds at which its scheduler job had ended unexpectedly and was replaced.
    lost_schedulers : dict of str to str
        Why the scheduler of an address is lost, while the cluster continues.
    scheduler : SchedulerJob or InProcessScheduler or None
        None before it was requested.
    client : SchedulerClient or None
        None before the scheduler was reached, and when the cluster is closed.
    known_workers : set of str
        Addresses of all connected workers, also of workers that other programs started.
    phase : Phase
    changed : asyncio.Event
        Something happened that a user may wait for.
    poll_now, decide_now, heartbeat_now : asyncio.Event
        Wake what watches the queue, decides on the size, and sends heartbeats to the scheduler.
    tasks : set of asyncio.Task
        Submits and drains that are under way.
    leaves_when_done : bool
        This program completes them, and then leaves the cluster: it decides nothing new about worker jobs.
    notify : callable
        Notifies an absent user of an event, with a message; see `hpcgpu.notify.Notice`.
    """

    name: str
    dispatcher: Dispatcher
    registry: Registry
    ownership: Ownership
    messages: MessageLog
    clock: Callable[[], float]
    failures: ClusterFailures = field(default_factory=ClusterFailures)
    wanted: Wanted = field(default_factory=Wanted)
    restarted: list[float] = field(default_factory=list)
    lost_schedulers: dict[str, str] = field(default_factory=dict)
    scheduler: SchedulerJob | InProcessScheduler | None = None
    client: SchedulerClient | None = None
    known_workers: set[str] = field(default_factory=set)
    phase: Phase = Phase(Kind.CREATED)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)
    decide_now: asyncio.Event = field(default_factory=asyncio.Event)
    heartbeat_now: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    leaves_when_done: bool = False
    notify: Callable[[str, str], None] = lambda event, message: None

    @property
    def now(self) -> float:
        """Epoch seconds."""
        return self.clock()

    @property
    def managed(self) -> bool:
        """Whether this program manages the cluster's jobs.

        It does unless the cluster is closed or lost, or another program has taken it over.
        """
        return self.phase.managed

    @property
    def cancelling(self) -> bool:
        """Whether all jobs of the cluster must end, and the queue has not cancelled them yet."""
        return self.wanted.closing and self.dispatcher.ending in (Ending.NONE, Ending.REQUESTED)

    # The phases

    def starts(self) -> None:
        """Created -> starting."""
        self._move(Kind.STARTING)

    def restarts(self, *, failed: bool = True) -> None:
        """Running -> restarting: its scheduler job has ended, and with it all workers; `failed` if unexpectedly."""
        self._move(Kind.RESTARTING)
        if failed:
            self.restarted.append(self.now)
        self.client = None
        self.known_workers = set()
        for group in self.registry.groups.values():
            group.load_unknown()
        self.registry.scheduler_lost()

    def runs(self) -> None:
        """Starting or restarting -> running."""
        if self.managed:
            self._move(Kind.RUNNING)

    def lose(self, why: str) -> None:
        """Any -> lost, unless it is closing. The first reason stays.

        Only the first line of the reason is kept: it names the log. The present exception or warning has all of it.
        """
        if not self.phase.closing and not self.phase.lost:
            self._move(Kind.LOST, why.split("\n", 1)[0])

    def detaches(self) -> None:
        """Any -> detached, unless the cluster does not belong to this program any more."""
        if self.phase.owned:
            self._move(Kind.DETACHED)

    def stays(self) -> None:
        """Leave the jobs when this program closes the cluster, or ends."""
        self.ownership.ends_jobs = self.ownership.ends_at_exit = False
        keep_at_exit(self.dispatcher)

    def closes(self) -> None:
        """Any -> closing."""
        self._move(Kind.CLOSING)

    def closed(self, why: str = "") -> None:
        """Closing -> closed."""
        self._move(Kind.CLOSED, why)

    def _move(self, kind: Kind, why: str = "") -> None:
        self.phase = Phase(kind, why, before=self.phase)
        self.changed.set()

    def present_client(self) -> SchedulerClient | None:
        """Return the connection to the scheduler, which a program that took the cluster over may have restarted."""
        client, dispatcher = self.client, self.dispatcher
        if client is not None and self.phase.superseded:
            with suppress(OSError, Damaged):
                contact = dispatcher.directory.contact()
                if (
                    contact is not None
                    and contact.client != client.address
                    and dispatcher.directory.has_token(dispatcher.token)
                ):
                    explain_loss_by_queue(contact, dispatcher.directory)
                    client.move(contact.client)
        return client

    @property
    def listening(self) -> bool:
        """Whether the scheduler reports its workers when they come and go."""
        return self.client is not None and self.client.listening

    @property
    def halted_scheduler(self) -> Job | None:
        """The scheduler job, if it runs and the queue reports why it may do nothing."""
        jobs = self.scheduler.entries if self.scheduler is not None else []
        return next((job for job in jobs if job.queue_status.halted), None)

    async def poll(self, job_ids: Collection[str] | None = None) -> None:
        """Query the queue once for these jobs, and move each to the phase that the answer proves.

        The default is all jobs that have not ended.
        """
        await self.dispatcher.poll(job_ids)
        self.registry.observe(now=self.now)

    def check(self) -> None:
        """Raise `ClusterError` with the failures that were not reported yet, or with the reason why it is lost."""
        if text := self.phase.lost or self.failures.report():
            raise ClusterError(text)

    def check_manager(self) -> None:
        """Raise `ClusterError` if the cluster was closed, has failed, or another program has taken it over."""
        if not self.managed:
            raise ClusterError(self.phase.lost or self.phase.not_ours or f"cluster {self.name} is closed")
        try:
            self.dispatcher.check_manager()
        except Superseded as error:
            self.supersede(str(error))
            raise ClusterError(str(error)) from error

    def check_schedulable(self, jobs: Iterable[Job]) -> None:
        """Raise `ClusterError` if one of these jobs can never start."""
        name = self.failures.unschedulable(job.name for job in jobs)
        if name is not None:
            job = self.registry.jobs[name]
            raise ClusterError(
                f"{job.kind} job {job.job_id} ({name}) will never start: {explain(job.queue_status, kind=job.kind)}"
            )

    def report(self, message: str, group: str = "") -> None:
        """Warn at once, and repeat it at the next `wait_for_workers`, `repr` or `close`.

        A failure of the jobs of a worker group is repeated until the user requests another size of the group.
        """
        self.failures.add(message, group)
        self.messages.warn(message)
        self.heartbeat_now.set()  # other programs show it too
        self.changed.set()

    def supersede(self, why: str) -> None:
        """Leave the cluster to another manager."""
        if self.phase.owned:
            self._move(Kind.SUPERSEDED, why)
            for group in self.registry.groups.values():
                if group.adaptive is not None:
                    group.adaptive.lose(why, now=self.now)
            keep_at_exit(self.dispatcher)
            self.messages.warn(why)  # once: a call that is not possible any more repeats the reason
            self.changed.set()

    def spawn(
        self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]] | None = None
    ) -> asyncio.Task[None]:
        """Run something in the background; its exceptions are reported, not lost."""
        kept = self.tasks if tasks is None else tasks
        task = asyncio.ensure_future(work)
        kept.add(task)

        def done(task: asyncio.Task[None]) -> None:
            kept.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.report(f"internal error: {error!r}")

        task.add_done_callback(done)
        return task
