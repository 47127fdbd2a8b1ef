"""How many jobs a group of workers should have, and which to release: state in, decision out. No I/O, no clock.

The same function decides for a fixed size (`scale`) and for an adaptive one (`adapt`). Times are epoch seconds,
durations seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.scaling import budget, forecast, idle_jobs
from hpcgpu.scaling.policy_data import Decision, Demand, History, Hysteresis, JobView, Limits
from hpcgpu.scaling.release_order import holders, release_order, to_release, what_is_wanted, what_works_beside

#: A new job must be able to run for this time before the budget of GPU hours ends.
_USEFUL = 300.0
#: Jobs begin to retire this time before the budget ends.
_BUDGET_MARGIN = 30.0
#: A job is requested if its workers would be busy for at least the time that they need to start. After a longer wait,
#: the remaining work is less certain. So the workers must also be busy for this share of the wait, but twice the time
#: to start is always enough.
_UNSURE = 1 / 3
#: A requested job is kept if its workers would be busy for this share of the time to start.
_KEPT_SHARE = 0.5
_NOTHING_KNOWN = Hysteresis()


def decide(
    jobs: Sequence[JobView],
    demand: Demand,
    limits: Limits,
    history: History,
    hysteresis: Hysteresis = _NOTHING_KNOWN,
    *,
    now: float,
) -> Decision:
    """Decide for one group of workers.

    Parameters
    ----------
    jobs : sequence of JobView
        All that have not ended, oldest first.
    demand : Demand
    limits : Limits
    history : History
    hysteresis : Hysteresis
        The hysteresis that the previous decision returned.
    now : float

    Returns
    -------
    Decision
    """
    group = _Group(jobs, demand, limits, history, now)
    if limits.gpu_seconds is not None and (hysteresis.over or group.over_budget):
        used = budget.of_hours(history.gpu_seconds)
        why = f"the budget of {budget.hours(limits.gpu_seconds)} is used up ({used} used)"
        cancel, retire = _parted(group.staying)
        kept = replace(hysteresis, over=True)
        return Decision(target=0, cancel=cancel, retire=retire, reason=why, over=True, hysteresis=kept)
    if limits.fixed:
        return _fixed(group)
    wish, why = _wish(group)
    unknown = history.silent or history.unread
    if unknown:
        seen = Hysteresis(
            idle_jobs.interrupted(hysteresis.gaps), idle_jobs.Standstill(earlier=hysteresis.standstill.earlier)
        )
    else:
        workers = any(job.workers for job in group.staying)
        seen = Hysteresis(
            idle_jobs.observe(hysteresis.gaps, wish, len(group.lasting), now=now),
            idle_jobs.observe_standstill(hysteresis.standstill, min(demand.jobs, limits.maximum), workers, now=now),
        )
    short = wish > 0 and not group.staying and group.affordable < 1
    return replace(_adapted(group, wish, why, seen), hysteresis=seen, short=short)


@dataclass(frozen=True)
class _Group:
    """The jobs of a group, and their present state."""

    jobs: Sequence[JobView]
    demand: Demand
    limits: Limits
    history: History
    now: float

    @cached_property
    def staying(self) -> list[JobView]:
        """Jobs that are not draining."""
        return [job for job in self.jobs if not job.draining]

    @cached_property
    def wait(self) -> float | None:
        """How long a job that is submitted now would take until its workers are connected."""
        return forecast.expected_wait(self.history.waits, self.staying, self.now)

    @cached_property
    def startup(self) -> float | None:
        """How long a job runs before its workers are connected."""
        return forecast.expected_startup(self.history.startups)

    @cached_property
    def lasting(self) -> list[JobView]:
        """Jobs that stay long enough for a replacement to start. The other jobs are replaced now."""
        return [job for job in self.staying if job.leaves is None or job.leaves - (self.wait or 0.0) > self.now]

    @cached_property
    def working(self) -> float:
        """How many jobs take tasks. A job with some paused workers counts as a fraction."""
        return sum(1 - job.paused / job.workers for job in self.staying if job.workers)

    @property
    def over_budget(self) -> bool:
        """Whether the budget of GPU hours is used up."""
        if self.limits.gpu_seconds is None:
            return False
        burning = self.limits.gpus_per_job * sum(not job.pending for job in self.jobs)
        return self.limits.gpu_seconds - self.history.gpu_seconds <= burning * _BUDGET_MARGIN

    @property
    def affordable(self) -> float:
        """How many jobs can run for a useful time with the rest of the budget."""
        if self.limits.gpu_seconds is None:
            return math.inf
        left = self.limits.gpu_seconds - self.history.gpu_seconds
        return left // (max(1, self.limits.gpus_per_job) * _USEFUL)

    @property
    def existing(self) -> str:
        """The number of existing jobs, in words."""
        return f"{counted(len(self.staying), 'job')} {'exists' if len(self.staying) == 1 else 'exist'}"


def _fixed(group: _Group) -> Decision:
    """Decide for a size that the user set. It applies at once, regardless of the scheduler's load."""
    wish = group.limits.maximum
    why = f"the size is set to {counted(wish, 'job')}"
    missing = wish - len(group.lasting)
    if missing > 0:
        most, why_not = _allowed(group, missing)
        return _submission(group, wish, why, most, why_not)
    chosen = group.staying if wish == 0 else sorted(group.lasting, key=release_order)[:-missing]
    cancel, retire = _parted(chosen)
    reason = f"{why}; {group.existing}" + (f", releasing {len(chosen)}" if chosen else "")
    return Decision(target=wish, cancel=cancel, retire=retire, reason=reason)


