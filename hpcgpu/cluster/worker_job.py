"""A job of Dask workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from hpcgpu.batch.base import JobState
from hpcgpu.cluster.dispatcher import Dispatcher
from hpcgpu.cluster.job import Job
from hpcgpu.cluster.phases import Draining, Ended
from hpcgpu.display.progress import duration
from hpcgpu.scaling.forecast import usual_wait
from hpcgpu.scaling.replacement import Outcome, classify

if TYPE_CHECKING:
    from hpcgpu.cluster.groups import WorkerGroup

__all__ = ["WorkerJob"]


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
        job_id = await self.dispatcher.submit(
            self.script,
            name=self.name,
            kind=self.kind,
            group=self.group.name,
            after=after,
            exclude=self.group.excluded(),
        )
        self.has_id(job_id)

    def joined(self, address: str, worker: str, *, now: float) -> None:
        """Record a connected worker; not of one whose job was cancelled: it is about to go."""
        if self.job_id in self.dispatcher.cancelled:
            return
        self.workers[address] = worker
        self.observe(now=now)
        work = self.work
        # it may be lost before the next decision
        work.absence = replace(work.absence, joined=work.absence.joined | {worker})

    @property
    def lost_workers(self) -> bool:
        """Whether it lacks workers for good."""
        return self.work.lost_at is not None

    def retires(self, *, now: float) -> None:
        """Record that its workers begin to retire because it ends."""
        self.work.retires_at = self.work.retires_at or now

    def forget_idleness(self) -> None:
        """Count from now how long it is idle."""
        self.work.idle_since = None

    def shortage(self, *, now: float) -> str:
        """Return which workers a running job lacks, and what happens next."""
        absence = self.work.absence
        if not absence or (self.draining and not self.lost_workers):
            return ""
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

    def seconds_used(self, *, now: float) -> float:
        """Return how long it has run."""
        status = self.queue_status
        if status.state is JobState.PENDING:
            return 0.0
        until = now
        if isinstance(self.phase, Ended):
            until = self.phase.at
        elif isinstance(self.phase, Draining):
            until = self.phase.cancelled_at or now
        began = status.start or self.work.joined_at
        return max(0.0, until - began) if began is not None else 0.0

    def _how_it_ended(self) -> str:
        outcome = self.outcome
        if outcome is Outcome.OUT_OF_MEMORY:
            asked = self.group.options.memory
            limit = f"{format_bytes(asked)} per node" if asked else "the default of the queue"
            return f"{self.queue_status.state.value}: it used more memory than it requested ({limit})"
        text = super()._how_it_ended()
        if outcome is Outcome.NEVER_CONNECTED:
            text += "; none of its workers had connected"
        return text
