"""How many jobs a group of workers should have, and which to release: state in, decision out. No I/O, no clock.

The same function decides for a fixed size (`scale`) and for an adaptive one (`adapt`). Times are epoch seconds,
durations seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcgpu.display.words import counted

__all__ = [
    "Decision",
    "Demand",
    "History",
    "Hysteresis",
    "JobView",
    "Limits",
    "decide",
    "expected_wait",
]

#: An idle job is kept for at least this time, if `idle_timeout` is not given.
_KEEP_LEAST = 5.0
#: ... and for at most this time.
_KEEP_MOST = 30.0
#: A new job must be able to run for this time before the budget of GPU hours ends.
_USEFUL = 300.0
#: Jobs begin to retire this time before the budget ends.
_BUDGET_MARGIN = 30.0
#: Share of the memory of the remaining jobs that wanted data may fill. From 60 % on, Dask requests another job.
_HOLD_SHARE = 0.5
#: Number of recent waits in an estimate.
_RECENT_WAITS = 10


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What the policy must know of one job that has not ended.

    Attributes
    ----------
    name : str
    pending : bool
        Whether it waits in the queue, so that cancelling it costs nothing but its place there.
    submitted : float
    leaves : float or None
        From when on another job is needed in its place: its walltime ends, or workers of it are lost for good. None if
        that is not so.
    workers : int
        Connected workers.
    processing : int
        Tasks that its workers have.
    nbytes : int
        Bytes that its workers hold.
    wanted : int
        Those of them that a client, or a task that is not computed yet, still needs.
    actors : int
        Actors that live on its workers. They cannot move.
    memory : float
        Bytes that its connected workers may use; infinite without a limit.
    idle_since : float or None
        Since when all its workers are connected and idle.
    retiring : bool
        Whether it is draining already.
    """

    name: str
    pending: bool
    submitted: float
    leaves: float | None = None
    workers: int = 0
    processing: int = 0
    nbytes: int = 0
    wanted: int = 0
    actors: int = 0
    memory: float = 0.0
    idle_since: float | None = None
    retiring: bool = False


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How many of these workers the Dask scheduler needs.

    Attributes
    ----------
    jobs : int
        Jobs that would have something to do.
    seconds : float
        How long the work that is known will take with the workers that are there; infinite without any.
    """

    jobs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows, in jobs.

    Attributes
    ----------
    minimum, maximum : int
        Equal for a fixed size.
    fixed : bool
        The user set the size: it counts at once, whatever the scheduler needs.
    backlog : int or None
        Jobs that may wait in the queue at a time.
    idle_timeout : float or None
        How long an idle job is kept; None: as long as it would take to get another one, 5 s to 30 s.
    gpu_seconds : float or None
        The budget.
    gpus_per_job : int
    """

    minimum: int = 0
    maximum: int
    fixed: bool = False
    backlog: int | None = None
    idle_timeout: float | None = None
    gpu_seconds: float | None = None
    gpus_per_job: int = 1


@dataclass(frozen=True, kw_only=True)
class History:
    """Events so far.

    Attributes
    ----------
    waits : sequence of float
        How long earlier jobs waited in the queue, oldest first.
    gpu_seconds : float
        What was used of the budget.
    uncounted : bool
        A job has ended, and it is not known yet whether that was a failure.
    paused : str
        Why nothing is submitted any more; empty if something may be.
    next_try : float
        No submit before this time: the batch system refused one, or a job failed, shortly before.
    full : str
        The queue's words while the site accepts no more jobs; empty otherwise.
    """

    waits: Sequence[float] = ()
    gpu_seconds: float = 0.0
    uncounted: bool = False
    paused: str = ""
    next_try: float = 0.0
    full: str = ""


