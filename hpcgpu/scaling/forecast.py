"""Estimates for waits in the queue and for the known work. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from hpcgpu.scaling.policy_data import Demand, JobView

#: Number of recent jobs in an estimate.
_RECENT = 10


def expected_wait(waits: Sequence[float], jobs: Iterable[JobView], now: float) -> float | None:
    """Return how long a job that is submitted now would wait.

    It is the median of the last ten waits, but not less than the present wait of the oldest pending job.

    None when nothing is known.
    """
    known = [
        *([usual] if (usual := usual_wait(waits)) is not None else []),
        *(now - job.submitted for job in jobs if job.pending),
    ]
    return max(known) if known and waits else None


def usual_wait(waits: Sequence[float]) -> float | None:
    """Return how long recent jobs waited: the median of the last ten waits. None before the first."""
    return statistics.median(waits[-_RECENT:]) if waits else None


def expected_startup(startups: Sequence[float]) -> float | None:
    """Return how long a job runs before its workers are connected; None when nothing is known."""
    return statistics.median(startups[-_RECENT:]) if startups else None


def work_left(demand: Demand, connected: float, after: float) -> float:
    """Return how much of the waiting work will not have begun after a given time, in seconds of one job.

    Parameters
    ----------
    demand : Demand
    connected : float
        Jobs that work on it. Their threads become free one after the other, because their tasks began at different
        times.
    after : float
        Seconds.
    """
    if not connected:
        return demand.waiting
    runs = max(0.0, demand.seconds - demand.waiting / connected)
    freed = min(1.0, after / runs) if runs else 1.0
    return demand.waiting - connected * freed * max(demand.task, after - min(runs, after) / 2)
