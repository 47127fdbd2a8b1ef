"""How long a job without work is kept, learned from earlier gaps between work. Pure functions.

The job may run, or be pending in the queue. Which job is released then is in `hpcgpu.scaling.adaptive_policy`.

A job that is kept through a gap costs its GPUs for that time. A job that is released costs a new start when work comes
again, and the work takes longer. Which is cheaper depends on the length of the gaps. The gaps are recorded separately
for a first job, for a second job, and so on: there may always be work for one job, but work for sixteen only once an
hour.

The last job has its own price. If other jobs still run, new work only takes a little longer without the released job.
If no job runs, somebody waits for the queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: How many gaps are kept.
_RECENT = 10
#: A gap is expected to be up to this much longer than one before.
_LONGER = 1.25
#: A job is kept for at least this time: one reading of the load may be wrong.
_LEAST = 1.0
#: A job is kept for at least this time until a first gap has ended: a program often computes for a moment between two
#: pieces of work. distributed's Adaptive waits as long: three checks, one second apart.
_FIRST = 2.0
#: If a person works with the cluster: the least time for the last job, the least time for other jobs, and the number of
#: gaps after which these times do not hold any more. People read and think, and one short pause does not predict the
#: next.
_FIRST_OF_A_PERSON = 300.0
_FIRST_OF_A_PERSON_OTHERS = 60.0
_PAUSES_OF_A_PERSON = 3
#: A job is kept for at least this share of the cost of a start, because the last gaps do not show how long a rare pause
#: is. For the last job this holds from the beginning, for other jobs after the first gap has ended.
_LEAST_SHARE = 0.05
#: A second without a job costs as much as this many seconds of the job: the other jobs continue, so that the work only
#: takes a little longer. No start costs more than the second number, also if the queue is very long.
_PRICE_OF_MISSING = 0.1
_DEAREST_START = 300.0
#: If no worker runs, a second by which all work is late costs as much as this many seconds of a job.
#: No start costs more than the second number.
_PRICE_OF_DELAY = 1.0
_DEAREST_LAST_START = 1800.0


@dataclass(frozen=True)
class Gap:
    """When there was no work for a job of this rank.

    Attributes
    ----------
    since : float or None
        Since when there is no work; None while there is work.
    earlier : tuple of float
        The lengths of earlier gaps, oldest first.
    """

    since: float | None = None
    earlier: tuple[float, ...] = ()


@dataclass(frozen=True)
class Standstill:
    """When there was work and no worker.

    Attributes
    ----------
    since : float or None
        Since when work waits without a worker; None if it does not.
    jobs : int
        The number of jobs for which there is work meanwhile.
    earlier : tuple of float
        For each earlier standstill, oldest first: how much earlier all work would have been done with one job running.
        This is the length of the standstill, divided by the number of jobs that had work: one job would have done its
        share.
    """

    since: float | None = None
    jobs: int = 0
    earlier: tuple[float, ...] = ()


def observe(gaps: Sequence[Gap], needed: int, jobs: int, *, now: float) -> tuple[Gap, ...]:
    """Record how many jobs are needed now.

    Parameters
    ----------
    gaps : sequence of Gap
        The record so far, by rank.
    needed : int
        Jobs that have work.
    jobs : int
        Jobs that exist.
    now : float
    """
    known = [*gaps, *[Gap()] * (max(needed, jobs) - len(gaps))]
    return tuple(_ended(gap, now) if rank < needed else _begun(gap, now) for rank, gap in enumerate(known))


def observe_standstill(past: Standstill, needed: int, workers: bool, *, now: float) -> Standstill:
    """Record whether work waits because no worker is connected.

    Parameters
    ----------
    past : Standstill
        The record so far.
    needed : int
        Jobs that have work.
    workers : bool
        Whether any worker is connected.
    now : float
    """
    since = past.since
    if needed and not workers:
        return Standstill(now if since is None else min(now, since), max(past.jobs, needed), past.earlier)
    if since is None or not workers:
        return Standstill(earlier=past.earlier)
    return Standstill(earlier=(*past.earlier, max(0.0, now - since) / past.jobs)[-_RECENT:])


def interrupted(gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """Return the gaps without those that have not ended: it is not known whether there is work now."""
    return tuple(Gap(None, gap.earlier) for gap in gaps)


def _begun(gap: Gap, now: float) -> Gap:
    """Return a gap that begins now, or that continues."""
    return Gap(now if gap.since is None else min(now, gap.since), gap.earlier)


def _ended(gap: Gap, now: float) -> Gap:
    """Return a gap that has ended, if there was one."""
    if gap.since is None:
        return gap
    return Gap(None, (*gap.earlier, max(0.0, now - gap.since))[-_RECENT:])


def cost_of_start(startup: float, wait: float | None) -> float:
    """Return the cost of releasing a job that is not the last one and of getting it back, in seconds of a job.

    Parameters
    ----------
    startup : float
        Seconds for which a job runs before its workers are connected.
    wait : float or None
        Seconds from the submit until its workers are connected, if known.
    """
    return min(_DEAREST_START, startup + _PRICE_OF_MISSING * (wait or 0.0))


def cost_of_last(startup: float, late: float) -> float:
    """Return the cost of releasing the last job and of getting another one later, in seconds of a job.

    Parameters
    ----------
    startup : float
        Seconds for which a job runs before its workers are connected.
    late : float
        Seconds by which all work is then late.
    """
    return min(_DEAREST_LAST_START, startup + _PRICE_OF_DELAY * late)


def delay(standstill: Standstill, wait: float | None) -> float:
    """Return by how many seconds all work is late if the last job is released before the work comes.

    This is the median of the last delays. Before the first delay, or if jobs now start sooner, it is the wait of a job.
    """
    known = [
        *([statistics.median(standstill.earlier)] if standstill.earlier else []),
        *([] if wait is None else [wait]),
    ]
    return min(known, default=0.0)


def too_few_gaps(earlier: Sequence[float]) -> bool:
    """Whether these gaps are too few to estimate the pauses of a person."""
    return len(earlier) < _PAUSES_OF_A_PERSON


def keep_time(earlier: Sequence[float], start: float, *, last: bool = False, interactive: bool = False) -> float:
    """Return for how long a job without work is kept: the time that would have cost least in the gaps so far.

    Parameters
    ----------
    earlier : sequence of float
        Seconds that the gaps lasted.
    start : float
        The cost of a new start, in seconds of a job.
    last : bool, default False
        Whether it is the last job.
    interactive : bool, default False
        Whether a person works with the cluster.
    """
    least = _LEAST_SHARE * start
    if interactive and too_few_gaps(earlier):
        least = max(least, _FIRST_OF_A_PERSON if last else _FIRST_OF_A_PERSON_OTHERS)
    if not earlier:
        return max(_FIRST, least) if last or interactive else _FIRST

    def cost(keep: float) -> float:
        return sum(gap if gap <= keep else keep + start for gap in earlier)

    return max(_LEAST, least, min((0.0, *(_LONGER * gap for gap in earlier)), key=lambda keep: (cost(keep), keep)))
