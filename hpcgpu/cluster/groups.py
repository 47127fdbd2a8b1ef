"""A group of identical worker jobs: what they request, how many there should be, and what has happened to them.

A group collects what is known of its jobs for `hpcgpu.scaling.deciding`; the reconciler carries out the actions.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcgpu.batch.base import JobState
from hpcgpu.batch.reasons import Outlook, outlook
from hpcgpu.options.common import DEFAULT, WorkerOptions
from hpcgpu.runtime.wire import GroupState, Load, WaitingWork, WorkerLoad
from hpcgpu.scaling import budget, lost_workers, units
from hpcgpu.scaling.deciding import ObservedGroup, ObservedJob
from hpcgpu.scaling.forecast import usual_wait
from hpcgpu.scaling.model import Decision, Demand, History, Hysteresis, JobView, Limits
from hpcgpu.scaling.replacement import Failures
from hpcgpu.scaling.walltime import margin
from hpcgpu.scaling.wanted import WantedGroup

if TYPE_CHECKING:
    from hpcgpu.cluster.adaptive import GPUAdaptive
    from hpcgpu.cluster.jobs import Registry
    from hpcgpu.cluster.worker_job import WorkerJob

__all__ = ["WorkerGroup", "demands", "group_states"]

#: Share of the workers' memory above which more workers are requested (as `Scheduler.adaptive_target` does).
_MEMORY_FULL = 0.6
#: Waits and starts that are remembered; `hpcgpu.scaling.forecast` looks at the last ten.
_EXPERIENCE = 100
#: Sums of fractions of jobs are exact to this number of digits.
_DIGITS = 6


class WorkerGroup:
    """One family of worker jobs.

    Parameters
    ----------
    name : str
    options : WorkerOptions
    script : Path
        What its jobs are submitted from.
    restarts : int
        Jobs that may fail in a row and be replaced.
    registry : Registry
        Has its jobs.
    """

    def __init__(self, name: str, options: WorkerOptions, script: Path, restarts: int, registry: Registry) -> None:
        self._registry = registry
        self.name = name
        self.options = options
        self.script = script
        self.failures = Failures(restarts)
        self.wanted = WantedGroup(limits=Limits(maximum=0, fixed=True))
        #: Jobs beyond the wanted size whose data fits nowhere else, and places of jobs that may run although no queue
        #: knows them any more. The next command of the user forgets them.
        self.kept = self.unknown = 0
        self.demand = Demand()
        #: Whether the scheduler did not answer when it was last queried for its load.
        self.silent = False
        #: Whether it has not been queried since the user last called `adapt`.
        self.unread = False
        self.waits: list[float] = []
        self.startups: list[float] = []
        self._seconds_forgotten = 0.0
        self.adaptive: GPUAdaptive | None = None
        #: Why it has the jobs that it has, as of the last decision,
        #: and whether that keeps jobs out that it should have.
        self.reason, self.held = "its jobs are about to be submitted", False
        self._hysteresis = Hysteresis()
        self._stage = self._told = budget.Stage.FREE
        #: When the queue of its jobs ends, epoch seconds; see `JobStatus`.
        self._closes = math.inf
        #: When its jobs without work will end if none comes, by name.
        self.ends: Mapping[str, float] = {}

    @property
    def whose(self) -> str:
        """What messages call it."""
        cluster = f"cluster {self._registry.cluster}"
        return cluster if self.name == DEFAULT else f"worker group {self.name} of {cluster}"

    @property
    def gpus_per_job(self) -> int:
        """GPUs of one job."""
        return self.options.nodes_per_job * self.options.gpus_per_node

    @property
    def jobs(self) -> list[WorkerJob]:
        """All its jobs, also those that have ended."""
        return [job for job in self._registry.worker_jobs if job.group is self]

    def want(self, wanted: WantedGroup) -> None:
        """Take over what the user wants."""
        self.wanted, self.kept, self.unknown, self._hysteresis = wanted, 0, 0, Hysteresis()
        self._stage = self._told = budget.Stage.FREE

    @property
    def limits(self) -> Limits:
        """What the user allows now."""
        limits = self.wanted.limits
        maximum = max(0, limits.maximum + self.kept - self.unknown) if limits.fixed else limits.maximum
        return replace(limits, maximum=maximum, gpus_per_job=self.gpus_per_job)

    def budget_words(self, *, now: float) -> str:
        """Return what the user must know of the budget; empty if there is none, or much of it is left."""
        return budget.words(self._stage, self.whose, self.limits, self.gpu_seconds(now=now))

    def new_budget_words(self, *, now: float) -> str:
        """Return them if the user has not been told yet of this stage of the budget."""
        new, self._told = self._stage > self._told, max(self._stage, self._told)
        return self.budget_words(now=now) if new else ""

    def stopped(self, *, now: float) -> str:
        """Return why it gets no more jobs before the user calls `scale` or `adapt`; empty if it gets some."""
        out = self._stage in (budget.Stage.SHORT, budget.Stage.SPENT)
        return self.failures.paused or (self.budget_words(now=now) if out else "")

    def within_reach(self, *, now: float) -> int:
        """Return how many jobs it can reach without another call of the user."""
        alive = sum(job.active for job in self.jobs)
        return alive if self.stopped(now=now) else max(alive, self.limits.maximum)

    def observed(
        self, *, now: float, uncounted: bool = False, never: Collection[str] = (), deleted: bool = False
    ) -> ObservedGroup:
        """Return what is wanted and known of it, for the next decision.

        Parameters
        ----------
        now : float
        uncounted : bool, default False
            Whether a job has ended, and it is not known yet whether that was a failure.
        never : collection of str, optional
            Jobs that can never start.
        deleted : bool, default False
            Whether the user has deleted it.
        """
        self.failures.time_passed(now=now)
        return ObservedGroup(
            limits=self.limits,
            jobs=[self._observed(job, never=job.name in never) for job in self.jobs if job.alive],
            demand=self.demand,
            history=self._history(now=now, uncounted=uncounted),
            hysteresis=self._hysteresis,
            adaptive=self.adaptive is not None,
            deleted=deleted,
        )

    def _observed(self, job: WorkerJob, *, never: bool) -> ObservedJob:
        return ObservedJob(
            view=self.view(job),
            submitted=job.job_id is not None,
            retry_at=job.retry_at,
            whole=bool(job.workers) and not job.work.absence,
            lost=job.lost_workers,
            never=never,
            leaves=self.walltime_ends(job),
            end=job.queue_status.end,
            retires_at=job.work.retires_at,
        )

    def decided(self, decision: Decision, *, now: float) -> None:
        """Record the last decision on its size."""
        staying = sum(job.active for job in self.jobs)
        self._hysteresis = decision.hysteresis
        self._stage = budget.stage(self.limits, self.gpu_seconds(now=now), decision)
        self.reason, self.ends = decision.reason, decision.ends
        self.held = decision.target > staying + decision.submit
        if self.adaptive is not None:
            self.adaptive.decided(decision, now=now)

    def view(self, job: WorkerJob) -> JobView:
        """Return a job as the policy sees it."""
        work = job.work
        return JobView(
            name=job.name,
            pending=job.pending,
            submitted=job.submitted,
            leaves=self.leaves(job),
            workers=len(job.workers),
            paused=work.paused,
            processing=work.processing,
            calls=work.calls,
            computing=work.computing,
            nbytes=work.nbytes,
            wanted=work.wanted,
            actors=work.actors,
            memory=work.memory,
            idle_since=work.idle_since,
            retiring=job.draining,
        )

    def _history(self, *, now: float, uncounted: bool) -> History:
        full = self.failures.full or self._closing(now)
        if not self.limits.fixed:  # more jobs would only wait for the same limit
            statuses = (job.queue_status for job in self.jobs if job.pending)
            full = full or next((status.reason for status in statuses if outlook(status) is Outlook.LIMIT), "")
        return History(
            waits=tuple(self.waits),
            startups=tuple(self.startups),
            gpu_seconds=self.gpu_seconds(now=now),
            uncounted=uncounted,
            silent=self.silent,
            unread=self.unread,
            paused=self.failures.paused,
            next_try=self.failures.next_try,
            full=full,
        )

    def leaves(self, job: WorkerJob) -> float | None:
        """Return the time from which another job is needed in place of a job.

        Its walltime ends then, or it has lost workers for good. In a queue that ends, another one would be of no use.

        While nothing is submitted, what is left of a job that lost workers is better than nothing.
        """
        if job.work.lost_at is not None and not self.failures.paused:
            return job.work.lost_at
        status = job.queue_status
        return None if status.closes is not None and status.end == status.closes else self.walltime_ends(job)

    def _closing(self, now: float) -> str:
        """Return that its queue ends so soon that another job would be of no use; empty otherwise."""
        known = [job.queue_status.closes for job in self.jobs if job.queue_status.closes is not None]
        self._closes = max(known, default=self._closes)
        left = self._closes - now
        if not 0 < left <= margin(self.options.walltime or math.inf, self.options.walltime_margin):
            return ""
        return f"the reservation ends at {time.strftime('%H:%M', time.localtime(self._closes))}"

    def walltime_ends(self, job: WorkerJob) -> float | None:
        """Return when the workers of a running job must begin to retire because its walltime ends.

        They have as long where it ends earlier than it should: it is preempted with a time of grace, or an operator
        has shortened it.
        """
        status = job.queue_status
        if status.state is not JobState.RUNNING or status.start is None or status.end is None:
            return None
        work = job.work
        work.walltime = max(work.walltime, status.end - status.start)
        return status.end - margin(work.walltime, self.options.walltime_margin, work.nbytes)

    def record_absent(self, job: WorkerJob, *, now: float) -> bool:
        """Record which workers a job lacks; return True once, when they are lost for good."""
        work = job.work
        if not work.absence and work.absence.names and len(job.workers) == len(work.absence.names):
            return False  # all are there, as before
        names, there = units.workers_of(job.name, self.options), set(job.workers.values())
        known = job.view is not None and job.view.missing_since is None
        work.absence = lost_workers.observe(
            work.absence, names, self.options.nodes_per_job, there, now=now, known=known
        )
        if not work.absence:
            work.lost_at = None
        if job.lost_workers or not work.absence or work.absence.left(self.options.death_timeout, now=now) > 0:
            return False
        work.lost_at = now
        within = work.absence.patience(self.options.death_timeout)
        self.failures.workers_lost(job.queue_status.node, within=within, now=now)
        return True

    def gpu_seconds(self, *, now: float) -> float:
        """Return what its jobs have used so far, from their starts and ends."""
        return self.gpus_per_job * (self._seconds_forgotten + sum(job.seconds_used(now=now) for job in self.jobs))

    def forget(self, job: WorkerJob, *, now: float) -> None:
        """Keep of a job that has ended only what it has used."""
        self._seconds_forgotten += job.seconds_used(now=now)

    def count_earlier(self, seconds: float) -> None:
        """Count a job that had ended before this program managed the cluster."""
        self._seconds_forgotten += max(0.0, seconds)

    def learn_wait(self, job: WorkerJob) -> None:
        """Record how long a job took until its workers were connected: its wait in the queue and their start.

        Their start alone is recorded where the queue tells when the job started.
        """
        work = job.work
        if not work.wait_known and work.joined_at is not None:
            work.wait_known = True
            self.waits.append(max(0.0, work.joined_at - job.submitted))
            if (start := job.queue_status.start) is not None:
                self.startups.append(max(0.0, work.joined_at - start))
            del self.waits[:-_EXPERIENCE], self.startups[:-_EXPERIENCE]

    def excluded(self) -> list[str]:
        """Nodes that its next job avoids: the user's own and those that lost jobs."""
        own: list[str] = []
        for text in self.options.job_extra_directives if self.failures.excluded else ():
            option, _, value = text.replace("=", " ", 1).strip().partition(" ")
            if option in ("-x", "--exclude"):
                own += shlex.split(value)
        return [*own, *self.failures.excluded]

    def can_run(self, resources: Mapping[str, float]) -> bool:
        """Whether a task that needs these abstract resources can run on its workers."""
        there = dict(self.options.worker_resources())
        return all(there.get(name, 0.0) >= amount for name, amount in resources.items())

    def forget_load(self) -> None:
        """Forget the last load: it may be older than the work for which the user has just called `adapt`."""
        self.unread, self.demand = True, Demand()

    def load_unknown(self) -> None:
        """Record that the scheduler did not answer: no job is known to be idle meanwhile."""
        self.silent = True
        for job in self.jobs:
            job.forget_idleness()

    def take_load(self, workers: Mapping[str, WorkerLoad], *, now: float) -> None:
        """Record the load that the scheduler reports for its workers, by their names."""
        self.silent = self.unread = False
        for job in self.jobs:
            if not job.alive:
                continue
            work = job.work
            work.paused = work.processing = work.calls = work.computing = 0
            work.nbytes = work.wanted = work.actors = 0
            work.memory = 0.0
            for name in job.workers.values():
                if (load := workers.get(name)) is not None:
                    work.paused += load["paused"]
                    work.processing += load["processing"]
                    work.calls += load["calls"]
                    work.computing += load["computes"]
                    work.nbytes += load["nbytes"]
                    work.wanted += load["wanted"]
                    work.actors += load["actors"]
                    work.memory += load["memory_limit"] or math.inf
            busy = work.processing or work.calls or work.computing
            work.worked = work.worked or bool(busy or work.nbytes)
            # one may be lost for good later, and one that is lost for good never comes
            work.complete = work.complete or job.lost_workers or len(job.workers) >= self.options.workers_per_job
            work.idle_since = (work.idle_since or now) if work.complete and job.workers and not busy else None


