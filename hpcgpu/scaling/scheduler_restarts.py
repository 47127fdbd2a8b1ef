"""Whether another scheduler job follows one that has ended, and when it is submitted before that. Pure.

The manager decides it by these rules, and jobs decide by them whether they wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcgpu.batch.base import JobState

#: How many scheduler jobs may follow in this number of seconds.
LIMIT, PERIOD = 3, 3600.0
#: A person has cancelled it, or it has ended as intended, for example because of `idle_timeout`.
_INTENDED = frozenset({JobState.CANCELLED, JobState.COMPLETED})
#: The next scheduler job is submitted so many times its expected wait before the end of the present one, and at least
#: so many seconds.
_MARGIN, _LEAST = 1.5, 600.0
#: What a scheduler job does that runs before its time.
STANDBY = "it takes over when the present scheduler job ends"


def ended_too_early(state: JobState) -> bool:
    """Whether a scheduler job in this state has ended, and nobody wanted that."""
    return state.ended and state not in _INTENDED


def expected(state: JobState) -> bool:
    """Whether the end of a scheduler job that worked was expected: its walltime. Such an end is no failure."""
    return state is JobState.TIMEOUT


def too_many(restarts: Sequence[float], *, now: float) -> str:
    """Return why no other scheduler job follows after these restarts, in epoch seconds; empty if one may."""
    recent = sum(now - at < PERIOD for at in restarts)
    return f"it was restarted {recent} times within an hour" if recent >= LIMIT else ""


def next_is_due(start: float | None, end: float | None, waits: Iterable[float], *, now: float) -> bool:
    """Whether the next scheduler job should be in the queue by now, so that it has waited when the present one ends.

    It may start early, and then costs its GPU until it takes over. So it comes at most half a walltime early.

    Parameters
    ----------
    start, end : float or None
        Epoch seconds at which the present scheduler job began and its walltime ends; None if that is not known.
    waits : iterable of float
        Seconds for which jobs of the cluster have waited in the queue.
    now : float
        Epoch seconds.
    """
    if start is None or end is None:
        return False
    return end - now <= min((end - start) / 2, max(_LEAST, _MARGIN * max(waits, default=0.0)))
