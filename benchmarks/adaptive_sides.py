"""Who decides in `adaptive_sim.py`: hpcgpu's policy, distributed's Adaptive, and one who knows the future."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from adaptive_world import MAXIMUM_JOBS, PER_JOB, STARTUP, TARGET_DURATION, Job, Task, World
from distributed.deploy.adaptive import Adaptive

from hpcgpu.scaling.adaptive_policy import decide
from hpcgpu.scaling.policy_data import Demand, History, Hysteresis, JobView, Limits
from hpcgpu.scaling.walltime_margin import margin

logging.getLogger("distributed.deploy.adaptive").setLevel(logging.WARNING)

#: What happens in one second, for a world.
Side = Callable[[World], Callable[[], None]]


def view(world: World, job: Job, leaves: float | None) -> JobView:
    """Return what the policy must know of a job."""
    return JobView(
        name=job.name,
        pending=world.now < job.starts,
        submitted=job.submitted,
        leaves=leaves,
        workers=len(job.workers),
        processing=sum(task is not None for task in job.workers.values()),
        idle_since=job.idle_since,
    )


def ours_for_a_person(world: World) -> Callable[[], None]:
    """Return what hpcgpu does in one second where a person works, as in a notebook."""
    return ours(world, interactive=True)


def ours(world: World, *, interactive: bool = False) -> Callable[[], None]:
    """Return what hpcgpu does in one second."""
    limits = Limits(maximum=MAXIMUM_JOBS, gpus_per_job=PER_JOB, interactive=interactive)
    waits: list[float] = []
    startups: list[float] = []
    learned: set[str] = set()
    hysteresis = Hysteresis()

    def act() -> None:
        nonlocal hysteresis
        views = []
        for job in list(world.jobs.values()):
            if job.joined and job.name not in learned:
                learned.add(job.name)
                waits.append(world.now - job.submitted)
                startups.append(world.now - job.starts)
            leaves = None
            if job.walltime is not None and world.now >= job.starts:
                leaves = job.starts + job.walltime - margin(job.walltime)
                if world.now >= leaves:
                    job.draining = True
            if job.draining:
                if job.joined and not any(job.workers.values()):
                    world.end(job)
                continue
            views.append(view(world, job, leaves))
        seconds = world.seconds()
        threads = sum(view.workers for view in views)
        demand = Demand(
            jobs=math.ceil(world.wanted_workers() / PER_JOB),
            seconds=seconds / threads if threads else (math.inf if seconds else 0.0),
            waiting=world.average * len(world.queued) / PER_JOB,
            task=world.average,
        )
        decision = decide(
            views, demand, limits, History(waits=waits, startups=startups), hysteresis, now=float(world.now)
        )
        hysteresis = decision.hysteresis
        for name in (*decision.cancel, *decision.retire):
            world.end(world.jobs[name])
        for _ in range(decision.submit):
            world.submit()

    return act


class PeerScheduler:
    """The RPCs of the Dask scheduler that Adaptive uses."""

    def __init__(self, world: World, cluster: PeerCluster) -> None:
        self.world = world
        self.cluster = cluster

    async def adaptive_target(self, target_duration: float) -> int:
        """`Scheduler.adaptive_target`."""
        workers = self.cluster.workers()
        target = self.world.wanted_workers()
        if self.world.queued and not workers:
            target = max(1, target)
        if target >= len(workers):
            return target
        return len(workers) - sum(task is None for _, task in workers.values())

    async def workers_to_close(self, target: int, **kwargs: Any) -> list[str]:
        """`Scheduler.workers_to_close`: idle ones first."""
        workers = self.cluster.workers()
        number = max(0, len(workers) - target)
        if not number and all(task is not None for _, task in workers.values()):
            return []
        return sorted(workers, key=lambda name: workers[name][1] is not None)[:number]

    async def retire_workers(self, names: Iterable[str], **kwargs: Any) -> None:
        """Close single workers."""
        workers = self.cluster.workers()
        for name in names:
            if name in workers:
                self.world.close_worker(workers[name][0], name)


class PeerCluster:
    """SpecCluster with grouped workers as dask-jobqueue 0.9 makes it."""

    status = None
    loop = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.worker_spec: dict[str, Job] = {}
        self.scheduler_comm = PeerScheduler(world, self)

    def workers(self) -> dict[str, tuple[Job, Task | None]]:
        """Connected workers by name."""
        return {name: (job, task) for job in self.world.jobs.values() for name, task in job.workers.items()}

    @property
    def plan(self) -> set[str]:
        return {f"{name}-{i}" for name in self.worker_spec for i in range(PER_JOB)}

    requested = plan

    @property
    def observed(self) -> set[str]:
        return set(self.workers())

    def scale(self, n: int) -> None:
        """Jobs for so many workers."""
        while len(self.worker_spec) < math.ceil(n / PER_JOB):
            job = self.world.submit()
            self.worker_spec[job.name] = job

    async def scale_down(self, workers: Iterable[str]) -> None:
        """The jobs of these workers go as a whole."""
        for name in {worker.rsplit("-", 1)[0] for worker in workers}:
            if name in self.worker_spec:
                del self.worker_spec[name]
                if name in self.world.jobs:
                    self.world.end(self.world.jobs[name])


def theirs(world: World) -> Callable[[], None]:
    """Return what distributed's Adaptive does in one second."""
    cluster = PeerCluster(world)
    maximum = MAXIMUM_JOBS * PER_JOB
    adaptive = Adaptive(cluster, interval=0, minimum=0, maximum=maximum, wait_count=3, target_duration=TARGET_DURATION)

    def act() -> None:
        with suppress(StopIteration):  # nothing in it waits, so it needs no event loop
            adaptive.adapt().send(None)

    return act


