"""How many jobs a group of workers should have, and which to give up: state in, decision out. No I/O, no clock.

A fixed size (`scale`) and an adaptive one (`adapt`) are decided here alike. Times are epoch seconds, durations seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

#: An idle job is kept at least so long, where `idle_timeout` is not given.
_KEEP_LEAST = 5.0
#: ... and at most so long.
_KEEP_MOST = 30.0
#: A job must be able to run so long before a budget of GPU hours ends, or it is not worth its start.
_USEFUL = 300.0
#: Jobs begin to retire so long before the budget ends.
_BUDGET_MARGIN = 30.0
#: Share of the memory of the jobs that stay which wanted data may fill. From 60 % on another job is wished for.
_HOLD_SHARE = 0.5
#: So many waits are remembered in an estimate.
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
        From when on another job is needed in its place: its walltime ends, or workers of it are lost for good. None if that is not so.
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
        Since when all its workers are there and have nothing to do.
    retiring : bool
        Whether it was chosen to be given up already.
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
    """What the Dask scheduler wishes for these workers.

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
        The user set the size: it is brought about at once, whatever the scheduler wishes.
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
    """What has happened so far.

    Attributes
    ----------
    waits : sequence of float
        How long earlier jobs waited in the queue, oldest first.
    gpu_seconds : float
        What was used of the budget.
    paused : str
        Why nothing is submitted any more; empty while it is not so.
    next_try : float
        No submit before this time: the batch system refused one, or a job failed, shortly before.
    full : str
        The site's own words when it lets nobody have more jobs now; empty while it does.
    """

    waits: Sequence[float] = ()
    gpu_seconds: float = 0.0
    paused: str = ""
    next_try: float = 0.0
    full: str = ""


@dataclass(frozen=True)
class Hysteresis:
    """What one decision leaves for the next.

    Attributes
    ----------
    surplus_since : float or None
        Since when there have been more jobs than wished.
    """

    surplus_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do.

    Attributes
    ----------
    target : int
        Jobs that there should be.
    submit : int
        Jobs to ask for.
    cancel : tuple of str
        Waiting jobs to cancel, only while they still wait.
    retire : tuple of str
        Running jobs to give up once their workers have finished and their data has moved.
    reason : str
        Why, in words.
    hysteresis : Hysteresis
    over : bool
        The budget is used up: nothing is waited for.
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
    """Return how long a job that is submitted now would wait: the median of the last ten, and no less than the oldest that still waits.

    None when nothing is known.
    """
    known = [*([statistics.median(waits[-_RECENT_WAITS:])] if waits else []), *(now - job.submitted for job in jobs if job.pending)]
    return max(known) if known and waits else None


def keep_time(limits: Limits, wait: float | None) -> float:
    """Return how long a job without work is kept: it shall not cost more than to wait for another one would."""
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
            why = f"the budget of {limits.gpu_seconds / 3600:g} GPU hours is used up ({history.gpu_seconds / 3600:.2f})"
            cancel, retire = _parted(staying)
            return Decision(target=0, cancel=cancel, retire=retire, reason=why, over=True)
    # Who leaves before a replacement could be there is not counted, so that the replacement is asked for in time.
    lasting = [job for job in staying if job.leaves is None or job.leaves - (wait or 0.0) > now]
    holders = 0 if limits.fixed else _holders(jobs, lasting)
    wish, why = _wish(demand, limits)
    if holders > wish:
        wish = max(wish, min(holders, limits.maximum))
        why += f"; {_what_is_wanted(jobs)}: kept on {holders} job{'s' * (holders > 1)}"
    if wish > len(lasting):
        for_data = min(holders, wish) - len(lasting)
        submit, why_not = _submit(wish - len(lasting), for_data, staying, demand, limits, history, wait, now=now)
        leaving = len(staying) - len(lasting)
        reason = f"{why}; {len(staying)} there" + (f", {leaving} of them to be replaced" if leaving else "")
        return Decision(target=wish, submit=submit, reason=reason + (f"; {why_not}" if why_not else f"; asking for {submit}"))
    if limits.fixed:
        chosen = staying if wish == 0 else sorted(lasting, key=_dispensable)[: len(lasting) - wish]
        cancel, retire = _parted(chosen)
        reason = f"{why}; {len(staying)} there" + (f", giving up {len(chosen)}" if chosen else "")
        return Decision(target=wish, cancel=cancel, retire=retire, reason=reason)
    surplus = len(lasting) - wish
    if surplus <= 0:
        return Decision(target=wish, reason=f"{why}; {len(staying)} there")
    return _shrink(surplus, wish, why, jobs, lasting, limits, hysteresis, keep_time(limits, wait), now)


