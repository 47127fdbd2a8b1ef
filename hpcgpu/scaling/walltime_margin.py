"""When workers leave a job whose walltime ends. Pure functions, for the manager and for programs inside jobs."""

from __future__ import annotations

#: Retiring workers may finish their work until this share of the time to retire is left. In the rest, their results
#: move. The first share is for workers that retire by themselves, the second for workers that the manager retires. The
#: manager begins and ends earlier.
LAST, _LAST_OF_MANAGER = 1 / 3, 1 / 4

#: Assumed bytes per second at which data moves to other workers: the rate of a slow network.
_MOVING_RATE = 100e6
#: Most seconds after its start until a job queries the queue for the end of its walltime.
_QUERY_LATEST = 120.0


def margin(walltime: float, requested: float | None = None, nbytes: int = 0) -> float:
    """Return how many seconds before the end of its walltime a job's workers begin to retire.

    Parameters
    ----------
    walltime : float
        Seconds that the job may run.
    requested : float, optional
        The user's minimum (`walltime_margin`). Default: a tenth of the walltime, at least 30 s and at most 5 min.
    nbytes : int, default 0
        Bytes of data that its workers hold.
    """
    least = requested if requested is not None else min(300.0, max(30.0, walltime / 10))
    return min(walltime / 2, max(least, nbytes / _MOVING_RATE))


def waits_until(begins: float, end: float, retires_at: float) -> float:
    """Return until when the manager waits for the work on a job whose walltime ends.

    If the queue reported the end late, the manager waits for most of the remaining time.

    Parameters
    ----------
    begins : float
        Epoch seconds at which its workers should retire.
    end : float
        Epoch seconds at which its walltime ends.
    retires_at : float
        Epoch seconds at which they retired for the first time.
    """
    return end - _LAST_OF_MANAGER * (end - min(end, max(begins, retires_at)))


def lifetime(remaining: float, requested: float | None = None) -> float:
    """Return the seconds after which a job's workers retire by themselves, so that their data moves before its end.

    This is in the middle of the margin in which the cluster's manager retires them. It matters if no manager runs.
    """
    return remaining - margin(remaining, requested) / 2


def query_after(walltime: float | None, chance: float) -> float:
    """Return the seconds after which a job queries the queue for the end of its walltime.

    Jobs that start together must not query together: a thousand queries in one second would hold up a site's queue.

    Parameters
    ----------
    walltime : float or None
        Seconds that the script requests. The real end may differ: a job may be submitted with another walltime, a node
        may take minutes to boot, and an administrator may change the walltime.
    chance : float
        From 0 to 1.
    """
    latest = _QUERY_LATEST if walltime is None else min(_QUERY_LATEST, walltime / 4)
    return latest * (1 + 3 * chance) / 4


def ends_soon(start: float | None, end: float, notice: float, *, now: float) -> bool:
    """Return whether a walltime ends soon: within the notice, or within its second half if that is shorter.

    Parameters
    ----------
    start : float or None
        Epoch seconds at which the job started; None if it is not known.
    end : float
        Epoch seconds.
    notice : float
        Seconds.
    now : float
        Epoch seconds.
    """
    return end - now <= (notice if start is None else min(notice, max(0.0, end - start) / 2))