@dataclass(frozen=True)
class Hysteresis:
    """What one decision passes on to the next.

    Attributes
    ----------
    surplus_since : float or None
        Since when there have been more jobs than needed.
    """

    surplus_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do.

    Attributes
    ----------
    target : int
        The number of jobs that the group should have.
    submit : int
        Jobs to request.
    cancel : tuple of str
        Pending jobs to cancel, only while they are still pending.
    retire : tuple of str
        Running jobs to drain: they end when their workers have finished and their data has moved.
    reason : str
        Why, in words.
    hysteresis : Hysteresis
    over : bool
        The budget is used up: jobs end at once.
    """

    target: int
    submit: int = 0
    cancel: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    reason: str
    hysteresis: Hysteresis = Hysteresis()
    over: bool = False

    @property
    def acts(self) -> bool:
        """Whether it changes anything."""
        return bool(self.submit or self.cancel or self.retire)


def expected_wait(waits: Sequence[float], jobs: Iterable[JobView], now: float) -> float | None:
    """Return how long a job that is submitted now would wait.

    It is the median of the last ten waits, and at least that of the oldest pending job.

    None when nothing is known.
    """
    known = [
        *([statistics.median(waits[-_RECENT_WAITS:])] if waits else []),
        *(now - job.submitted for job in jobs if job.pending),
    ]
    return max(known) if known and waits else None


def keep_time(limits: Limits, wait: float | None) -> float:
    """Return how long a job without work is kept: keeping it must not cost more than waiting for a new one."""
    if limits.idle_timeout is not None:
        return limits.idle_timeout
    return _KEEP_MOST if wait is None else min(_KEEP_MOST, max(_KEEP_LEAST, wait))


def decide(
    jobs: Sequence[JobView],
    demand: Demand,
    limits: Limits,
    history: History,
    hysteresis: Hysteresis = Hysteresis(),
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
        That of the decision before.
    now : float

    Returns
    -------
    Decision
    """
    staying = [job for job in jobs if not job.retiring]
    wait = expected_wait(history.waits, staying, now)
    if limits.gpu_seconds is not None:
        left = limits.gpu_seconds - history.gpu_seconds
        burning = limits.gpus_per_job * sum(not job.pending for job in jobs)
        if left <= burning * _BUDGET_MARGIN:
            why = (
                f"the budget of {counted(limits.gpu_seconds / 3600, 'GPU hour')} is used up "
                f"({history.gpu_seconds / 3600:.2f} used)"
            )
            cancel, retire = _parted(staying)
            return Decision(target=0, cancel=cancel, retire=retire, reason=why, over=True)
    # A job that ends before a replacement could start does not count, so that the replacement is submitted in time.
    lasting = [job for job in staying if job.leaves is None or job.leaves - (wait or 0.0) > now]
    holders = 0 if limits.fixed else _holders(jobs, lasting)
    wish, why = _wish(demand, limits)
    if holders > wish:
        wish = max(wish, min(holders, limits.maximum))
        why += f"; {counted(holders, 'job')} needed to hold {_what_is_wanted(jobs)}"
    if wish > len(lasting):
        for_data = min(holders, wish) - len(lasting)
        submit, why_not = _submit(wish - len(lasting), for_data, staying, demand, limits, history, wait, now=now)
        leaving = len(staying) - len(lasting)
        reason = f"{why}; {_existing(staying)}" + (f", {leaving} to be replaced" if leaving else "")
        return Decision(
            target=wish, submit=submit, reason=reason + (f"; {why_not}" if why_not else f"; submitting {submit}")
        )
    if limits.fixed:
        chosen = staying if wish == 0 else sorted(lasting, key=_dispensable)[: len(lasting) - wish]
        cancel, retire = _parted(chosen)
        reason = f"{why}; {_existing(staying)}" + (f", releasing {len(chosen)}" if chosen else "")
        return Decision(target=wish, cancel=cancel, retire=retire, reason=reason)
    surplus = len(lasting) - wish
    if surplus <= 0:
        return Decision(target=wish, reason=f"{why}; {_existing(staying)}")
    return _shrink(surplus, wish, why, jobs, lasting, limits, hysteresis, keep_time(limits, wait), now)


def _wish(demand: Demand, limits: Limits) -> tuple[int, str]:
    if limits.fixed:
        return limits.maximum, f"the size is set to {counted(limits.maximum, 'job')}"
    wish = max(limits.minimum, min(limits.maximum, demand.jobs))
    why = f"there is work for {counted(demand.jobs, 'job')}" if demand.jobs else "there is no work"
    if wish != demand.jobs:
        why += f", {'minimum' if wish > demand.jobs else 'maximum'} is {wish}"
    return wish, why


def _holders(jobs: Sequence[JobView], lasting: Sequence[JobView]) -> int:
    """Return how many jobs are needed for the data that is still wanted, and for actors: as few as can hold it.

    Parameters
    ----------
    jobs : sequence of JobView
        All that have not ended: also those that leave hold data.
    lasting : sequence of JobView
        Those that stay.
    """
    wanted, stay = sum(job.wanted for job in jobs), {job.name for job in lasting}
    # Jobs that end are counted last, in place of their replacements.
    models = sorted(
        (job for job in jobs if job.memory), key=lambda job: (job.name not in stay, not job.actors, -job.memory)
    )
    count, space = 0, 0.0
    for job in models:
        if space * _HOLD_SHARE >= wanted and not (job.name in stay and job.actors):
            break
        count, space = count + 1, space + job.memory
    return count


def _existing(jobs: Sequence[JobView]) -> str:
    return f"{counted(len(jobs), 'job')} {'exists' if len(jobs) == 1 else 'exist'}"


def _what_is_wanted(jobs: Sequence[JobView]) -> str:
    """Return what the jobs hold that is still needed, in words."""
    wanted, actors = sum(job.wanted for job in jobs), sum(job.actors for job in jobs)
    parts = [f"{_amount(wanted)} of data that clients still need"] if wanted else []
    if actors:
        parts.append(counted(actors, "actor"))
    return " and ".join(parts)