def _wish(group: _Group) -> tuple[int, str]:
    """Return how many jobs have work or hold needed data, within the limits, and why."""
    demand, limits = group.demand, group.limits
    wish = max(limits.minimum, min(limits.maximum, demand.jobs))
    beside = sum(job.works_beside for job in group.lasting)
    nothing = "there is no task" if beside else "there is no work"
    why = f"there is work for {counted(demand.jobs, 'job')}" if demand.jobs else nothing
    if group.history.unread:
        why = "it is not known yet whether there is work"
    if wish != demand.jobs:
        why += f", {'minimum' if wish > demand.jobs else 'maximum'} is {wish}"
    connected = sum(job.workers > 0 for job in group.staying)
    if group.working and group.startup:
        left = max(0.0, forecast.work_left(demand, group.working, group.startup))
        busy = max(limits.minimum, connected + math.ceil(left / (_KEPT_SHARE * group.startup)))
        if busy < wish:
            wish = busy
            why += f", but when the workers of another job could start, only {counted(busy, 'job')} would have work"
    if demand.memory:
        wish = max(wish, min(demand.memory, limits.maximum))
        why += f"; {counted(demand.memory, 'job')} needed as the workers' memory is nearly full"
    if demand.held > wish:
        wish = min(demand.held, max(limits.maximum, wish))
        why += f"; {counted(demand.held, 'job')} needed for workers that a program holds"
    if beside > wish:
        wish = min(beside, max(limits.maximum, wish))
        why += f"; {what_works_beside(group.lasting)}"
    hold = holders(group.jobs, group.lasting)
    if hold > wish:
        wish = max(wish, min(hold, limits.maximum))
        why += f"; {counted(hold, 'job')} needed to hold {what_is_wanted(group.jobs)}"
    return wish, why


