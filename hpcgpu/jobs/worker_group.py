"""A group of identical worker jobs: what they request, how many are wanted, their load and their history.

A group collects the state of its jobs for `hpcgpu.scaling.decide_actions`; the reconciler carries out the actions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch.base import JobState, Outlook
from hpcgpu.batch.reasons import outlook
from hpcgpu.dask_scheduler.held_workers import are_of_kind
from hpcgpu.dask_scheduler.rpc_types import GroupState, WorkerLoad
from hpcgpu.jobs.adaptive_record import AdaptiveRecord
from hpcgpu.jobs.job import Job, nodes_to_avoid
from hpcgpu.options.shared_options_and_defaults import DEFAULT, WorkerOptions
from hpcgpu.scaling import budget, missing_workers, worker_names
from hpcgpu.scaling.decide_actions import ObservedGroup, ObservedJob
from hpcgpu.scaling.forecast import usual_wait
from hpcgpu.scaling.policy_data import Decision, Demand, History, Hysteresis, JobLoad, JobView, Limits
from hpcgpu.scaling.replace_failed_jobs import Failures
from hpcgpu.scaling.walltime_margin import margin
from hpcgpu.scaling.wanted_state import WantedGroup

#: How many waits and starts are kept; `hpcgpu.scaling.forecast` uses the last ten.
_EXPERIENCE = 100
#: Seconds that the batch system needs to end a reservation: meanwhile it takes no job, and jobs in it still run.
_QUEUE_ENDS = 60.0


class WorkerGroup:
    """One family of worker jobs.

    Parameters
    ----------
    name : str
    options : WorkerOptions
    script : Path
        The script that is submitted for each of its jobs.
    restarts : int
        Jobs that may fail in a row and be replaced.
    cluster : str
        The name of its cluster.
    jobs_of : callable
        Returns the jobs of a group, also those that have ended.
    """

    def __init__(  # what it is, and where its jobs are
        self,
        name: str,
        options: WorkerOptions,
        script: Path,
        restarts: int,
        *,
        cluster: str,
        jobs_of: Callable[[WorkerGroup], Sequence[Job]],
    ) -> None:
        self._cluster, self._jobs_of = cluster, jobs_of
        self.name = name
        self.options = options
        self.script = script
        self.failures = Failures(restarts)
        self.wanted = WantedGroup(limits=Limits(maximum=0, fixed=True))
        #: Two corrections of the wanted size: jobs that stay because their data does not fit elsewhere, and jobs that
        #: may run although the queue does not list them any more. The next command of the user resets both.
        self.kept = self.unknown = 0
        self.demand = Demand()
        #: Whether the scheduler did not answer the last query for its load.
        self.silent = False
        #: Whether the scheduler was not queried since the user last called `adapt`.
        self.unread = False
        self.waits: list[float] = []
        self.startups: list[float] = []
        self._seconds_forgotten = 0.0
        self.adaptive: AdaptiveRecord | None = None
        #: The last decision's reason for the number of jobs,
        #: and whether this reason prevents jobs that the group should have.
        self.reason, self.short = "its jobs are about to be submitted", False
        self._hysteresis = Hysteresis()
        self._stage = self._reported = budget.Stage.FREE
        #: When the queue of its jobs ends, epoch seconds; see `JobStatus`.
        self._closes = math.inf
        #: Epoch seconds at which its jobs without work will end if no work comes, by name.
        self.ends: Mapping[str, float] = {}

    @property
    def whose(self) -> str:
        """The name of the group in messages."""
        cluster = f"cluster {self._cluster}"
        return cluster if self.name == DEFAULT else f"worker group {self.name} of {cluster}"

    @property
    def gpus_per_job(self) -> int:
        """GPUs of one job."""
        return self.options.nodes_per_job * self.options.gpus_per_node

    @property
    def jobs(self) -> Sequence[Job]:
        """All its jobs, also those that have ended."""
        return self._jobs_of(self)

    def want(self, wanted: WantedGroup) -> None:
        """Record what the user wants."""
        self.wanted, self.kept, self.unknown, self._hysteresis = wanted, 0, 0, Hysteresis()
        seconds = wanted.target_duration
        self.adaptive = AdaptiveRecord(wanted.limits, seconds) if seconds is not None else None
        self.failures.adaptive = seconds is not None
        self._stage = self._reported = budget.Stage.FREE

    @property
    def limits(self) -> Limits:
        """What the user allows now."""
        limits = self.wanted.limits
        maximum = max(0, limits.maximum + self.kept - self.unknown) if limits.fixed else limits.maximum
        return replace(limits, maximum=maximum, gpus_per_job=self.gpus_per_job)

    def budget_words(self, *, now: float) -> str:
        """Return a message on the budget for the user; empty if there is no budget, or much of it is left."""
        return budget.words(self._stage, self.whose, self.limits, self.gpu_seconds(now=now))

    def new_budget_words(self, *, now: float) -> str:
        """Return the message of `budget_words` if this stage of the budget was not reported yet; empty otherwise."""
        new, self._reported = self._stage > self._reported, max(self._stage, self._reported)
        return self.budget_words(now=now) if new else ""

    @property
    def spent(self) -> bool:
        """Whether its budget is used up, so that its jobs end."""
        return self._stage is budget.Stage.SPENT

    def stopped(self, *, now: float) -> str:
        """Return why it gets no more jobs until the user calls `scale` or `adapt`; empty if it gets jobs."""
        out = self._stage in (budget.Stage.SHORT, budget.Stage.SPENT)
        return self.failures.paused or (self.budget_words(now=now) if out else "")

    def possible_jobs(self, *, now: float) -> int:
        """Return how many jobs it can have without another call of the user."""
        alive = sum(job.active for job in self.jobs)
        return alive if self.stopped(now=now) else max(alive, self.limits.maximum)

    def state(self, *, now: float) -> GroupState:
        """Return the group as other programs see it."""
        limits, decision = self.limits, self.adaptive.decision if self.adaptive is not None else None
        return GroupState(
            name=self.name,
            target=decision.target if decision is not None else limits.maximum,
            minimum=limits.minimum if decision is not None else None,
            maximum=limits.maximum if decision is not None else None,
            reason=decision.reason if decision is not None else self.reason,
            paused=self.failures.paused,
            gpu_hours=self.gpu_seconds(now=now) / 3600,
            maximum_gpu_hours=limits.gpu_seconds / 3600 if limits.gpu_seconds is not None else None,
            usual_wait=usual_wait(self.waits),
            gpus_per_node=self.options.gpus_per_node,
            resources=dict(self.options.worker_resources()),
        )

    def observed(
        self, *, now: float, uncounted: bool = False, never: Collection[str] = (), deleted: bool = False
    ) -> ObservedGroup:
        """Return its wanted and observed state, for the next decision.

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

    def _observed(self, job: Job, *, never: bool) -> ObservedJob:
        return ObservedJob(
            view=self.view(job),
            submitted=job.job_id is not None,
            retry_at=job.retry_at,
            whole=bool(job.workers) and not job.work.absence,
            lost=job.lost_workers,
            never=never,
            released=job.released,
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
        self.short = decision.target > staying + decision.submit
        if self.adaptive is not None:
            self.adaptive.decided(decision, now=now)

    def note(self, text: str, *, now: float) -> None:
        """Write an event into the group's log of adaptive scaling, if there is one."""
        if self.adaptive is not None:
            self.adaptive.note(text, now=now)

    def view(self, job: Job) -> JobView:
        """Return a job as the policy sees it."""
        work = job.work
        return JobView(
            name=job.name,
            pending=job.pending,
            submitted=job.submitted,
            leaves=self.leaves(job),
            workers=len(job.workers),
            idle_since=work.idle_since,
            draining=job.draining,
            **vars(work.load),
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

    def leaves(self, job: Job) -> float | None:
        """Return the time from which a job needs a replacement; None if it needs none.

        A job needs a replacement when its walltime ends, or when it has lost workers for good. If its queue ends at the
        same time, a replacement would be of no use.

        While the group is paused, a job that lost workers is kept: its remaining workers are better than none.
        """
        if job.work.lost_at is not None and not self.failures.paused:
            return job.work.lost_at
        status = job.queue_status
        return None if status.closes is not None and status.end == status.closes else self.walltime_ends(job)

    def _closing(self, now: float) -> str:
        """Return a message if its queue has just ended, or ends too soon for another job; empty otherwise."""
        known = [job.queue_status.closes for job in self.jobs if job.queue_status.closes is not None]
        self._closes = max(known, default=self._closes)
        left = self._closes - now
        if not -_QUEUE_ENDS < left <= margin(self.options.walltime or math.inf, self.options.walltime_margin):
            return ""
        return f"the reservation ends at {time.strftime('%H:%M', time.localtime(self._closes))}"

    def walltime_ends(self, job: Job) -> float | None:
        """Return when the workers of a running job must begin to retire because its walltime ends.

        They have the same time to retire if the walltime ends earlier than planned: the job is preempted with a grace
        time, or an operator has shortened the walltime.
        """
        status = job.queue_status
        if status.state is not JobState.RUNNING or status.start is None or status.end is None:
            return None
        work = job.work
        work.walltime = max(work.walltime, status.end - status.start)
        return status.end - margin(work.walltime, self.options.walltime_margin, work.load.nbytes)

    def record_absent(self, job: Job, *, now: float) -> bool:
        """Record which workers a job lacks; return True once, when they are lost for good."""
        work = job.work
        if not work.absence and work.absence.names and len(job.workers) == len(work.absence.names):
            return False  # all workers are connected, as before
        names, there = worker_names.workers_of(job.name, self.options), set(job.workers.values())
        known = job.view is not None and job.view.missing_since is None
        work.absence = missing_workers.observe(
            work.absence, names, self.options.nodes_per_job, there, now=now, known=known
        )
        if not work.absence:
            work.lost_at = None
        if job.lost_workers or not work.absence or work.absence.seconds_left(self.options.death_timeout, now=now) > 0:
            return False
        work.lost_at = now
        within = work.absence.loss_timeout(self.options.death_timeout)
        self.failures.workers_lost(job.queue_status.node, within=within, now=now)
        return True

    def gpu_seconds(self, *, now: float) -> float:
        """Return the GPU seconds that its jobs have used so far, computed from their starts and ends."""
        return self.gpus_per_job * (self._seconds_forgotten + sum(job.seconds_used(now=now) for job in self.jobs))

    def forget(self, job: Job, *, now: float) -> None:
        """Forget a job that has ended, except for the time that it used."""
        self._seconds_forgotten += job.seconds_used(now=now)

    def count_earlier(self, seconds: float) -> None:
        """Count a job that had ended before this program managed the cluster."""
        self._seconds_forgotten += max(0.0, seconds)

    def learn_wait(self, job: Job) -> None:
        """Record how long a job took until its workers were connected: its wait in the queue and their start.

        If the queue reports when the job started, the time of their start is also recorded separately.
        """
        work = job.work
        if not work.wait_known and work.joined_at is not None:
            work.wait_known = True
            self.waits.append(max(0.0, work.joined_at - job.submitted))
            if (start := job.queue_status.start) is not None:
                self.startups.append(max(0.0, work.joined_at - start))
            del self.waits[:-_EXPERIENCE], self.startups[:-_EXPERIENCE]

    def excluded(self) -> list[str]:
        """Nodes that its next job avoids: those that the user excluded, and those on which jobs were lost."""
        return nodes_to_avoid(self.options.job_extra_directives, self.failures.excluded)

    def can_run(self, resources: Mapping[str, float]) -> bool:
        """Whether a task that needs these abstract resources can run on its workers."""
        there = dict(self.options.worker_resources())
        return all(there.get(name, 0.0) >= amount for name, amount in resources.items())

    def can_be_held(self, resources: Mapping[str, float]) -> bool:
        """Whether a program can hold its workers if it requests these resources; empty: a GPU."""
        return are_of_kind(resources, dict(self.options.worker_resources()), self.options.gpus_per_node)

    def forget_load(self) -> None:
        """Forget the last load: it may be older than the work for which the user has just called `adapt`."""
        self.unread, self.demand = True, Demand()

    def load_unknown(self) -> None:
        """Record that the scheduler did not answer: until it does, no job counts as idle."""
        self.silent = True
        for job in self.jobs:
            job.work.idle_since = None

    def record_load(self, workers: Mapping[str, WorkerLoad], *, now: float) -> None:
        """Record the load that the scheduler reports for its workers, by their names."""
        self.silent = self.unread = False
        for job in self.jobs:
            if not job.alive:
                continue
            work = job.work
            known = [workers[name] for name in job.workers.values() if name in workers]
            work.load = load = JobLoad(
                paused=sum(one["paused"] for one in known),
                processing=sum(one["processing"] for one in known),
                calls=sum(one["calls"] for one in known),
                computing=sum(one["computes"] for one in known),
                nbytes=sum(one["nbytes"] for one in known),
                wanted=sum(one["wanted"] for one in known),
                actors=sum(one["actors"] for one in known),
                memory=sum(one["memory_limit"] or math.inf for one in known),
            )
            work.worked = work.worked or load.busy or load.nbytes > 0
            # complete stays true if a worker is lost later; a worker that is lost for good is not waited for
            work.complete = work.complete or job.lost_workers or len(job.workers) >= self.options.workers_per_job
            work.idle_since = (work.idle_since or now) if work.complete and job.workers and not load.busy else None
