"""When workers leave a job whose walltime ends. Pure; used by the manager and inside jobs."""

from __future__ import annotations

__all__ = ["margin"]

#: Bytes per second at which data is reckoned to move to other workers: a slow network's.
_MOVING_RATE = 100e6


def margin(walltime: float, asked: float | None = None, nbytes: int = 0) -> float:
    """Return how many seconds before the end of its walltime a job's workers begin to retire.

    Parameters
    ----------
    walltime : float
        Seconds that the job may run.
    asked : float, optional
        The least that the user wants (`walltime_margin`). Default: a tenth of the walltime, 30 s at least and 5 min at
        most.
    nbytes : int, default 0
        What its workers hold.
    """
    least = asked if asked is not None else min(300.0, max(30.0, walltime / 10))
    return min(walltime / 2, max(least, nbytes / _MOVING_RATE))
