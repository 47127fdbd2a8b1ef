"""When workers leave a job whose walltime ends. Pure; used by the manager and inside jobs."""

from __future__ import annotations

__all__ = ["LAST", "ends_soon", "lifetime", "margin", "query_after", "waits_until"]

#: What still runs on workers that retire is waited for until this share of the time is left in which they retire: then
#: their results move. The manager retires them earlier than they do it themselves, and its share ends before theirs.
LAST, _LAST_OF_MANAGER = 1 / 3, 1 / 4

#: Bytes per second at which data is reckoned to move to other workers: a slow network's.
_MOVING_RATE = 100e6
#: Seconds after its start at which a job queries the queue for the end of its walltime at the latest.
_QUERY_LATEST = 120.0


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


def waits_until(begins: float, end: float, retires_at: float) -> float:
    """Return until when the manager waits for what runs on a job whose walltime ends.

    That is most of the time that is left where the queue has said late that it ends.

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


def lifetime(remaining: float, asked: float | None = None) -> float:
    """Return the seconds after which a job's workers retire by themselves, so that their data has moved before its end.

    That is half-way into the margin in which the cluster's manager retires them: it counts where the manager is away.
    """
    return remaining - margin(remaining, asked) / 2


def query_after(walltime: float | None, chance: float) -> float:
    """Return the seconds after which a job queries the queue for the end of its walltime.

    Jobs that start together must not query together: a thousand queries in one second would hold up a site's queue.

    Parameters
    ----------
    walltime : float or None
        Seconds that the script requests. The end may be another: a job may be submitted with another walltime, a node
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