def _amount(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _dispensed(
    idle: Iterable[JobView], jobs: Sequence[JobView], lasting: Sequence[JobView], most: int
) -> list[JobView]:
    """Return the idle jobs to release, `most` at most.

    Jobs with actors stay, and jobs whose wanted data the others could not hold.
    """
    wanted = sum(job.wanted for job in jobs)
    staying, gone = {job.name: job.memory for job in lasting}, list[JobView]()
    for job in sorted(idle, key=lambda job: (job.wanted, _dispensable(job))):
        space = sum(memory for name, memory in staying.items() if name != job.name)
        if len(gone) < most and not job.actors and (not wanted or space * _HOLD_SHARE >= wanted):
            gone.append(job)
            del staying[job.name]
    return gone


def _submit(
    missing: int,
    for_data: int,
    staying: Sequence[JobView],
    demand: Demand,
    limits: Limits,
    history: History,
    wait: float | None,
    *,
    now: float,
) -> tuple[int, str]:
    """Return how many jobs to request, and the reason if none.

    `for_data` of the missing jobs replace jobs that hold wanted data.
    """
    if history.paused:
        return 0, f"paused: {history.paused}"
    if history.uncounted:
        return 0, "a job has ended, and hpcgpu first queries the scheduler"
    if history.full:
        return 0, f"the site accepts no more jobs now: {history.full}"
    if now < history.next_try:
        return 0, f"next submit in {history.next_try - now:.0f} s, after a failure"
    pending = sum(job.pending for job in staying)
    if limits.backlog is not None and not limits.fixed:
        missing = min(missing, limits.backlog - pending)
        if missing <= 0:
            return 0, f"{counted(pending, 'job')} already pending (backlog={limits.backlog})"
    if limits.gpu_seconds is not None:
        affordable = math.floor((limits.gpu_seconds - history.gpu_seconds) / (max(1, limits.gpus_per_job) * _USEFUL))
        missing = min(missing, affordable - len(staying))
        if missing <= 0:
            return 0, f"the budget of {counted(limits.gpu_seconds / 3600, 'GPU hour')} is too small for another job"
    running = sum(job.workers > 0 for job in staying)
    if not limits.fixed and len(staying) >= limits.minimum and running and wait is not None and wait > demand.seconds:
        if for_data > 0:
            return min(missing, for_data), ""
        return 0, f"the work ends in {demand.seconds:.0f} s, but a new job would wait about {wait:.0f} s"
    return missing, ""


def _shrink(
    surplus: int,
    wish: int,
    why: str,
    jobs: Sequence[JobView],
    lasting: Sequence[JobView],
    limits: Limits,
    hysteresis: Hysteresis,
    keep: float,
    now: float,
) -> Decision:
    """Release jobs that have been surplus for long enough.

    Pending jobs go first, then idle ones that no wanted data needs.
    """
    since = min(now, hysteresis.surplus_since) if hysteresis.surplus_since is not None else now
    pending = sorted((job for job in lasting if job.pending), key=_dispensable)
    waiting = now - since < keep
    if pending and waiting:
        surplus_for = f"{surplus} more than needed for {now - since:.0f} s, to be released after {keep:.0f} s"
        reason = f"{why}; {_existing(lasting)}; {surplus_for}"
        return Decision(target=wish, reason=reason, hysteresis=Hysteresis(since))
    cancel = pending[:surplus]
    idle = [
        job for job in lasting if job.idle_since is not None and now - job.idle_since >= keep and not job.processing
    ]
    retire = _dispensed(idle, jobs, lasting, surplus - len(cancel))
    reason = f"{why}; {_existing(lasting)}"
    if cancel:
        reason += f"; cancelling {counted(len(cancel), 'pending job')}"
    if retire:
        reason += f"; draining {counted(len(retire), 'job')} idle for {keep:.0f} s"
    if not cancel and not retire:
        reason += (
            "; no idle job can end: the others cannot hold its data" if idle else "; no job is idle for long enough"
        )
    return Decision(
        target=wish,
        cancel=tuple(job.name for job in cancel),
        retire=tuple(job.name for job in retire),
        reason=reason,
        hysteresis=Hysteresis(since),
    )


def _dispensable(job: JobView) -> tuple[bool, bool, bool, bool, float, int, int, float, float]:
    """Sort key: the job that costs least is released first.

    Pending jobs, youngest first; then those whose workers have not connected yet; then idle ones, longest idle first,
    fewest bytes, least walltime left; then those with the fewest tasks. Jobs with actors come last, as actors cannot
    move.
    """
    return (
        not job.pending,
        job.workers > 0,
        job.actors > 0,
        job.idle_since is None,
        job.idle_since or 0.0,
        job.processing,
        job.nbytes,
        job.leaves if job.leaves is not None else math.inf,
        -job.submitted,
    )


def _parted(jobs: Iterable[JobView]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the pending ones of these jobs, and of the others."""
    given = tuple(jobs)
    return tuple(j.name for j in given if j.pending), tuple(j.name for j in given if not j.pending)