def _adapted(group: _Group, wish: int, why: str, seen: Hysteresis) -> Decision:
    """Decide for a size that follows the work."""
    missing = wish - len(group.lasting)
    if missing <= 0:
        ending = len(group.staying) > len(group.lasting) and not group.demand.jobs
        if missing or ending:
            return _shrunk(group, wish, why, seen)
        return Decision(target=wish, reason=f"{why}; {group.existing}")
    most, why_not = _allowed(group, missing)
    if most:
        busy, why_not = _kept_busy(group)
        least = max(
            min(max(holders(group.jobs, group.lasting), group.demand.memory, group.demand.held), wish)
            - len(group.lasting),
            group.limits.minimum - len(group.lasting),
        )
        most = min(most, max(busy, least))
    return _submission(group, wish, why, most, why_not)


def _submission(group: _Group, wish: int, why: str, submit: int, why_not: str) -> Decision:
    """Return the decision to submit this number of jobs, or the reason to submit none."""
    ending = len(group.staying) - len(group.lasting)
    reason = f"{why}; {group.existing}" + (f", {ending} to be replaced" if ending else "")
    return Decision(target=wish, submit=submit, reason=f"{reason}; {f'submitting {submit}' if submit else why_not}")


def _allowed(group: _Group, missing: int) -> tuple[int, str]:
    """Return how many of the missing jobs may be submitted now; if none, also the reason."""
    limits, history = group.limits, group.history
    why_not = ""
    if history.paused:
        missing, why_not = 0, f"paused: {history.paused}"
    elif history.uncounted:
        missing, why_not = 0, "a job has ended, and hpcgpu first queries the scheduler"
    elif history.full:
        missing, why_not = 0, f"the site accepts no more jobs now: {history.full}"
    elif group.now < history.next_try:
        missing, why_not = 0, f"next submit in {history.next_try - group.now:.0f} s, after a failure"
    if missing and limits.backlog is not None and not limits.fixed:
        pending = sum(job.pending for job in group.staying)
        missing = max(0, min(missing, limits.backlog - pending))
        why_not = f"{counted(pending, 'job')} already pending (backlog={limits.backlog})"
    if missing and limits.gpu_seconds is not None:
        missing = max(0, min(missing, int(group.affordable) - len(group.staying)))
        why_not = f"the budget of {budget.hours(limits.gpu_seconds)} is too small for another job"
    return missing, why_not


def _kept_busy(group: _Group) -> tuple[int, str]:
    """Return how many more jobs would have enough work when their workers are connected; if none, also the reason."""
    demand, wait, startup = group.demand, group.wait, group.startup
    coming = sum(not job.workers for job in group.lasting)
    if wait is None or startup is None:
        return group.limits.maximum, ""
    left = forecast.work_left(demand, group.working, wait)
    pays = max(1.0, startup, min(2 * startup, wait * _UNSURE))
    busy = math.floor(left / pays) - coming
    if not group.working and not coming:
        busy = max(1, busy)
    if demand.seconds > wait:  # the work on a job that ends soon needs another job
        busy = max(busy, sum(job.busy for job in group.staying if job not in group.lasting) - coming)
    if busy > 0:
        return busy, ""
    return 0, (
        f"too little work for another job: its workers could start in {wait:.0f} s, and only {left:.0f} s of work "
        "would be left then"
        if left > 0
        else f"another job could start in {wait:.0f} s, and by then the present jobs will have begun all work"
    )


