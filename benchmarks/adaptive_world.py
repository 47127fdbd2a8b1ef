"""The simulated queue, jobs and tasks of `adaptive_sim.py`; one step is one second."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PER_JOB = 4
MAXIMUM_JOBS = 16
STARTUP = 20
TARGET_DURATION = 5.0
UNKNOWN_DURATION = 0.5
HORIZON = 12 * 3600
AFTERWARDS = 1800


@dataclass(frozen=True)
class Burst:
    """Tasks that are submitted together.

    Attributes
    ----------
    tasks : sequence of (int, sequence of int)
        Seconds that each takes, and the indices of the tasks that it needs.
    at : int
        When they are submitted.
    think : int or None
        If given, they are submitted this long after the burst before is done, whenever that is.
    """

    tasks: Sequence[tuple[int, Sequence[int]]]
    at: int = 0
    think: int | None = None


@dataclass
class Task:
    """One task, which begins anew when its worker is lost."""

    burst: int
    duration: int
    left: int
    needs: int
    children: list[Task] = field(default_factory=list)


@dataclass
class Job:
    """A job of four workers."""

    name: str
    submitted: int
    starts: int
    walltime: int | None
    joined: bool = False
    draining: bool = False
    idle_since: int | None = None
    workers: dict[str, Task | None] = field(default_factory=dict)


class World:
    """Queue, jobs and tasks.

    Parameters
    ----------
    bursts : sequence of Burst
        In the order in which they come.
    median_wait : float
        Of the queue. Waits are log-normal, sigma 1.
    walltime : int or None
        Of a job.
    seed : int
    """

    def __init__(self, bursts: Sequence[Burst], median_wait: float, walltime: int | None, seed: int) -> None:
        self.bursts, self.median_wait, self.walltime = bursts, median_wait, walltime
        self.random = random.Random(seed)
        self.now = 0
        self.jobs: dict[str, Job] = {}
        self.queued: deque[Task] = deque()
        self.submits = self.paid = self.startup = self.idle = self.lost = 0
        self.average = UNKNOWN_DURATION
        self.begun: list[int] = []
        self.open: list[int] = []
        self.responses: dict[int, int] = {}

    def submit(self) -> Job:
        """Ask for a job."""
        return self.add(self.now + self.wait())

    def wait(self) -> int:
        """Return for how long the next job waits in the queue."""
        return round(self.median_wait * math.exp(self.random.gauss(0.0, 1.0)))

    def add(self, starts: int) -> Job:
        """Add a job that starts at this time."""
        job = Job(f"j{self.submits}", self.now, starts, self.walltime)
        self.submits += 1
        self.jobs[job.name] = job
        return job

    def join(self, job: Job) -> None:
        """Connect the workers of a job."""
        job.joined = True
        job.workers = {f"{job.name}-{i}": None for i in range(PER_JOB)}

    def end(self, job: Job) -> None:
        """End a job; what it ran begins anew elsewhere."""
        del self.jobs[job.name]
        for name in list(job.workers):
            self.close_worker(job, name)

    def close_worker(self, job: Job, name: str) -> None:
        """Close one worker."""
        task = job.workers.pop(name)
        if task is not None:
            self.lost += task.duration - task.left
            task.left = task.duration
            self.queued.appendleft(task)

    def next_burst(self) -> float:
        """Return when the next burst comes; infinite if there is none, or if it depends on one that is not done."""
        if len(self.begun) == len(self.bursts):
            return math.inf
        burst = self.bursts[len(self.begun)]
        if burst.think is None:
            return burst.at
        last = len(self.begun) - 1
        if last < 0:
            return burst.think
        return self.begun[last] + self.responses[last] + burst.think if last in self.responses else math.inf

    def step(self) -> None:
        """Let one second pass."""
        self.now += 1
        while self.next_burst() <= self.now:
            self._begin()
        for job in list(self.jobs.values()):
            if self.now < job.starts:
                continue
            if job.walltime is not None and self.now >= job.starts + job.walltime:
                self.end(job)
                continue
            if not job.joined and self.now >= job.starts + STARTUP:
                self.join(job)
            self.paid += PER_JOB
            if not job.joined:
                self.startup += PER_JOB
                continue
            busy = 0
            for name, task in job.workers.items():
                if task is None and self.queued and not job.draining:
                    task = job.workers[name] = self.queued.popleft()
                if task is not None:
                    busy += 1
                    task.left -= 1
                    if task.left <= 0:
                        job.workers[name] = None
                        self._done(task)
            self.idle += PER_JOB - busy
        for job in self.jobs.values():
            free = job.joined and not self.queued and not any(job.workers.values())
            job.idle_since = (job.idle_since or self.now) if free else None

    def _begin(self) -> None:
        """Submit the tasks of the next burst."""
        number = len(self.begun)
        burst = self.bursts[number]
        tasks = [Task(number, duration, duration, len(needs)) for duration, needs in burst.tasks]
        for task, (_, needs) in zip(tasks, burst.tasks, strict=True):
            for need in needs:
                tasks[need].children.append(task)
        self.begun.append(self.now)
        self.open.append(len(tasks))
        self.queued.extend(task for task in tasks if not task.needs)

    def _done(self, task: Task) -> None:
        """Take note of a task that is done."""
        self.average = 0.5 * self.average + 0.5 * task.duration
        for child in task.children:
            child.needs -= 1
            if not child.needs:
                self.queued.append(child)
        self.open[task.burst] -= 1
        if not self.open[task.burst]:
            self.responses[task.burst] = self.now - self.begun[task.burst]

    @property
    def finished(self) -> bool:
        """Whether all is done."""
        return len(self.responses) == len(self.bursts)

    @property
    def makespan(self) -> float:
        """When the last task was done."""
        return max(self.begun[n] + self.responses[n] for n in self.responses) if self.finished else math.inf

    @property
    def over(self) -> bool:
        """Whether there is nothing more to see."""
        if self.now >= HORIZON:
            return True
        return self.finished and (not self.jobs or self.now > self.makespan + AFTERWARDS)

    def running(self) -> list[Task]:
        """Tasks that workers have."""
        return [task for job in self.jobs.values() for task in job.workers.values() if task is not None]

    def seconds_of(self, task: Task) -> float:
        """How long a running task will take, as the Dask scheduler reckons: the average, or twice the time it has
        taken already.
        """
        elapsed = task.duration - task.left
        return max(self.average, 2 * elapsed if elapsed > 2 * self.average else 0)

    def seconds(self) -> float:
        """How long the known work will take, as the Dask scheduler reckons."""
        return sum(map(self.seconds_of, self.running())) + self.average * len(self.queued)

    def wanted_workers(self) -> int:
        """Return `Scheduler.adaptive_target` for these tasks, without its part that closes idle workers."""
        tasks = len(self.queued) + len(self.running())
        return min(tasks, math.ceil(self.seconds() / TARGET_DURATION)) if tasks else 0
