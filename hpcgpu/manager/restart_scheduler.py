"""Submits another scheduler job when that of a running cluster has ended too early, or soon reaches its walltime.

The worker jobs stay in the queue: the running ones wait for the next scheduler (`hpcgpu.runtime.next_scheduler`). A
scheduler job that is submitted before it is needed waits in the queue, and then in itself (`hpcgpu.runtime.standby`).

The manager of a detached cluster may be in the scheduler job, and end with it. So the next scheduler job is always in
the queue there, which starts it when the present one ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from hpcgpu.batch.base import JobState
from hpcgpu.batch.reasons import explain
from hpcgpu.client.lost_scheduler import CANCELLED, RESTARTED
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.display.warn import warn
from hpcgpu.errors import AmbiguousSubmit, BatchError, ClusterError, ClusterWarning, Superseded
from hpcgpu.existing_clusters.query_jobs import ended_by_itself
from hpcgpu.jobs.job_phases import Ended, Planned
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.manager.cluster_state import ClusterState
from hpcgpu.manager.scheduler_client import SchedulerClient
from hpcgpu.scaling.scheduler_restarts import ended_too_early, expected, next_is_due, too_many
from hpcgpu.store.removed_directory import directory_exists

#: Seconds until a refused submit is tried again: the first time, and at most; how often; and after that.
_PAUSE, _LAST_PAUSE, _REFUSALS, _SELDOM = 5.0, 300.0, 10, 3600.0
#: Seconds until another job is submitted in the place of one that has ended before its scheduler was reached: a full
#: disk may have room again by then. The first one comes at once.
_PAUSE_AFTER_FAILURE, _LAST_PAUSE_AFTER_FAILURE = 60.0, 240.0
#: Seconds between two looks at what the next scheduler job does.
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
        #: The restart that is under way, if any.
        self.task: asyncio.Task[None] | None = None
        #: The job that waits to follow the present one, and the task that submits it.
        self.following: SchedulerJob | None = None
        self._submits: asyncio.Task[None] | None = None
        self._failed, self._again_at = 0, 0.0
        #: The job in whose place that one is submitted: it stays until the queue has the other one.
        self._replaced: SchedulerJob | None = None

    def why_not(self) -> str:
        """Return why no other scheduler follows the last one; empty if one does."""
        state, dispatcher = self.state, self.state.dispatcher
        [job] = state.scheduler.entries if state.scheduler is not None else []
        if directory_exists(dispatcher.directory, dispatcher.token) is False:
            return "its directory was removed"
        if dispatcher.directory.closing:
            return "another program has stopped the cluster"
        if job.queue_status.state.ended and not ended_too_early(job.queue_status.state):
            return "it has ended as intended, or was cancelled"
        if ended_by_itself(dispatcher.directory):  # while this program was suspended
            following = self.following
            how = f": {following.failure_report()}" if following is not None and following.ended else ""
            return f"the next one has taken over and ended, too{how}"
        worked_to_the_end = state.client is not None and expected(job.queue_status.state)
        return "" if worked_to_the_end else too_many(state.restarted, now=state.now)

    # Before the present scheduler job ends

    def prepare(self) -> None:
        """Submit the job that follows the present one if it is time to, or see what became of it."""
        state, present = self.state, self.state.scheduler
        if self.following is not None:
            self._watch(self.following)
        if (
            (self.following is None or self.following.after_end is not None)
            and isinstance(present, SchedulerJob)
            and state.client is not None
            and not (state.leaving or state.cancelling or self._submits_now)
            and state.now >= self._again_at
            and present.queue_status.state is JobState.RUNNING
            and not present.queue_status.suspended
            and not state.dispatcher.directory.closing
        ):
            status = present.queue_status
            if next_is_due(status.start, status.end, self._waits(present), now=state.now):
                self._submit_next(None)
            elif self.following is None and state.wanted.detached and state.dispatcher.batch.waits_for_end:
                self._submit_next(present.job_id)

    def leave(self) -> None:
        """Let the queue start another scheduler job when the present one ends: this program leaves the cluster."""
        present, can_wait = self.state.scheduler, self.state.dispatcher.batch.waits_for_end
        if can_wait and self.following is None and isinstance(present, SchedulerJob) and present.job_id:
            if not present.ended:
                self._submit_next(present.job_id)

    def _submit_next(self, after_end: str | None) -> None:
        """Submit a job that should follow, perhaps in the place of one that waits for the end of the present one."""
        self._replaced, self.following = self.following, self._new_job(next_name(self.state))
        self.following.standby, self.following.after_end = True, after_end
        self._submits = self.state.spawn(self._submit_following(self.following))

    @property
    def _submits_now(self) -> bool:
        return self._submits is not None and not self._submits.done()

    def _waits(self, present: SchedulerJob) -> Iterator[float]:
        """Yield how long jobs of the cluster have waited."""
        if present.queue_status.start is not None and present.after_end is None:
            yield present.queue_status.start - present.submitted
        for group in self.state.registry.groups.values():
            yield from group.waits

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

    def _watch(self, job: SchedulerJob) -> None:
        """Record if the job that should follow cannot do that any more."""
        state = self.state
        if self._submits_now:
            return
        if job.name not in state.registry.jobs:
            self._lost("the queue does not have it, and its submit got no answer")
        elif job.ended:
            self._lost(job.failure_report())
        elif state.failures.unschedulable([job.name]):
            self._lost(f"it will never start: {explain(job.queue_status, kind=job.kind)}")
        elif job.job_id is not None:
            replaced, self._replaced = self._replaced, None
            if replaced is not None:
                state.spawn(self._drop(replaced))
            if state.now - job.submitted > _SELDOM:
                self._failed = 0

    def _lost(self, why: str) -> None:
        """Try again later; the user hears of the first failure."""
        state = self.state
        job, self.following, self._replaced = self.following, self._replaced, None
        self._failed += 1
        self._again_at = state.now + (_pause(self._failed) if self._failed <= _REFUSALS else _SELDOM)
        if job is not None and job.name in state.registry.jobs:
            state.spawn(self._drop(job))
        say = state.messages.warn if self._failed == 1 else state.messages.log
        which = f"scheduler job {job.name}" if job is not None else "a scheduler job"
        what = f"{which}, which should follow the present one of cluster {state.name}, does not come: {why}"
        say(f"{what}\nhpcgpu submits another one")

    async def abandon(self) -> None:
        """Cancel the job that should follow: the cluster ends with its scheduler."""
        jobs, self.following, self._replaced = (self.following, self._replaced), None, None
        for job in filter(None, jobs):
            await self._drop(job)

    async def _drop(self, job: SchedulerJob) -> None:
        """Let a job never become the scheduler's, also one that only counts as ended: the queue may be wrong.

        If it is not cancelled, it ends as soon as it reads the journal.
        """
        dispatcher = self.state.dispatcher
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
        taken = min((job for job in there if not job.ended), key=lambda job: job.job_id is None, default=None)
        for job in there:
            if job is not taken:
                await self._drop(job)
        return taken

    # When it has ended

    async def has_ended(self) -> bool:
        """Whether the present job, which counts as ended, is cancelled where the queue does not report its end."""
        job = self.state.scheduler
        assert isinstance(job, SchedulerJob) and job.job_id is not None
        try:
            await self.state.dispatcher.cancel([job.job_id], forgotten=True)
        except BatchError as error:  # the next poll tries again
            self.state.messages.log(f"scheduler job {job.job_id} counts as ended, but was not cancelled: {error}")
            return False
        return True

    async def follow(self) -> None:
        """Let another scheduler job follow the present one: the job that waits, or one that is submitted now.

        Raises
        ------
        BatchError
            It was not submitted, or the submit got no answer.
        """
        state = self.state
        job = await self._take_following() or self._new_job(next_name(state))
        job.standby = False
        state.scheduler = job
        if isinstance(job.phase, Planned):
            await self._submit(job)
        else:
            state.messages.log(f"scheduler job {job.job_id or job.name} takes over, which was submitted before")

    async def resume(self) -> None:
        """Let another scheduler job follow the one that ended while no program managed the cluster; see `follow`."""
        state, ended = self.state, self.state.scheduler
        assert isinstance(ended, SchedulerJob)
        state.messages.log(report := ended.loss_report(state.name, restarts=True))
        with suppress(ClusterWarning):  # under `-W error` as well
            warn(report)
        state.dispatcher.note_ends({ended.name: ended.job_id})  # a job that waits for the end reads it there
        if not expected(ended.queue_status.state):
            state.restarted.append(state.now)
        await self.follow()

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

    def begin(self, report: str, lost: Callable[[str], Awaitable[None]]) -> None:
        """Begin to restart the scheduler.

        Parameters
        ----------
        report : str
            How the scheduler has ended.
        lost : callable
            Is called with the reason if no scheduler can be started.
        """
        client, scheduler = self.state.client, self.state.scheduler
        assert client is not None and isinstance(scheduler, SchedulerJob)
        self.state.lost_schedulers[client.address] = report.partition("\n")[0]
        self.state.restarts(failed=not expected(scheduler.queue_status.state))
        self.task = self.state.spawn(self._restart(client, report, lost), set())

    async def _restart(self, ended: SchedulerClient, report: str, lost: Callable[[str], Awaitable[None]]) -> None:
        state, refused, failed = self.state, 0, 0
        await ended.close()
        while True:
            try:
                client = await self._next()
                break
            except (ClusterError, BatchError, OSError, TimeoutError) as error:
                if not state.managed:
                    return
                refused += isinstance(error, BatchError)
                why = self.why_not() or (
                    f"the queue has not accepted it {refused} times" if refused > _REFUSALS else ""
                )
                if why:
                    await lost(not_restarted(report.replace(RESTARTED, CANCELLED), f"{why}. The last failure: {error}"))
                    return
                pause = _pause(refused) if refused else 0.0
                if not isinstance(error, BatchError):
                    state.restarted.append(state.now)
                    pause = min(_LAST_PAUSE_AFTER_FAILURE, _PAUSE_AFTER_FAILURE * failed)
                    failed += 1
                then = f"hpcgpu submits another job{f' in {duration(pause)}' if pause else ''}"
                state.messages.warn(f"cluster {state.name} has no scheduler yet: {error}\n{then}")
            await self._wait(pause)
        if not state.managed:
            await client.close()
            return
        self._forgive()
        self._failed, self._again_at = 0, 0.0
        await self._connected(client)

    async def _wait(self, seconds: float) -> None:
        """Wait, unless the cluster ends meanwhile."""
        until, state = self.state.now + seconds, self.state
        while state.managed and state.now < until and not state.dispatcher.directory.closing:
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


def _pause(failures: int) -> float:
    """Return the seconds until a refused submit is tried again."""
    return min(_LAST_PAUSE, _PAUSE * 2.0**failures)


def next_name(state: ClusterState) -> str:
    """Return a name for the next scheduler job. No worker job has such a name: they end with a hyphen and a number."""
    schedulers = [submit for submit in state.dispatcher.directory.submits() if submit.kind == "scheduler"]
    return f"{state.name}-scheduler{len(schedulers) + 1}"
