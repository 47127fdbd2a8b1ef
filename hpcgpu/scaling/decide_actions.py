"""Decides what the manager does next: a function of the wanted state, the observed state and the time.

It changes nothing. `hpcgpu.scaling.adaptive_policy` decides how many jobs a group should have, and
`hpcgpu.scaling.scheduler_restarts` what becomes of the scheduler job; this module decides which jobs begin and end, and
why.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpcgpu.scaling import adaptive_policy, missing_workers, scheduler_restarts, walltime_margin
from hpcgpu.scaling.policy_data import Decision, Demand, History, Hysteresis, JobView, Limits
from hpcgpu.scaling.scheduler_restarts import ObservedScheduler, SchedulerAction

#: Seconds to wait for running tasks when the budget ends.
BUDGET_END = 20.0


class Drain(enum.Enum):
    """Why a job is drained. The reason determines what happens to data that does not fit elsewhere."""

    UNWANTED = "it stays"
    ZERO = "it is lost if the cluster has no other worker, because the user requested zero jobs; otherwise it stays"
    WALLTIME = "it stays as long as it can"
    DELETED = "it stays until it is released, and its workers take no new tasks"
    BUDGET = "it is lost"


@dataclass(frozen=True, kw_only=True)
class ObservedJob:
    """A worker job that has not ended.

    Attributes
    ----------
    view : JobView
        The job as the policy sees it.
    submitted : bool
        Whether the queue has it.
    retry_at : float
        Epoch seconds before which it is not drained again.
    whole : bool
        Whether workers are connected, and none is missing.
    lost : bool
        Whether workers are missing for good.
    never : bool
        Whether it can never start.
    released : bool
        Whether the user has requested that this very job ends.
    leaves : float or None
        Epoch seconds at which its workers must begin to retire because its walltime ends; None if it does not run.
    end : float or None
        Epoch seconds at which its walltime ends.
    retires_at : float or None
        Epoch seconds at which its workers began to retire for the first time.
    """

    view: JobView
    submitted: bool = True
    retry_at: float = 0.0
    whole: bool = False
    lost: bool = False
    never: bool = False
    released: bool = False
    leaves: float | None = None
    end: float | None = None
    retires_at: float | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.view.name

    def waits_until(self, *, now: float) -> float | None:
        """Return until when to wait for its running work, if its workers retire now because its walltime ends."""
        if self.leaves is None or self.end is None:
            return None
        return walltime_margin.waits_until(self.leaves, self.end, self.retires_at or now)


@dataclass(frozen=True, kw_only=True)
class ObservedGroup:
    """A group of worker jobs: its wanted state and its observed state.

    Attributes
    ----------
    limits : Limits
    jobs : sequence of ObservedJob
        All that have not ended, oldest first.
    demand : Demand
    history : History
    hysteresis : Hysteresis
        The hysteresis that the previous decision returned.
    adaptive : bool
        Whether the amount of work determines its size.
    deleted : bool
        Whether the user has deleted it.
    """

    limits: Limits
    jobs: Sequence[ObservedJob] = ()
    demand: Demand = Demand()
    history: History = History()
    hysteresis: Hysteresis = Hysteresis()
    adaptive: bool = False
    deleted: bool = False


@dataclass(frozen=True, kw_only=True)
class ObservedCluster:
    """A cluster: whether it continues, its scheduler, and its groups of worker jobs.

    Attributes
    ----------
    groups : sequence of ObservedGroup
    scheduler : ObservedScheduler
    submitted : bool
        Whether its scheduler job is in the queue. Worker jobs are submitted after it.
    unrequested : bool
        Whether its first scheduler job is not even being submitted.
    reachable : bool
        Whether the scheduler can be reached. Only the scheduler knows which workers hold data, so that otherwise no
        running job is drained.
    restarting : bool
        Whether its scheduler has ended and another one follows. Until then no worker holds data, and no job is
        submitted: the scheduler job comes first.
    over : bool
        Whether all its jobs must end: the user closes it, or it cannot continue.
    failure : str
        Why it cannot continue, whatever its jobs do; empty if it can.
    retry_at : float
        Epoch seconds before which the cancel of all jobs is not tried again.
    """

    groups: Sequence[ObservedGroup] = ()
    scheduler: ObservedScheduler = ObservedScheduler()
    submitted: bool = True
    unrequested: bool = False
    reachable: bool = True
    restarting: bool = False
    over: bool = False
    failure: str = ""
    retry_at: float = 0.0


@dataclass(frozen=True)
class Submit:
    """Request this number of additional jobs."""

    jobs: int


@dataclass(frozen=True)
class End:
    """End jobs: pending jobs at once, the others when their work is done and their data has moved.

    Attributes
    ----------
    jobs : tuple of str
    why : Drain
    deadline : float or None
        Epoch seconds after which the drain waits for nothing.
    log : str
        A message for the log; empty if there is none.
    """

    jobs: tuple[str, ...]
    why: Drain
    deadline: float | None = None
    log: str = ""


@dataclass(frozen=True)
class SubmitScheduler:
    """Submit the first scheduler job, or start the scheduler in this program."""


@dataclass(frozen=True)
class EndAll:
    """Cancel all jobs of the cluster, its scheduler job too, and submit no more."""


@dataclass(frozen=True)
class Fail:
    """Report that the cluster is lost, and close it."""

    why: str


@dataclass(frozen=True)
class DecidedGroup:
    """The actions for one group, in this order, and the decision on its size that caused them."""

    size: Decision
    actions: tuple[Submit | End, ...]


@dataclass(frozen=True)
class Decided:
    """What comes first, for the whole cluster, and then what is done for each group.

    Attributes
    ----------
    cluster : SubmitScheduler or EndAll or Fail or SchedulerAction or None
    groups : sequence of DecidedGroup
        In the order of the groups; empty while nothing can be done for them.
    """

    cluster: SubmitScheduler | EndAll | Fail | SchedulerAction | None = None
    groups: Sequence[DecidedGroup] = ()


def decide(cluster: ObservedCluster, *, now: float) -> Decided:
    """Decide to end the cluster, or what becomes of its scheduler, and what brings each group to its wanted size.

    Parameters
    ----------
    cluster : ObservedCluster
    now : float
        Epoch seconds.
    """
    if cluster.over:
        return Decided(EndAll() if now >= cluster.retry_at else None)
    if cluster.failure:
        return Decided(Fail(cluster.failure))
    if not cluster.submitted:
        return Decided(SubmitScheduler() if cluster.unrequested else None)
    action = scheduler_restarts.decide(cluster.scheduler, now=now)
    if cluster.scheduler.closes or (cluster.scheduler.gone and not cluster.restarting):
        return Decided(action)
    return Decided(action, [_decide(group, cluster, now) for group in cluster.groups])


def _decide(group: ObservedGroup, cluster: ObservedCluster, now: float) -> DecidedGroup:
    reachable = cluster.reachable or cluster.restarting  # then nothing is lost
    ends = [*_unschedulable(group, now), *(_before_walltime(group, now) if reachable else ())]
    # what ends because of its walltime, of the budget or with its group cannot wait for its work
    lasts = not (group.deleted or group.hysteresis.over)
    released = {job.name for job in group.jobs if job.released and lasts}
    ends += _released(group, now, released - _names(ends), reachable=reachable)
    ending = _names(ends) | released  # also one that cannot end yet: no other job ends in its place
    views = [replace(job.view, draining=True) if job.name in ending else job.view for job in group.jobs]
    size = adaptive_policy.decide(views, group.demand, group.limits, group.history, group.hysteresis, now=now)
    ends += _to_size(group, size if reachable else replace(size, retire=()), now)
    ending = _names(ends)
    submits = [Submit(size.submit)] if size.submit and not cluster.restarting else []
    replaced = _replaced(group, size.target, ending, now) if reachable else ()
    return DecidedGroup(size, (*ends, *submits, *replaced))


def _names(ends: Iterable[End]) -> set[str]:
    return {name for end in ends for name in end.jobs}


def _unschedulable(group: ObservedGroup, now: float) -> Iterator[End]:
    """Decide to end jobs of adaptive scaling that can never start: perhaps nobody reads the reason."""
    if group.adaptive:
        due = tuple(job.name for job in group.jobs if job.never and not job.view.draining and now >= job.retry_at)
        if due:
            yield End(due, Drain.UNWANTED)


def _released(group: ObservedGroup, now: float, released: set[str], *, reachable: bool) -> Iterator[End]:
    """Decide to end the very jobs that the user has named."""
    jobs = [job for job in group.jobs if job.name in released and not job.view.draining and now >= job.retry_at]
    if due := tuple(job.name for job in jobs if reachable or job.view.pending):
        yield End(due, Drain.UNWANTED)


def _before_walltime(group: ObservedGroup, now: float) -> Iterator[End]:
    """Decide to end jobs whose walltime ends soon, early enough to move their data."""
    for job in group.jobs:
        if not job.view.draining and job.leaves is not None and now >= max(job.leaves, job.retry_at):
            log = f"the walltime of job {job.name} ends soon: its workers retire"
            yield End((job.name,), Drain.WALLTIME, job.waits_until(now=now), log)


def _to_size(group: ObservedGroup, decision: Decision, now: float) -> Iterator[End]:
    """Decide to end the surplus jobs of the group."""
    may = {job.name for job in group.jobs if now >= job.retry_at}
    names = tuple(name for name in (*decision.cancel, *decision.retire) if name in may)
    if not names:
        return
    if decision.over:
        yield End(names, Drain.BUDGET, now + BUDGET_END)
    elif group.deleted:
        yield End(names, Drain.DELETED)
    else:
        zero = group.limits.fixed and not group.limits.maximum
        yield End(names, Drain.ZERO if zero else Drain.UNWANTED)


def _replaced(group: ObservedGroup, target: int, ending: set[str], now: float) -> Iterator[End]:
    """Decide to end jobs that lost workers for good, as soon as other jobs can replace them."""
    if group.history.paused:
        return
    staying = [job for job in group.jobs if not job.view.draining and job.name not in ending]
    short = [job for job in staying if job.lost]
    comes = bool(group.history.full) or any(job.submitted and not job.view.workers and not job.lost for job in staying)
    ready = [job for job in short if now >= job.retry_at]
    idle, working = [job for job in ready if not job.view.workers], [job for job in ready if job.view.workers]
    still_work = sum(bool(job.view.workers) for job in short)
    may_end = missing_workers.jobs_that_may_end(still_work, sum(job.whole for job in staying), target, comes=comes)
    for job in (*idle, *working[:may_end]):
        yield End((job.name,), Drain.WALLTIME, job.waits_until(now=now))
