"""How long a job without work is kept, as the gaps between work so far teach it. Pure functions.

A job that is kept through a gap costs its GPUs for that time. One that is released costs a start when work comes
again, and somebody waits for it. Which is cheaper depends on how long the gaps are: they are remembered for a first
job, for a second one, and so on, as work for one job may be there all the time, and work for sixteen once an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Gap", "cost_of_start", "interrupted", "keep_time", "observe"]

#: Gaps that are remembered.
_RECENT = 10
#: A gap is expected to be up to this much longer than one before.
_LONGER = 1.25
#: A job is kept for this time at least: one reading of the load may be wrong.
_LEAST = 1.0
#: And for this share of what a start costs, once a gap has ended: the last gaps say little of a pause that is rare.
_LEAST_SHARE = 0.05
#: And for this time while no gap has ended: a program often computes for a moment between two pieces of work.
_FIRST = 3.0
#: A second for which somebody waits costs as much as this many seconds of a job.
_PRICE_OF_WAITING = 0.1
#: No start costs more than this many seconds of a job, however long the queue is.
_DEAREST_START = 300.0


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
    return tuple(
        _with_work(gap, now) if rank < needed else Gap(now if gap.since is None else min(now, gap.since), gap.earlier)
        for rank, gap in enumerate(known)
    )


def interrupted(gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """Return the gaps without those that go on: it is not known whether there is work now."""
    return tuple(Gap(None, gap.earlier) for gap in gaps)


def _with_work(gap: Gap, now: float) -> Gap:
    """Return a gap that has ended, if there was one."""
    if gap.since is None:
        return gap
    return Gap(None, (*gap.earlier, max(0.0, now - gap.since))[-_RECENT:])


def cost_of_start(startup: float, wait: float | None) -> float:
    """Return what it costs to release a job and to get another one later, in seconds of a job.

    Parameters
    ----------
    startup : float
        Seconds for which a job runs before its workers are there.
    wait : float or None
        Seconds from a submit until then, if known.
    """
    return min(_DEAREST_START, startup + _PRICE_OF_WAITING * (wait or 0.0))


def keep_time(earlier: Sequence[float], start: float) -> float:
    """Return for how long a job without work is kept: what would have cost least in the gaps so far.

    Parameters
    ----------
    earlier : sequence of float
        Seconds that gaps lasted.
    start : float
        What a new start costs, in seconds of a job.
    """
    if not earlier:
        return _FIRST

    def cost(keep: float) -> float:
        return sum(gap if gap <= keep else keep + start for gap in earlier)

    least = max(_LEAST, _LEAST_SHARE * start)
    return max(least, min((0.0, *(_LONGER * gap for gap in earlier)), key=lambda keep: (cost(keep), keep)))
