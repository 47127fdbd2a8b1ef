"""How much of a budget of GPU hours a worker group has used, in words. Pure functions."""

from __future__ import annotations

import enum

from hpcgpu.display.words import counted
from hpcgpu.scaling.model import Decision, Limits

__all__ = ["Stage", "lost", "stage", "words"]

#: The user is warned when this share of the budget is used.
_NEAR = 0.8


class Stage(enum.IntEnum):
    """How far a budget is used up; the user is told of each stage but the first, once."""

    FREE = 0
    NEAR = 1
    #: There is work and no job, and what is left is not enough for one.
    SHORT = 2
    #: It is used up, and the jobs end.
    SPENT = 3


def stage(limits: Limits, used: float, decision: Decision) -> Stage:
    """Return the stage of a group's budget.

    Parameters
    ----------
    limits : Limits
    used : float
        GPU seconds.
    decision : Decision
        The last one.
    """
    if limits.gpu_seconds is None:
        return Stage.FREE
    if decision.over:
        return Stage.SPENT
    if decision.short:
        return Stage.SHORT
    return Stage.NEAR if used >= _NEAR * limits.gpu_seconds else Stage.FREE


def words(at: Stage, whose: str, limits: Limits, used: float) -> str:
    """Return what the user must know at this stage; empty if nothing.

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
    hours, go_on = _hours(seconds), f"call adapt with a maximum_gpu_hours above {seconds / 3600:.3g}, or scale"
    if at is Stage.NEAR:
        return (
            f"{whose} has used {100 * used / seconds:.0f} % of its budget of {hours}. When it is used up, the worker "
            f"jobs end, and results that no other worker can hold are lost. Save them before, or {go_on}"
        )
    if at is Stage.SHORT:
        left = max(0.0, seconds - used) / 3600
        return (
            f"the rest of the budget of {whose} is too small for a job: {left:.3g} of {hours} are left, and a new job "
            f"must be able to run for 5 min. Tasks wait. To go on, {go_on}"
        )
    if at is Stage.SPENT:
        return (
            f"{whose} has used up its budget of {hours} ({used / 3600:.3g} used): its worker jobs end. Running tasks "
            "have 20 s. Results that no other worker can hold are lost: a program that loses some gets an error. Other "
            f"tasks wait, and the scheduler job continues. To go on, {go_on}"
        )
    return ""


def lost(whose: str, limits: Limits) -> str:
    """Return why a result is lost or is not computed, and how the program goes on."""
    seconds = limits.gpu_seconds or 0.0
    return (
        f"the budget of {_hours(seconds)} of {whose} is used up, and its worker jobs have ended: this result is lost, "
        f"or was not computed. To go on, call adapt with a maximum_gpu_hours above {seconds / 3600:.3g}, or scale"
    )


def _hours(seconds: float) -> str:
    return counted(float(f"{seconds / 3600:.3g}"), "GPU hour")