def _wish(demand: Demand, limits: Limits) -> tuple[int, str]:
    if limits.fixed:
        return limits.maximum, f"{limits.maximum} jobs are asked for"
    wish = max(limits.minimum, min(limits.maximum, demand.jobs))
    why = f"there is work for {demand.jobs} jobs" if demand.jobs else "there is no work"
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
    # What leaves is counted last, in place of the job that is to come for it.
    models = sorted((job for job in jobs if job.memory), key=lambda job: (job.name not in stay, not job.actors, -job.memory))
    count, room = 0, 0.0
    for job in models:
        if room * _HOLD_SHARE >= wanted and not (job.name in stay and job.actors):
            break
        count, room = count + 1, room + job.memory
    return count


def _what_is_wanted(jobs: Sequence[JobView]) -> str:
    """Return what jobs are kept for, in words."""
    wanted, actors = sum(job.wanted for job in jobs), sum(job.actors for job in jobs)
    parts = [f"{_amount(wanted)} that clients still want"] if wanted else []
    if actors:
        parts.append(f"{actors} actor{'s' * (actors > 1)}")
    return " and ".join(parts)


def _amount(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _dispensed(idle: Iterable[JobView], jobs: Sequence[JobView], lasting: Sequence[JobView], most: int) -> list[JobView]:
    """Return which idle jobs go, `most` at most: none that has actors, nor one whose wanted data the others could not hold."""
    wanted = sum(job.wanted for job in jobs)
    staying, gone = {job.name: job.memory for job in lasting}, list[JobView]()
    for job in sorted(idle, key=lambda job: (job.wanted, _dispensable(job))):
        room = sum(memory for name, memory in staying.items() if name != job.name)
        if len(gone) < most and not job.actors and (not wanted or room * _HOLD_SHARE >= wanted):
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
    """Return how many jobs to request, and why none if none; `for_data` of the missing ones replace jobs that hold wanted data."""
    if history.paused:
        return 0, f"paused: {history.paused}"
    if history.full:
        return 0, f"the site allows no more now: {history.full}"
    if now < history.next_try:
        return 0, f"waiting {history.next_try - now:.0f} s after a failure"
    pending = sum(job.pending for job in staying)
    if limits.backlog is not None and not limits.fixed:
        missing = min(missing, limits.backlog - pending)
        if missing <= 0:
            return 0, f"{pending} wait already (backlog {limits.backlog})"
    if limits.gpu_seconds is not None:
        affordable = math.floor((limits.gpu_seconds - history.gpu_seconds) / (max(1, limits.gpus_per_job) * _USEFUL))
        missing = min(missing, affordable - len(staying))
        if missing <= 0:
            return 0, f"the budget of {limits.gpu_seconds / 3600:g} GPU hours has no room for another"
    running = sum(job.workers > 0 for job in staying)
    if not limits.fixed and len(staying) >= limits.minimum and running and wait is not None and wait > demand.seconds:
        if for_data > 0:
            return min(missing, for_data), ""
        return 0, f"the work will be done in {demand.seconds:.0f} s, a job waits about {wait:.0f} s"
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
    """Give up what has been too much for long enough: waiting jobs first, then idle ones that the wanted data does not need."""
    since = min(now, hysteresis.surplus_since) if hysteresis.surplus_since is not None else now
    pending = sorted((job for job in lasting if job.pending), key=_dispensable)
    patient = now - since < keep
    if pending and patient:
        reason = f"{why}; {len(lasting)} there; {surplus} too many for {now - since:.0f} s, kept for {keep:.0f} s"
        return Decision(target=wish, reason=reason, hysteresis=Hysteresis(since))
    cancel = pending[:surplus]
    idle = [job for job in lasting if job.idle_since is not None and now - job.idle_since >= keep and not job.processing]
    retire = _dispensed(idle, jobs, lasting, surplus - len(cancel))
    reason = f"{why}; {len(lasting)} there"
    if cancel:
        reason += f"; cancelling {len(cancel)} that wait"
    if retire:
        reason += f"; giving up {len(retire)} that had nothing to do for {keep:.0f} s"
    if not cancel and not retire:
        reason += "; none of them can go without its data" if idle else "; none of them idle for long enough"
    return Decision(
        target=wish,
        cancel=tuple(job.name for job in cancel),
        retire=tuple(job.name for job in retire),
        reason=reason,
        hysteresis=Hysteresis(since),
    )


def _dispensable(job: JobView) -> tuple[bool, bool, bool, bool, float, int, int, float, float]:
    """Sort key: what is given up first costs least.

    Waiting jobs, youngest first; then those whose workers are not there yet; then idle ones, longest idle first, fewest bytes, least
    walltime left; then those with the fewest tasks. Jobs with actors last: they can hardly go.
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
    """Return the names of those of these jobs that wait, and of the others."""
    given = tuple(jobs)
    return tuple(j.name for j in given if j.pending), tuple(j.name for j in given if not j.pending)
