"""How long a job without work is kept, as the gaps between work so far teach it. Pure functions.

A job that is kept through a gap costs its GPUs for that time. One that is released costs a start when work comes
again, and the work takes longer. Which is cheaper depends on how long the gaps are: they are remembered for a first
job, for a second one, and so on, as work for one job may be there all the time, and work for sixteen once an hour.

The last job has a price of its own. While others work, the work that comes takes a little longer without it. Without
any, somebody waits for the queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Gap",
    "Standstill",
    "cost_of_last",
    "cost_of_start",
    "delay",
    "few",
    "interrupted",
    "keep_time",
    "observe",
    "observe_standstill",
]

#: Gaps that are remembered.
_RECENT = 10
#: A gap is expected to be up to this much longer than one before.
_LONGER = 1.25
#: A job is kept for this time at least: one reading of the load may be wrong.
_LEAST = 1.0
#: And for this time while no gap has ended: a program often computes for a moment between two pieces of work.
#: distributed's Adaptive waits as long: three looks, one second apart.
_FIRST = 2.0
#: Where a person works, the last job is kept for the first time, and others for the second, until this number of gaps
#: is known: people read and think, and one short pause says nothing of the next.
_FIRST_OF_A_PERSON = 300.0
_FIRST_OF_A_PERSON_OTHERS = 60.0
_PAUSES_OF_A_PERSON = 3
#: A job is kept at least for this share of what a start costs, because the last gaps do not show how long a rare pause
#: is. For the last job this holds from the beginning, for the others once a gap has ended.
_LEAST_SHARE = 0.05
#: A second for which a job is missing costs as much as this many seconds of it: the others work on, so that the work
#: takes a little longer. No start costs more than the second number, however long the queue is.
_PRICE_OF_MISSING = 0.1
_DEAREST_START = 300.0
#: A second by which all work is late, because no worker runs, costs as much as this many seconds of a job.
#: No start costs more than the second number.
_PRICE_OF_DELAY = 1.0
_DEAREST_LAST_START = 1800.0


@dataclass(frozen=True)
class Gap:
    """When there was no work for a job of this rank.

    Attributes
    ----------
    since : float or None
        Since when there has been none; None while there is.
    earlier : tuple of float
        How long it lasted before, oldest first.
    """

    since: float | None = None
    earlier: tuple[float, ...] = ()


@dataclass(frozen=True)
class Standstill:
    """When there was work and no worker.

    Attributes
    ----------
    since : float or None
        Since when it has been so; None while it is not.
    jobs : int
        Jobs that have work meanwhile.
    earlier : tuple of float
        How much earlier all work would have been done with one job there, oldest first. This is the length of the
        standstill, divided by the number of jobs that had work: one job would have done its share.
    """

    since: float | None = None
    jobs: int = 0
    earlier: tuple[float, ...] = ()


def observe(gaps: Sequence[Gap], needed: int, jobs: int, *, now: float) -> tuple[Gap, ...]:
    """Take note of how many jobs are needed now.

    Parameters
    ----------
    gaps : sequence of Gap
        What was known, by rank.
    needed : int
        Jobs that have work.
    jobs : int
        Jobs that there are.
    now : float
    """
    known = [*gaps, *[Gap()] * (max(needed, jobs) - len(gaps))]
    return tuple(_ended(gap, now) if rank < needed else _begun(gap, now) for rank, gap in enumerate(known))


def observe_standstill(past: Standstill, needed: int, workers: bool, *, now: float) -> Standstill:
    """Take note of whether work waits because no worker is connected.

    Parameters
    ----------
    past : Standstill
        What was known.
    needed : int
        Jobs that have work.
    workers : bool
        Whether there are any.
    now : float
    """
    since = past.since
    if needed and not workers:
        return Standstill(now if since is None else min(now, since), max(past.jobs, needed), past.earlier)
    if since is None or not workers:
        return Standstill(earlier=past.earlier)
    return Standstill(earlier=(*past.earlier, max(0.0, now - since) / past.jobs)[-_RECENT:])


def interrupted(gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """Return the gaps without those that go on: it is not known whether there is work now."""
    return tuple(Gap(None, gap.earlier) for gap in gaps)


def _begun(gap: Gap, now: float) -> Gap:
    """Return a gap that begins now, or that goes on."""
    return Gap(now if gap.since is None else min(now, gap.since), gap.earlier)


def _ended(gap: Gap, now: float) -> Gap:
    """Return a gap that has ended, if there was one."""
    if gap.since is None:
        return gap
    return Gap(None, (*gap.earlier, max(0.0, now - gap.since))[-_RECENT:])


def cost_of_start(startup: float, wait: float | None) -> float:
    """Return what it costs to release a job that is not the last one, and to get it back, in seconds of a job.

    Parameters
    ----------
    startup : float
        Seconds for which a job runs before its workers are there.
    wait : float or None
        Seconds from a submit until then, if known.
    """
    return min(_DEAREST_START, startup + _PRICE_OF_MISSING * (wait or 0.0))


def cost_of_last(startup: float, late: float) -> float:
    """Return what it costs to release the last job and to get another one later, in seconds of a job.

    Parameters
    ----------
    startup : float
        Seconds for which a job runs before its workers are there.
    late : float
        Seconds by which all work is late then.
    """
    return min(_DEAREST_LAST_START, startup + _PRICE_OF_DELAY * late)


def delay(standstill: Standstill, wait: float | None) -> float:
    """Return by how many seconds all work is late if the last job is released before it comes.

    This is the median of the last times. Before the first time, or if jobs come sooner by now, it is the wait of a job.
    """
    known = [
        *([statistics.median(standstill.earlier)] if standstill.earlier else []),
        *([] if wait is None else [wait]),
    ]
    return min(known, default=0.0)


def few(earlier: Sequence[float]) -> bool:
    """Whether these gaps are too few to say how long the pauses of a person are."""
    return len(earlier) < _PAUSES_OF_A_PERSON


def keep_time(earlier: Sequence[float], start: float, *, last: bool = False, interactive: bool = False) -> float:
    """Return for how long a job without work is kept: what would have cost least in the gaps so far.

    Parameters
    ----------
    earlier : sequence of float
        Seconds that gaps lasted.
    start : float
        What a new start costs, in seconds of a job.
    last : bool, default False
        Whether no job is left without it.
    interactive : bool, default False
        Whether a person works.
    """
    least = _LEAST_SHARE * start
    if interactive and few(earlier):
        least = max(least, _FIRST_OF_A_PERSON if last else _FIRST_OF_A_PERSON_OTHERS)
    if not earlier:
        return max(_FIRST, least) if last or interactive else _FIRST

    def cost(keep: float) -> float:
        return sum(gap if gap <= keep else keep + start for gap in earlier)

    return max(_LEAST, least, min((0.0, *(_LONGER * gap for gap in earlier)), key=lambda keep: (cost(keep), keep)))