def group_states(groups: Iterable[WorkerGroup], *, now: float) -> list[GroupState]:
    """Return the groups as other programs see them."""
    return [
        GroupState(
            name=group.name,
            target=group.adaptive.decision.target if group.adaptive is not None else group.limits.maximum,
            minimum=group.limits.minimum if group.adaptive is not None else None,
            maximum=group.limits.maximum if group.adaptive is not None else None,
            reason=group.adaptive.decision.reason if group.adaptive is not None else group.reason,
            paused=group.failures.paused,
            gpu_hours=group.gpu_seconds(now=now) / 3600,
            maximum_gpu_hours=group.limits.gpu_seconds / 3600 if group.limits.gpu_seconds is not None else None,
            usual_wait=usual_wait(group.waits),
        )
        for group in groups
    ]


def demands(load: Load, groups: Iterable[WorkerGroup]) -> dict[str, Demand]:
    """Return the scheduler's demand for each group.

    `Scheduler.adaptive_target` knows neither groups nor resources; this does.

    Parameters
    ----------
    load : Load
    groups : iterable of WorkerGroup
        Work that no worker has counts for the first group that can run it; put the adaptive ones first.
    """
    listed = list(groups)
    waiting: dict[str, list[WaitingWork]] = {group.name: [] for group in listed}
    for kind in load["waiting"]:
        if able := next((group for group in listed if group.can_run(kind["resources"])), None):
            waiting[able.name].append(kind)
    return {group.name: _demand(group, load["workers"], waiting[group.name]) for group in listed}


