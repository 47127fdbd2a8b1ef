"""What the manager does next: a function of what is wanted, what is observed, and the time. It changes nothing.

`hpcgpu.scaling.policy` says how many jobs a group should have; this says which jobs begin and end, and why.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpcgpu.scaling import lost_workers, policy, walltime
from hpcgpu.scaling.model import Decision, Demand, History, Hysteresis, JobView, Limits

__all__ = ["BUDGET_END", "Decided", "Drain", "End", "ObservedGroup", "ObservedJob", "Submit", "decide"]

#: Seconds for which running tasks are waited for when the budget ends.
BUDGET_END = 20.0


class Drain(enum.Enum):
    """Why a job is drained, which says what becomes of data that fits nowhere else."""

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
        What the policy sees of it.
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
    leaves: float | None = None
    end: float | None = None
    retires_at: float | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.view.name

    def waits_until(self, *, now: float) -> float | None:
        """Return until when what runs on it is waited for, if its workers retire now because it ends."""
        if self.leaves is None or self.end is None:
            return None
        return walltime.waits_until(self.leaves, self.end, self.retires_at or now)


@dataclass(frozen=True, kw_only=True)
class ObservedGroup:
    """A group of worker jobs: what the user wants of it, and what is known of it.

    Attributes
    ----------
    limits : Limits
    jobs : sequence of ObservedJob
        All that have not ended, oldest first.
    demand : Demand
    history : History
    hysteresis : Hysteresis
        That of the decision before.
    adaptive : bool
        Whether the work decides its size.
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


@dataclass(frozen=True)
class Submit:
    """Request so many more jobs."""

    jobs: int


@dataclass(frozen=True)
class End:
    """End jobs: those that wait at once, the others when their work is done and their data has moved.

    Attributes
    ----------
    jobs : tuple of str
    why : Drain
    deadline : float or None
        Epoch seconds after which nothing is waited for.
    log : str
        What the log says of it; empty if nothing.
    """

    jobs: tuple[str, ...]
    why: Drain
    deadline: float | None = None
    log: str = ""


@dataclass(frozen=True)
class Decided:
    """What to do for one group, in this order, and the size on which that rests."""

    size: Decision
    actions: tuple[Submit | End, ...]


def decide(groups: Iterable[ObservedGroup], *, reachable: bool, now: float) -> list[Decided]:
    """Decide what brings each group to the size that it should have.

    Parameters
    ----------
    groups : iterable of ObservedGroup
    reachable : bool
        Whether the scheduler can be reached, which knows who holds data. Otherwise no running job is drained.
    now : float
        Epoch seconds.

    Returns
    -------
    list of Decided
        One for each group, in their order.
    """
    return [_decide(group, reachable, now) for group in groups]


def _decide(group: ObservedGroup, reachable: bool, now: float) -> Decided:
    ends = [*_unschedulable(group, now), *(_before_walltime(group, now) if reachable else ())]
    ending = {name for end in ends for name in end.jobs}
    views = [replace(job.view, retiring=True) if job.name in ending else job.view for job in group.jobs]
    size = policy.decide(views, group.demand, group.limits, group.history, group.hysteresis, now=now)
    ends += _to_size(group, size if reachable else replace(size, retire=()), now)
    ending = {name for end in ends for name in end.jobs}
    submits = [Submit(size.submit)] if size.submit else []
    replaced = _replaced(group, size.target, ending, now) if reachable else ()
    return Decided(size, (*ends, *submits, *replaced))


def _unschedulable(group: ObservedGroup, now: float) -> Iterator[End]:
    """Jobs of adaptive scaling that can never start end: perhaps nobody is there to read why."""
    if group.adaptive:
        due = tuple(job.name for job in group.jobs if job.never and not job.view.retiring and now >= job.retry_at)
        if due:
            yield End(due, Drain.UNWANTED)


def _before_walltime(group: ObservedGroup, now: float) -> Iterator[End]:
    """Jobs whose walltime ends soon end before it, for their data."""
    for job in group.jobs:
        if not job.view.retiring and job.leaves is not None and now >= max(job.leaves, job.retry_at):
            log = f"the walltime of job {job.name} ends soon: its workers retire"
            yield End((job.name,), Drain.WALLTIME, job.waits_until(now=now), log)


def _to_size(group: ObservedGroup, decision: Decision, now: float) -> Iterator[End]:
    """Jobs that the group has too many of end."""
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
    """Jobs that lost workers for good end, as soon as others can take their places."""
    if group.history.paused:
        return
    staying = [job for job in group.jobs if not job.view.retiring and job.name not in ending]
    short = [job for job in staying if job.lost]
    comes = bool(group.history.full) or any(job.submitted and not job.view.workers and not job.lost for job in staying)
    ready = [job for job in short if now >= job.retry_at]
    idle, working = [job for job in ready if not job.view.workers], [job for job in ready if job.view.workers]
    still_work = sum(bool(job.view.workers) for job in short)
    may_go = lost_workers.may_go(still_work, sum(job.whole for job in staying), target, comes=comes)
    for job in (*idle, *working[:may_go]):
        yield End((job.name,), Drain.WALLTIME, job.waits_until(now=now))