def clairvoyant(most: int, batch: int = 1, hold: int = 1) -> Side:
    """Return a side that knows the future.

    It knows the waits of the queue and when work comes. It submits each job so early that its workers connect in the
    second in which they have work, but not before the simulation begins. It ends a job in the second of its last task,
    unless work comes before a start would be paid for.

    Parameters
    ----------
    most : int
        Jobs at a time.
    batch : int
        Tasks that wait for each job that is added to others.
    hold : int
        Tasks that wait for the first job, as long as more are to come.
    """

    def side(world: World) -> Callable[[], None]:
        def act() -> None:
            for job in list(world.jobs.values()):
                if job.walltime is not None and world.now > job.starts + job.walltime - margin(job.walltime):
                    job.draining = True
                if any(job.workers.values()) or (world.queued and not job.draining):
                    continue
                if job.draining or batch > 1 or world.next_burst() > world.now + STARTUP:
                    world.end(job)
            free = sum(task is None for job in world.jobs.values() for task in job.workers.values())
            coming = sum(max(batch, PER_JOB) for job in world.jobs.values() if not job.joined)
            waiting = len(world.queued) - free - coming
            if not world.jobs and waiting < hold and world.next_burst() < math.inf:
                return
            while waiting > 0 and len(world.jobs) < most and (not world.jobs or waiting >= batch):
                waiting -= max(batch, PER_JOB)
                begin(world)
            if not world.queued and world.next_burst() < math.inf:
                # More workers than work: one job takes no more tasks, so that the others have more of them.
                idle = sum(task is None for job in world.jobs.values() for task in job.workers.values())
                staying = [job for job in world.jobs.values() if not job.draining]
                if idle >= (1 if batch > 1 else PER_JOB) and len(staying) > 1:
                    min(staying, key=lambda job: sum(task is not None for task in job.workers.values())).draining = True

        return act

    return side


def begin(world: World) -> None:
    """Have a job whose workers connect now, or as soon after that as a job that was submitted at the beginning."""
    starts = max(world.now - STARTUP, world.wait())
    job = world.add(starts)
    if starts + STARTUP <= world.now:
        world.join(job)
    started = max(0, min(STARTUP, world.now - starts))
    world.startup += started * PER_JOB
    world.paid += started * PER_JOB
