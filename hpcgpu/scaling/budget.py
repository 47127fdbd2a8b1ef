"""Messages on how much of its budget of GPU hours a worker group has used. Pure functions."""

from __future__ import annotations

import enum

from hpcgpu.display.counts_and_durations import counted
from hpcgpu.scaling.policy_data import Decision, Limits

#: The user is warned when this share of the budget is used.
_NEAR = 0.8


class Stage(enum.IntEnum):
    """How much of a budget is used. Each stage except the first is reported to the user once."""

    FREE = 0
    NEAR = 1
    #: There is work and no job, and the rest of the budget is not enough for a job.
    SHORT = 2
    #: The budget is used up, and the jobs end.
    SPENT = 3


def stage(limits: Limits, used: float, decision: Decision) -> Stage:
    """Return the stage of a group's budget.

    Parameters
    ----------
    limits : Limits
    used : float
        GPU seconds.
    decision : Decision
        The last decision.
    """
    if limits.gpu_seconds is None:
        return Stage.FREE
    if decision.over:
        return Stage.SPENT
    if decision.short:
        return Stage.SHORT
    return Stage.NEAR if used >= _NEAR * limits.gpu_seconds else Stage.FREE


def words(at: Stage, whose: str, limits: Limits, used: float) -> str:
    """Return a message for the user at this stage; empty if none is needed.

    Parameters
    ----------
    at : Stage
    whose : str
        Such as ``cluster demo``.
    limits : Limits
    used : float
        GPU seconds.
    """
    seconds = limits.gpu_seconds or 0.0
    total, go_on = hours(seconds), f"call adapt with a maximum_gpu_hours above {seconds / 3600:g}, or scale"
    if at is Stage.NEAR:
        return (
            f"{whose} has used {100 * used / seconds:.0f} % of its budget of {total}. When it is used up, the worker "
            f"jobs end, and results that no other worker can hold are lost. Save them before, or {go_on}"
        )
    if at is Stage.SHORT:
        left = of_hours(max(0.0, seconds - used))
        return (
            f"the rest of the budget of {whose} is too small for a job: {left} of {total} are left, and a new job "
            f"must be able to run for 5 min. Tasks wait. To go on, {go_on}"
        )
    if at is Stage.SPENT:
        return (
            f"{whose} has used up its budget of {total} ({of_hours(used)} used): its worker jobs end. Running tasks "
            "have 20 s. Results that no other worker can hold are lost: a program that loses some gets an error. Other "
            f"tasks wait, and the scheduler job continues. To go on, {go_on}"
        )
    return ""


def lost(whose: str, limits: Limits) -> str:
    """Return why a result is lost or is not computed, and how the program can continue."""
    seconds = limits.gpu_seconds or 0.0
    return (
        f"the budget of {hours(seconds)} of {whose} is used up, and its worker jobs have ended: this result is lost, "
        f"or was not computed. To go on, call adapt with a maximum_gpu_hours above {seconds / 3600:g}, or scale"
    )


def hours(seconds: float) -> str:
    """Return a budget as the user gave it, in GPU hours."""
    return counted(seconds / 3600, "GPU hour")


def of_hours(seconds: float) -> str:
    """Return the used or the remaining part of a budget: a number of GPU hours."""
    number = seconds / 3600
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"
