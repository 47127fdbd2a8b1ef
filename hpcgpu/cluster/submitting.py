"""Submits the planned jobs, and reports those that could not be submitted."""

from __future__ import annotations

import asyncio

from hpcgpu.cluster.dispatcher import SUBMITS_AT_ONCE
from hpcgpu.cluster.phases import Planned, Submitting
from hpcgpu.cluster.state import ClusterState
from hpcgpu.cluster.worker_job import WorkerJob
from hpcgpu.errors import AmbiguousSubmit, BatchError, SubmitLimited, SubmitRefused, Superseded

__all__ = ["Submitter"]


class Submitter:
    """Submits the planned worker jobs of one cluster.

    Parameters
    ----------
    state : ClusterState
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self._turns = asyncio.Semaphore(SUBMITS_AT_ONCE)
        self._detached = False

    def submit_planned(self) -> None:
        """Begin to submit each job that is planned."""
        for job in self.state.registry.worker_jobs:
            if isinstance(job.phase, Planned):
                phase = Submitting()
                job.submitting(phase)
                phase.task = self.state.spawn(self._submit(job))
                self.state.changed.set()

    def detach_when_complete(self) -> None:
        """Record that a cluster continues without this program, once the queue has all jobs that were asked for.

        Until then the lease holds: of a start that is killed, nothing stays behind.
        """
        state = self.state
        if self._detached or state.ownership.ends_at_exit or state.ownership.attached:
            return
        for group in state.registry.groups.values():
            there = sum(job.active and job.job_id is not None for job in group.jobs)
            if group.limits.fixed and there < group.limits.maximum:
                return
        self._detached = True
        state.dispatcher.detach()

    async def _submit(self, job: WorkerJob) -> None:
        """Submit a job; a failure is reported now and at the user's next call."""
        state, scheduler = self.state, self.state.scheduler
        try:
            async with self._turns:
                if job.group.failures.may_submit(now=state.now):
                    await job.submit(scheduler.dependency if scheduler is not None else None)
                    job.observe(now=state.now)
                    job.group.failures.submitted()
                    if not any(isinstance(other.phase, Submitting) for other in state.registry.worker_jobs):
                        state.poll_now.set()  # once for all that were submitted together
                    self.detach_when_complete()
                else:  # the queue has refused another one meanwhile: this one is planned again when it may be submitted
                    state.registry.remove(job)
        except Exception as error:
            state.registry.remove(job)
            if isinstance(error, Superseded):
                state.supersede(str(error))
            elif not state.dispatcher.closing:
                self._not_submitted(job, error)

    def _not_submitted(self, job: WorkerJob, error: Exception) -> None:
        state, group, now = self.state, job.group, self.state.now
        unknown = isinstance(error, AmbiguousSubmit)
        message = str(error) if unknown else f"worker job {job.name} was not submitted: {error}"
        if isinstance(error, SubmitLimited) and any(other.alive for other in group.jobs):
            group.failures.site_is_full(str(error), now=now)
            state.messages.log(f"{message}. The site accepts no more jobs of yours now")
            return
        for_good = isinstance(error, SubmitRefused | SubmitLimited) and group.adaptive is None
        group.failures.submit_refused(str(error), for_good=for_good, now=now)
        if group.adaptive is not None:
            group.adaptive.note(message, now=now)
        if group.failures.paused or unknown or not isinstance(error, BatchError):
            state.report(message if for_good else f"{message}\n{group.failures.paused}".rstrip(), group.name)
        else:
            wait = group.failures.next_try - now
            state.messages.warn(f"{message}\nhpcgpu tries again {f'in {wait:.0f} s' if wait > 1 else 'at once'}.")
