"""Whether another scheduler job follows one that has ended. Pure.

The manager decides it by these rules, and worker jobs decide by them whether they wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.batch.base import JobState

#: How many scheduler jobs may follow in this number of seconds.
LIMIT, PERIOD = 3, 3600.0
#: A person has cancelled it, or it has ended as intended, for example because of `idle_timeout`.
_INTENDED = frozenset({JobState.CANCELLED, JobState.COMPLETED})


def ended_too_early(state: JobState) -> bool:
    """Whether a scheduler job in this state has ended, and nobody wanted that."""
    return state.ended and state not in _INTENDED


def too_many(restarts: Sequence[float], *, now: float) -> str:
    """Return why no other scheduler job follows after these restarts, in epoch seconds; empty if one may."""
    recent = sum(now - at < PERIOD for at in restarts)
    return f"it was restarted {recent} times within an hour" if recent >= LIMIT else ""
