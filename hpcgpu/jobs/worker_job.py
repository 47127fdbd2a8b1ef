"""A job of Dask workers: its submit, its connected and missing workers, and how it ended."""

from __future__ import annotations

from pathlib import Path

from dask.utils import format_bytes

from hpcgpu.batch.base import After
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.existing_clusters.between_schedulers import NO_SCHEDULER
from hpcgpu.jobs.job import Job
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.scaling.forecast import usual_wait
from hpcgpu.scaling.missing_workers import Absence
from hpcgpu.scaling.policy_data import JobLoad
from hpcgpu.scaling.replace_failed_jobs import Outcome, classify


class WorkerJob(Job):
    """A job of Dask workers.

    Parameters
    ----------
    dispatcher, script, name, logs
        See `Job`.
    group : WorkerGroup
    """

    kind = "worker"

    def __init__(self, dispatcher: Dispatcher, script: Path, name: str, logs: Path, *, group: WorkerGroup) -> None:
        super().__init__(dispatcher, script, name, logs)
        self.group = group

    @property
    def group_name(self) -> str:
        """The name of its worker group."""
        return self.group.name

    @property
    def gpus(self) -> int:  # type: ignore[override]
        """GPUs that it requests."""
        return self.group.gpus_per_job

    @property
    def usual_wait(self) -> float | None:
        """Seconds that jobs of its group usually wait until their workers are connected."""
        return usual_wait(self.group.waits)

    async def submit(self, after: str | None) -> None:
        """Submit it; `after` is the id of a job that must have started before it may."""
        group = self.group
        job_id = await self.dispatcher.submit(
            self.script,
            name=self.name,
            kind=self.kind,
            group=group.name,
            after=After(after) if after is not None else None,
            exclude=group.excluded(),
        )
        self.record_id(job_id)

    def joined(self, address: str, worker: str, *, now: float) -> None:
        """Record a connected worker, unless the job was cancelled: then the worker leaves soon."""
        if self.dispatcher.cancelled(self.job_id):
            return
        self.workers[address] = worker
        self.observe(now=now)
        work = self.work
        work.without_scheduler = False
        work.absence = work.absence.with_worker(worker)
        if not work.absence:
            work.lost_at = None

    def scheduler_lost(self) -> None:
        """Record that its workers have ended with their scheduler: they hold nothing, and none of them is missing."""
        self.workers.clear()
        work = self.work
        work.load, work.absence, work.lost_at, work.idle_since = JobLoad(), Absence(), None, None
        work.without_scheduler = work.joined_at is not None

    def retires(self, *, now: float) -> None:
        """Record that its workers begin to retire because it ends."""
        self.work.retires_at = self.work.retires_at or now

    def shortage(self, *, now: float) -> str:
        """Return which workers a running job lacks, and what happens next."""
        absence = self.work.absence
        if not absence or (self.draining and not self.lost_workers):
            return NO_SCHEDULER if self.work.without_scheduler else ""
        if not self.lost_workers:
            return absence.outlook(self.group.options.death_timeout, now=now)
        words, paused = absence.words(now=now), self.group.failures.paused
        if absence.none_left:
            text = f"{words}; none is left"
            return f"{text}, and it is not replaced, because {paused}" if paused else f"{text}: another job replaces it"
        if self.draining:
            return f"{words}; its data moves now, and another job takes its place"
        if paused:
            return f"{words}; it continues with the others, because {paused}"
        return f"{words}; it works until another job takes its place"

    def idleness(self, *, now: float) -> str:
        """Return when it ends because it has no work; empty if it does not."""
        ends = None if self.draining else self.group.ends.get(self.name)
        return "" if ends is None else f"idle; ends in {duration(max(0.0, ends - now))} if it stays idle"

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        assert isinstance(self.phase, Ended), self.phase
        work = self.work
        lasted = self.phase.at - work.joined_at if work.joined_at is not None else None
        outcome = classify(self.queue_status.state, lasted=lasted, worked=work.worked)
        if outcome in {Outcome.FAILED, Outcome.NEVER_CONNECTED} and self.killed_for_memory:
            return Outcome.OUT_OF_MEMORY
        return outcome

    def _how_it_ended(self) -> str:
        outcome = self.outcome
        if outcome is Outcome.OUT_OF_MEMORY:
            requested = self.group.options.memory
            limit = f"{format_bytes(requested)} per node" if requested else "the default of the queue"
            return f"{self.queue_status.state.value}: it used more memory than it requested ({limit})"
        unconnected = "; none of its workers had connected" if outcome is Outcome.NEVER_CONNECTED else ""
        return f"{super()._how_it_ended()}{unconnected}"