class _Work(NamedTuple):
    """Tasks that are in one place: a worker has them, or they wait for one."""

    tasks: int
    #: Those of them that no thread runs yet.
    late: int
    #: Seconds that all of them will take.
    seconds: float
    #: Tasks such as these that one worker runs at a time.
    at_once: int

    @property
    def late_seconds(self) -> float:
        return self.seconds * self.late / self.tasks if self.late else 0.0


def _demand(group: WorkerGroup, workers: Mapping[str, WorkerLoad], waiting: Iterable[WaitingWork]) -> Demand:
    there = [
        workers[name] for job in group.jobs if not job.draining for name in job.workers.values() if name in workers
    ]
    work = [
        _Work(w["processing"], max(0, w["processing"] - w["nthreads"]), w["occupancy"], w["at_once"])
        for w in there
        if w["processing"]
    ]
    work += [_Work(k["tasks"], k["tasks"], k["seconds"], _tasks_at_once(group, k["resources"])) for k in waiting]
    tasks = sum(each.tasks for each in work)
    seconds = sum(each.seconds for each in work)
    duration = group.adaptive.target_duration if group.adaptive is not None else math.inf
    needed = min(tasks, max(1, math.ceil(seconds / duration)))
    # Workers that run all tasks at once, and of these the share that is needed.
    wanted = sum(each.tasks / each.at_once for each in work) * needed / max(1, tasks)
    threads = sum(worker["nthreads"] for worker in there)
    late = sum(each.late for each in work)
    return Demand(
        jobs=math.ceil(round(wanted / group.options.workers_per_job, _DIGITS)),
        seconds=seconds / threads if threads else (math.inf if tasks else 0.0),
        waiting=sum(each.late_seconds / each.at_once for each in work) / group.options.workers_per_job,
        task=sum(each.late_seconds for each in work) / late if late else 0.0,
        memory=math.ceil(len(there) / group.options.workers_per_job) + 1 if _is_full(there, tasks) else 0,
    )


def _is_full(workers: Iterable[WorkerLoad], tasks: int) -> bool:
    """Return whether so much of the workers' memory is in use that another job is needed.

    A paused worker has no room for results, even if Dask does not know what fills its memory. Without tasks only the
    data counts that is kept on another job once it is there: else that job would come and go without end.
    """
    limit, used = 0, 0
    for worker in workers:
        limit += worker["memory_limit"]
        room = worker["memory_limit"] if worker["paused"] else 0
        used += max(room, worker["nbytes"]) if tasks else worker["wanted"]
    return used > _MEMORY_FULL * limit > 0


def _tasks_at_once(group: WorkerGroup, resources: Mapping[str, float]) -> int:
    """Return how many tasks that need these resources one worker runs at a time, with its threads and resources."""
    there = dict(group.options.worker_resources())
    slots = [there[name] // amount for name, amount in resources.items() if amount > 0]
    return max(1, int(min([units.threads_per_worker(group.options), *slots])))