def _shrunk(group: _Group, wish: int, why: str, seen: Hysteresis) -> Decision:
    """Release jobs that have been surplus for long enough.

    Pending jobs go first. Then jobs whose workers start or are idle, if they are not needed for wanted data.
    """
    if group.history.silent:  # a scheduler that does not answer is often one that receives a lot of work
        reason = f"{why}; {group.existing}; none is released, because the scheduler does not answer"
        return Decision(target=wish, reason=reason)
    if group.history.unread:
        reason = f"{why}; {group.existing}; none is released before the scheduler reports its load"
        return Decision(target=wish, reason=reason)
    now, limits, lasting, surplus = group.now, group.limits, group.lasting, len(group.lasting) - wish
    order = sorted((job for job in lasting if not job.busy), key=release_order)[:surplus]
    # The job with the highest rank is released first: work for so many jobs is rarest.
    ranks = [len(lasting) - 1 - place for place in range(len(order))]
    keeps = [_keep_time(group, seen, rank) for rank in ranks]
    since = [job.idle_since if job.workers else seen.gaps[rank].since for job, rank in zip(order, ranks, strict=True)]
    spent = [now - (now if start is None else start) for start in since]
    ready = [job for job, passed, keep in zip(order, spent, keeps, strict=True) if passed >= keep]
    cancel = [job for job in ready if job.pending]
    waits = len(cancel) < sum(job.pending for job in lasting)
    useless = [] if waits else [job for job in ready if not job.pending]
    retire = to_release(useless, group.jobs, lasting, surplus - len(cancel))
    if not waits and not cancel and not group.demand.jobs:
        # Jobs that end soon are not in `lasting`. Without any work they need not continue until their end.
        least = limits.idle_timeout if limits.idle_timeout is not None else idle_jobs.keep_time((), 0.0)
        ending = [j for j in group.staying if j not in lasting and j.idle_since is not None and not j.busy]
        stay = [job for job in lasting if job not in retire]
        retire += to_release([j for j in ending if now - (j.idle_since or now) >= least], group.jobs, stay, len(ending))
    reason = f"{why}; {group.existing}"
    if cancel:
        reason += f"; cancelling {counted(len(cancel), 'pending job')}"
    if retire:
        reason += f"; draining {counted(len(retire), 'job')} without work"
    if not cancel and not retire and useless:
        reason += "; no idle job can end: the others cannot hold its data"
    elif not cancel and not retire and not order:
        reason += "; no job is idle"
    elif not cancel and not retire:
        reason += f"; job {order[0].name} ends in {duration(max(0.0, keeps[0] - spent[0]))} if no work comes: a job "
        reason += f"without work is kept for {duration(keeps[0])}, {_experience(group, seen, ranks[0])}"
    return Decision(
        target=wish,
        cancel=tuple(job.name for job in cancel),
        retire=tuple(job.name for job in retire),
        reason=reason,
        ends={j.name: now + k - s for j, k, s in zip(order, keeps, spent, strict=True) if s < k},
    )


def _keep_time(group: _Group, seen: Hysteresis, rank: int) -> float:
    """Return for how long the job with this rank is kept without work."""
    if group.limits.idle_timeout is not None:
        return group.limits.idle_timeout
    startup, earlier, person = group.startup or 0.0, seen.gaps[rank].earlier, group.limits.interactive
    if rank:
        return idle_jobs.keep_time(earlier, idle_jobs.cost_of_start(startup, group.wait), interactive=person)
    start = idle_jobs.cost_of_last(startup, idle_jobs.delay(seen.standstill, group.wait))
    return idle_jobs.keep_time(earlier, start, last=True, interactive=person)


def _experience(group: _Group, seen: Hysteresis, rank: int) -> str:
    """Return why the job with this rank is kept for that time."""
    if group.limits.idle_timeout is not None:
        return "the idle_timeout"
    earlier, late = seen.gaps[rank].earlier, 0.0 if rank else idle_jobs.delay(seen.standstill, group.wait)
    last = f", and without it all work would be about {late:.0f} s later" if late >= 1 else ""
    if group.limits.interactive and idle_jobs.too_few_gaps(earlier):
        return f"as you work interactively, and few of your pauses are known yet{last}"
    if not earlier:
        return f"as no gap in the work is known yet{last}"
    if _keep_time(group, seen, rank) > 2 * max(earlier):
        return f"as the start of another one would cost much more{last}"
    return f"as the last {counted(len(earlier), 'gap')} in the work took up to {max(earlier):.0f} s{last}"


def _parted(jobs: Iterable[JobView]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the pending ones of these jobs, and of the others."""
    given = tuple(jobs)
    return tuple(j.name for j in given if j.pending), tuple(j.name for j in given if not j.pending)
