"""Submits another scheduler job when that of a running cluster has ended too early, or soon reaches its walltime.

The worker jobs stay in the queue: the running ones wait for the next scheduler (`hpcgpu.runtime.next_scheduler`). A
scheduler job that is submitted before it is needed waits in the queue, and then in itself
(`hpcgpu.runtime.standby_scheduler`).

The manager of a detached cluster may be in the scheduler job, and end with it. So the next scheduler job is always in
the queue there, which starts it when the present one ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from hpcgpu.batch.base import JobState
from hpcgpu.batch.reasons import explain
from hpcgpu.client.lost_scheduler import CANCELLED, RESTARTED
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.errors import AmbiguousSubmit, BatchError, ClusterError, Superseded
from hpcgpu.existing_clusters.query_jobs import ended_by_itself
from hpcgpu.jobs.job_phases import Ended, Planned
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.scaling.scheduler_restarts import (
    CancelEnded,
    DropNext,
    DropReplaced,
    ObservedNext,
    ObservedScheduler,
    Restart,
    SchedulerAction,
    SubmitNext,
    Tries,
    expected,
    why_none_follows,
)
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store.removed_directory import directory_exists

#: Seconds between two checks of the next scheduler job.
_INTERVAL = 0.5


class SchedulerRestarts:
    """Restarts the scheduler of one cluster.

    Parameters
    ----------
    state : ClusterState
    new_job : callable
        Returns a job of the scheduler, of a given name.
    connect : callable
        Connects to the scheduler at an address.
    connected : callable
        Manages the cluster through this connection from now on.
    """

    def __init__(
        self,
        state: ClusterState,
        new_job: Callable[[str], SchedulerJob],
        connect: Callable[[str], Awaitable[SchedulerClient]],
        connected: Callable[[SchedulerClient], Awaitable[None]],
    ) -> None:
        self.state = state
        self._new_job, self._connect, self._connected = new_job, connect, connected
        #: What brings the next scheduler now, if the present one has ended.
        self.tasks: set[asyncio.Task[None]] = set()
        self._tries = self._next_tries = Tries()
        #: How the scheduler has ended that is restarted now, and why the last job did not bring another one.
        self._report = ""
        self._failure: Exception | None = None
        #: The ended job whose cancel the queue has accepted.
        self._certain: str | None = None
        #: The last job that was cancelled because its scheduler was not reached.
        self._unreached: SchedulerJob | None = None
        #: The job that waits to follow the present one, and the task that submits it.
        self.following: SchedulerJob | None = None
        self._submits: asyncio.Task[None] | None = None
        #: Whether its submit began while this program left the cluster.
        self._tried_at_leaving = False
        #: The job in whose place that one is submitted: it stays until the queue has the other one.
        self._replaced: SchedulerJob | None = None
        #: Whether the scheduler ends as intended, and the cluster with it.
        self.closes = False
        #: Cancels of jobs that should have followed.
        self.drops: set[asyncio.Task[None]] = set()

    # Observe

    def observed(self, *, gone: bool = False) -> ObservedScheduler:
        """Return what the decision on the scheduler depends on; `gone` if it has ended."""
        state, dispatcher, present = self.state, self.state.dispatcher, self.state.scheduler
        assert isinstance(present, SchedulerJob)
        restarting, following = state.phase.restarting, self._observed_next()
        ended, stopped = dispatcher.monitor.ended(), self._stopped(gone=gone)
        removed = gone and directory_exists(dispatcher.directory, dispatcher.token) is False
        return ObservedScheduler(
            status=present.queue_status,
            reached=state.client is not None,
            gone=gone,
            closes=self.closes,
            certain=restarting or present.job_id in ended or present.job_id == self._certain,
            cancelled=present is self._unreached,
            restarts=True,
            coming=any(not task.done() for task in self.tasks)
            or (following is not None and self._submits_now and not gone),
            stopped=stopped,
            removed=removed,
            final=self._final() if gone and not removed and not stopped else "",
            restarted=state.restarted,
            tries=self._tries,
            next=following,
            next_tries=self._next_tries,
            waits=list(self._waits(present)),
            unattended=dispatcher.batch.waits_for_end and (state.wanted.detached or state.leaves_when_done),
            leaving=state.leaves_when_done,
            tried_at_leaving=self._tried_at_leaving,
        )

    def _stopped(self, *, gone: bool) -> bool | None:
        """Return whether another program has stopped the cluster; None if that is not known before its scheduler ends.

        A filesystem that fails for a while does not prevent the decisions on worker jobs.
        """
        try:
            return self.state.dispatcher.directory.closing
        except OSError:
            if gone:  # no scheduler follows until it is known, so the user should receive the error
                raise
            return None

    def _final(self) -> str:
        """Return why no scheduler can follow one that did not end as intended; empty if one can."""
        directory, following = self.state.dispatcher.directory, self.following
        if ended_by_itself(directory):  # while this program was suspended
            how = f": {following.failure_report()}" if following is not None and following.ended else ""
            return f"the next one has taken over and ended, too{how}"
        return ""

    def _observed_next(self) -> ObservedNext | None:
        job, registry = self.following, self.state.registry
        if job is None:
            return None
        lost = ""
        if job.name not in registry.jobs:
            lost = "the queue does not have it, and its submit got no answer"
        elif job.ended:
            lost = job.failure_report()
        elif self.state.failures.unschedulable([job.name]):
            lost = f"it will never start: {explain(job.queue_status, kind=job.kind)}"
        return ObservedNext(
            accepted=job.job_id is not None,
            held=job.after_end is not None,
            replaces=self._replaced is not None,
            lost=lost,
        )

    @property
    def submitted(self) -> bool:
        """Whether the queue has the scheduler job that follows."""
        present = self.state.scheduler
        return present is not None and present.submit_done and not present.ended

    @property
    def _submits_now(self) -> bool:
        return self._submits is not None and not self._submits.done()

    def _waits(self, present: SchedulerJob) -> Iterator[float]:
        """Yield how long jobs of the cluster have waited."""
        if present.queue_status.start is not None and present.after_end is None:
            yield present.queue_status.start - present.submitted
        for group in self.state.registry.groups.values():
            yield from group.waits

    def why_not(self) -> str:
        """Return why no other scheduler follows the last one; empty if one does."""
        return why_none_follows(self.observed(gone=True), now=self.state.now)

    # Act

    def act(self, action: SchedulerAction) -> None:
        """Carry out what was decided about the scheduler job, or about the one that follows it."""
        state = self.state
        match action:
            case SubmitNext():
                self._submit_next(held=action.held)
            case DropNext() if action.why:
                self._lost(action.why)
            case DropNext():
                jobs, self.following, self._replaced = (self.following, self._replaced), None, None
                for job in filter(None, jobs):
                    state.spawn(self._drop(job), self.drops)
            case DropReplaced():
                replaced, self._replaced = self._replaced, None
                if replaced is not None:
                    state.spawn(self._drop(replaced))
            case CancelEnded():
                state.spawn(self._cancel_ended(), self.tasks)
            case Restart():
                ended = None
                if not state.phase.restarting:
                    ended = self._begin()
                elif not isinstance(self._failure, BatchError):
                    state.restarted.append(state.now)
                state.spawn(self._restart(ended), self.tasks)

    # Before the present scheduler job ends

    def _submit_next(self, *, held: bool) -> None:
        """Submit a job that should follow, perhaps in the place of one that waits for the end of the present one."""
        present = self.state.scheduler
        assert isinstance(present, SchedulerJob)
        self._replaced, self.following = self.following, self._new_job(next_name(self.state))
        self.following.standby, self.following.after_end = True, present.job_id if held else None
        self._tried_at_leaving = self.state.leaves_when_done
        self._submits = self.state.spawn(self._submit_following(self.following))

    async def _submit_following(self, job: SchedulerJob) -> None:
        try:
            await self._submit(job)
        except AmbiguousSubmit as error:
            self.state.messages.warn(str(error))
        except Superseded as error:
            self.state.supersede(str(error))
        except (BatchError, OSError) as error:
            if not self.state.dispatcher.closing:
                self._lost(str(error))

    def _lost(self, why: str) -> None:
        """Try again later; the first failure is reported to the user."""
        state = self.state
        job, self.following, self._replaced = self.following, self._replaced, None
        accepted = job.submitted if job is not None and job.job_id is not None else None
        self._next_tries = self._next_tries.after_loss(accepted, now=state.now)
        if job is not None and job.name in state.registry.jobs:
            state.spawn(self._drop(job))
        report = state.messages.warn if self._next_tries.refused == 1 else state.messages.log
        which = f"scheduler job {job.name}" if job is not None else "a scheduler job"
        what = f"{which}, which should follow the present one of cluster {state.name}, does not come: {why}"
        report(f"{what}\nhpcgpu submits another one")

    async def _drop(self, job: SchedulerJob) -> None:
        """Let a job never become the scheduler's, also one that only counts as ended: the queue may be wrong.

        If it is not cancelled, it ends as soon as it reads the journal.
        """
        dispatcher, job.standby = self.state.dispatcher, False  # if the queue shows it later, it comes too late
        try:
            if job.ended:
                dispatcher.note_ends({job.name: job.job_id})
            else:
                dispatcher.will_cancel([job.name])
            if job_id := job.job_id or dispatcher.id_of(job.name):
                await dispatcher.cancel([job_id], forgotten=True)
        except (BatchError, OSError) as error:
            self.state.messages.warn(f"scheduler job {job.job_id} ({job.name}) was not cancelled: {error}")

    async def _take_following(self) -> SchedulerJob | None:
        """Return the job that was submitted before it is needed, if there is one; it is no other's any more."""
        if self._submits is not None:
            await asyncio.wait([self._submits])
        jobs, self.following, self._replaced = (self.following, self._replaced), None, None
        there = [job for job in jobs if job is not None and job.name in self.state.registry.jobs]
        chosen = min((job for job in there if not job.ended), key=lambda job: job.job_id is None, default=None)
        for job in there:
            if job is not chosen:
                await self._drop(job)
        return chosen

    # When it has ended

    async def _cancel_ended(self) -> None:
        """Cancel the present job, which counts as ended, where the queue does not report its end."""
        state, job = self.state, self.state.scheduler
        assert isinstance(job, SchedulerJob) and job.job_id is not None
        try:
            await state.dispatcher.cancel([job.job_id], forgotten=True)
            self._certain = job.job_id
        except (BatchError, OSError) as error:
            state.messages.log(f"scheduler job {job.job_id} counts as ended, but was not cancelled: {error}")
            self._tries = replace(self._tries, again_at=state.now + state.dispatcher.monitor.cadence.poll_interval)
        state.decide_now.set()

    async def follow(self) -> None:
        """Let another scheduler job follow the present one: the job that waits, or one that is submitted now.

        Raises
        ------
        BatchError
            It was not submitted, or the submit got no answer.
        """
        state, last = self.state, self.state.scheduler
        job = await self._take_following() or self._new_job(next_name(state))
        job.standby = False
        if isinstance(last, SchedulerJob) and last.queue_status.state is JobState.NODE_FAIL:
            job.lost_node = last.queue_status.node  # the queue may still take it for one that works
        state.scheduler = job
        if isinstance(job.phase, Planned):
            await self._submit(job)
        else:
            state.messages.log(f"scheduler job {job.job_id or job.name} takes over, which was submitted before")

    async def _submit(self, job: SchedulerJob) -> None:
        state = self.state
        state.registry.add(job)
        try:
            await job.submit()
            state.messages.log(f"submitted scheduler job {job.job_id}")
        except AmbiguousSubmit:  # the queue may have it
            raise
        except BaseException:
            state.registry.remove(job)
            raise
        finally:
            state.poll_now.set()

    def _begin(self) -> SchedulerClient | None:
        """Record how the scheduler has ended, and that worker jobs wait for another one; return its client, if any."""
        state, client, scheduler = self.state, self.state.client, self.state.scheduler
        assert isinstance(scheduler, SchedulerJob)
        state.dispatcher.note_ends({scheduler.name: scheduler.job_id})  # a job that waits for the end reads it there
        self._report = scheduler.loss_report(state.name, restarts=True)
        if client is not None:
            state.lost_schedulers[client.address] = self._report.partition("\n")[0]
        state.restarts(failed=not expected(scheduler.queue_status.state))
        state.messages.warn(self._report)
        state.notify("restarted", self._report)
        self._tries, self._failure = Tries(), None
        return client

    async def _restart(self, ended: SchedulerClient | None) -> None:
        """Try once to let another scheduler follow; the decision on what comes then needs its outcome."""
        state = self.state
        if ended is not None:
            await ended.close()
        try:
            client = await self._next()
        except Exception as error:  # whatever happens, an end of the tries is decided
            if state.managed:
                self._failed(error)
            return
        if not state.managed:
            await client.close()
            return
        self._forgive()
        self._tries = self._next_tries = Tries()
        await self._connected(client)

    def _failed(self, error: Exception) -> None:
        state, self._failure = self.state, error
        refused = isinstance(error, BatchError)
        self._tries = (self._tries.after_refusal if refused else self._tries.after_failure)(now=state.now)
        if not self.why_not():
            pause = self._tries.again_at - state.now
            then = f"hpcgpu submits another job{f' in {duration(pause)}' if pause else ''}"
            state.messages.warn(f"cluster {state.name} has no scheduler yet: {str(error) or repr(error)}\n{then}")
        state.decide_now.set()

    def loss(self, why: str) -> str:
        """Return the report that no other scheduler has followed."""
        error = self._failure
        last = f". The last failure: {str(error) or repr(error)}" if error is not None else ""
        return not_restarted(self._report.replace(RESTARTED, CANCELLED), f"{why}{last}")

    async def wait_until_done(self) -> None:
        """Wait until the scheduler is not restarted any more."""
        while self.state.phase.restarting or self.tasks:
            await asyncio.sleep(_INTERVAL)

    async def _next(self) -> SchedulerClient:
        """Wait until the scheduler of the next scheduler job listens, and connect to it."""
        state = self.state
        try:
            await self.follow()
        except AmbiguousSubmit as error:
            state.messages.warn(str(error))
        job = state.scheduler
        assert isinstance(job, SchedulerJob)
        try:
            await self._reachable(job)
            return await self._connect(str(job.external_address or job.address))
        except Exception:
            if not job.ended:
                self._unreached = job
            if state.managed and job.name in state.registry.jobs:
                await self._drop(job)
            raise

    async def _reachable(self, job: SchedulerJob) -> None:
        """Wait until the scheduler of a job listens; raise `ClusterError` if it cannot, or if the cluster ends."""
        state = self.state
        reached = asyncio.ensure_future(job.wait_until_reachable())
        try:
            while not reached.done():
                if not state.managed:
                    raise ClusterError(state.phase.not_ours or f"cluster {state.name} ends")
                if job.name not in state.registry.jobs:
                    raise ClusterError(f"the queue does not have scheduler job {job.name}, whose submit got no answer")
                if state.dispatcher.directory.closing:
                    raise ClusterError("it was stopped")
                state.check_schedulable([job])
                await asyncio.wait([reached], timeout=_INTERVAL)
            await reached
        finally:
            reached.cancel()

    def _forgive(self) -> None:
        """Let no worker job that has ended without a scheduler count as a failure: it may have waited too long."""
        for job in self.state.registry.worker_jobs:
            if isinstance(job.phase, Ended) and not job.phase.handled and not job.phase.drained:
                job.phase.handled = True
                self.state.messages.log(f"worker job {job.job_id} ({job.name}) ended while there was no scheduler")


def not_restarted(report: str, why: str) -> str:
    """Return the report of a lost scheduler with the reason why no other one follows, in its first line."""
    first, separator, rest = report.partition("\n")
    return f"{first}. It is not restarted, because {why}{separator}{rest}"


def next_name(state: ClusterState) -> str:
    """Return a name for the next scheduler job. No worker job has such a name: they end with a hyphen and a number."""
    schedulers = [submit for submit in state.dispatcher.directory.submits() if submit.kind == "scheduler"]
    return f"{state.name}-scheduler{len(schedulers) + 1}"
