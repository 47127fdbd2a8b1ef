"""Records and reports worker jobs that ended unexpectedly, running jobs that lack workers, jobs that can never start.

The next decision determines whether they are replaced.
"""

from __future__ import annotations

from contextlib import suppress

from hpcgpu.batch.reasons import explain
from hpcgpu.display.counts_and_durations import MANY, counted
from hpcgpu.display.job_summary import summary
from hpcgpu.jobs.job import Job
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.replace_failed_jobs import Outcome
from hpcgpu.state.cluster_state import ClusterState

#: If many jobs fail together: how many of them get a message of their own.
_MOST_REPORTED = 3


class LostJobs:
    """What happened to the worker jobs of one cluster that were not drained.

    Parameters
    ----------
    state : ClusterState
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        #: Workers of jobs that ended, which were not reported to the scheduler yet; and which of them crashed.
        self._gone: list[str] = []
        self._crashed: list[str] = []
        #: Jobs of adaptive scaling that were reported because they can never start.
        self._never = set[str]()

    def new_end(self, job: Job) -> Ended | None:
        """Return how a job that was not drained ended; None after its group has counted the end."""
        phase = job.phase
        if not isinstance(phase, Ended) or phase.drained or phase.handled:
            return None
        return None if self.state.dispatcher.cancelled(job.job_id) else phase

    def any_new(self) -> bool:
        """Whether a job ended without being drained, and its group has not counted the end yet."""
        return any(self.new_end(job) is not None for job in self.state.registry.worker_jobs)

    async def record_ends(self) -> None:
        """Record the jobs that ended without being drained. Report them; if there are many, only the first ones."""
        ended = [(job, phase) for job in self.state.registry.worker_jobs if (phase := self.new_end(job)) is not None]
        reported = few([job for job, phase in ended if not phase.presumed])
        messages = dict[WorkerJob, str]()
        for job, phase in ended:
            phase.handled = True
            if job in reported:
                messages[job] = job.failure_report()  # state and message must be from the same moment
            outcome = self._record_end(job, phase, messages.get(job, "").partition("\n")[0])
            if phase.work.joined_at is None or phase.presumed:
                continue
            workers = worker_names.workers_of(job.name, job.group.options)
            self._gone += workers
            if outcome.crashed:
                self._crashed += workers
        self._report_ends([job for job, phase in ended if not phase.presumed], messages)
        if self._gone and self.state.client is not None:
            with suppress(OSError, TimeoutError):  # the next call reports them to the scheduler
                await self.state.client.ended(self._gone, self._crashed)
                self._gone, self._crashed = [], []

    def report_others(self, jobs: list[WorkerJob], what: str) -> None:
        """Warn once, in one message, of all jobs that get no message of their own."""
        if others := jobs[len(few(jobs)) :]:
            infos = [job.info(now=self.state.now) for job in others]
            message = f"{counted(len(others), 'more worker job')} {what}: {summary(infos)}"
            self.state.messages.warn(message)
            self.state.notify("job_lost", message)

    def _record_end(self, job: WorkerJob, phase: Ended, message: str) -> Outcome:
        """Record the end of a job that was not drained; return how it ended."""
        state, group = self.state, job.group
        if phase.presumed:
            there = sum(other.group is group for other in state.registry.active.values())
            # the wanted size shrinks by this job, but not below the number of jobs that exist
            if group.limits.fixed and there < group.limits.maximum:
                group.unknown += 1
            return Outcome.EXPECTED
        outcome = job.outcome
        group.failures.job_ended(outcome, job.queue_status.node, now=state.now, words=message)
        return outcome

    def _report_ends(self, jobs: list[WorkerJob], messages: dict[WorkerJob, str]) -> None:
        """Report jobs that ended too early. Report also, for each group, whether they are replaced."""
        last = {job.group: job for job in jobs if job in messages}
        for group, job in {job.group: job for job in jobs}.items():
            if group.failures.paused and group not in last:
                last[group], messages[job] = job, job.failure_report()
        for job in jobs:
            message, group = messages.get(job, ""), job.group
            if message:
                self.state.notify("job_lost", message)
                group.note(message.splitlines()[0], now=self.state.now)
            if message and group.failures.paused and job is last[group]:
                self.state.report(f"{group.failures.paused}. The last one: {message}", group.name)
            elif message:
                self.state.messages.warn(f"{message}{self._replaces(group)}")
            else:
                self.state.messages.log(f"worker job {job.job_id} ({job.name}) {job.queue_status.state.value}")
        self.report_others(jobs, "ended")

    def _replaces(self, group: WorkerGroup) -> str:
        """Return when a job that ended is replaced."""
        if group.failures.paused:
            return ""
        wait = group.failures.next_try - self.state.now
        when = f"{f' in {wait:.0f} s' if wait > 1 else ''}{' if there is work' if group.adaptive else ''}"
        return f"\nhpcgpu replaces it{when}."

    def record_unschedulable(self) -> None:
        """Record and report jobs of adaptive scaling that can never start; the next decision ends them."""
        state = self.state
        never = {
            name: job
            for name, job in state.registry.active.items()
            if job.group.adaptive is not None and state.failures.unschedulable([name])
        }
        new = [job for name, job in never.items() if name not in self._never]
        self._never = {
            name for name in self._never if (job := state.registry.jobs.get(name)) and job.alive
        } | never.keys()
        messages = {
            job: f"worker job {job.job_id} ({job.name}) will never start: {explain(job.queue_status)}" for job in new
        }
        for job, message in messages.items():
            job.group.failures.submit_refused(message, for_good=True, now=state.now)
        for job in few(new):
            message = f"{messages[job]}. Adaptive scaling is paused {job.group.failures.pause_ends}"
            state.report(message, job.group.name)
        self.report_others(new, "will never start either")

    @property
    def unschedulable(self) -> set[str]:
        """Names of the jobs of adaptive scaling that can never start."""
        return {name for name in self._never if self.state.failures.unschedulable([name])}

    def record_absent(self, group: WorkerGroup) -> None:
        """Record and report the running jobs of a group that lack workers."""
        state, now = self.state, self.state.now
        jobs = [job for job in state.registry.active.values() if job.group is group]
        # Examine all jobs before any report or action: if several jobs lose workers together, that is one event.
        lost = [job for job in jobs if state.listening and group.record_absent(job, now=now)]
        for job in few(lost):
            self._report_absent(job)
        self.report_others(lost, "lack workers")

    def _report_absent(self, job: WorkerJob) -> None:
        """Report a running job that has lost workers for good. It is replaced, unless too many jobs failed in a row."""
        state, group, node, now = self.state, job.group, job.queue_status.node, self.state.now
        message = f"worker job {job.job_id} ({job.name}){f' on {node}' if node else ''}: {job.shortage(now=now)}"
        group.note(message, now=now)
        message += f". Log: {job.log}\n{job.log_tail(node=job.work.absence.node)}"
        state.notify("job_lost", message)
        if group.failures.paused:
            state.report(message, group.name)
        else:
            state.messages.warn(message)

    def shortages(self) -> list[str]:
        """Return, for each running job that lacks workers, which ones; if there are many jobs, for the first few."""
        jobs = [job for job in self.state.registry.active.values() if job.work.absence]
        reported = [f"worker job {job.job_id} ({job.name}) {job.shortage(now=self.state.now)}" for job in few(jobs)]
        others = len(jobs) - len(reported)
        return [*reported, f"{others} more worker jobs lack workers"] if others else reported


def few(jobs: list[WorkerJob]) -> list[WorkerJob]:
    """Return the jobs that get a message of their own: of more than twenty jobs only the first ones."""
    return jobs if len(jobs) <= MANY else jobs[:_MOST_REPORTED]
