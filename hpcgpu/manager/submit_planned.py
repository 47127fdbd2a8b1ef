"""Submits the planned jobs, and reports those that could not be submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from hpcgpu.errors import AmbiguousSubmit, BatchError, ClusterError, SubmitLimited, SubmitRefused, Superseded
from hpcgpu.jobs.job_phases import Planned, Submitting
from hpcgpu.jobs.submit_and_cancel import SUBMITS_AT_ONCE
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.scaling.wanted_state import Command, Detach
from hpcgpu.state.cluster_state import ClusterState


async def wait_for_submits(jobs: Iterable[WorkerJob]) -> None:
    """Wait until no submit of these jobs is under way. If this wait is cancelled, the submits go on."""
    submits = [job.submit_task for job in jobs if job.submit_task is not None]
    if submits:
        await asyncio.wait(submits)


class Submitter:
    """Submits the planned worker jobs of one cluster.

    Parameters
    ----------
    state : ClusterState
    order : callable
        Carries out a command; see `hpcgpu.manager.reconciler.Reconciler.order`.
    """

    def __init__(self, state: ClusterState, order: Callable[[Command], None]) -> None:
        self.state = state
        self._order = order
        self._turns = asyncio.Semaphore(SUBMITS_AT_ONCE)
        #: Submits the first scheduler job, or starts the scheduler in this program; None before, and after a take-over.
        self.first_scheduler: asyncio.Task[None] | None = None

    def submit_scheduler(self) -> None:
        """Begin to submit the first scheduler job. `first_scheduler` raises the error if that fails."""
        assert self.state.scheduler is not None
        self.first_scheduler = asyncio.ensure_future(self.state.scheduler.submit())

    def submit_planned(self) -> None:
        """Begin to submit each job that is planned."""
        for job in self.state.registry.worker_jobs:
            if isinstance(job.phase, Planned):
                phase = Submitting()
                job.submitting(phase)
                phase.task = self.state.spawn(self._submit(job))
                self.state.changed.set()

    def detach_when_complete(self) -> None:
        """Record that a cluster continues without this program, when the queue has all requested jobs.

        Until then the lease is in force: if the start is killed, the jobs end.
        """
        state = self.state
        if state.wanted.detached or state.ownership.ends_at_exit or state.ownership.attached:
            return
        for group in state.registry.groups.values():
            there = sum(job.active and job.job_id is not None for job in group.jobs)
            if group.limits.fixed and there < group.limits.maximum:
                return
        try:
            self._order(Detach())
        except (ClusterError, BatchError, OSError) as error:  # the lease stays in force; the next submit tries it again
            if state.managed:
                state.messages.warn(str(error))

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
                        state.poll_now.set()  # one poll for all jobs that were submitted together
                    self.detach_when_complete()
                else:  # the queue has refused another job meanwhile; this job is planned again later
                    state.registry.remove(job)
        except Exception as error:
            if not isinstance(error, AmbiguousSubmit):  # the job keeps its place until it is known: see `Reconciler`
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
        group.note(message, now=now)
        if group.failures.paused or unknown or not isinstance(error, BatchError):
            state.report(message if for_good else f"{message}\n{group.failures.paused}".rstrip(), group.name)
        else:
            wait = group.failures.next_try - now
            state.messages.warn(f"{message}\nhpcgpu tries again {f'in {wait:.0f} s' if wait > 1 else 'at once'}.")
