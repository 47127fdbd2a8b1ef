"""The manager's record of adaptive scaling of one worker group: the user's limits, and the decisions."""

from __future__ import annotations

from collections import deque

from hpcgpu.scaling.policy_data import Decision, Limits

_LOG_LENGTH = 1000


class AdaptiveRecord:
    """What one call of `adapt` requested, and the decisions since then.

    Parameters
    ----------
    limits : Limits
        In jobs.
    target_duration : float
        Seconds in which the known work should be done.

    Attributes
    ----------
    log : collections.deque of (float, str)
        The last 1000 entries: epoch seconds, and a sentence. There is one for each decision that changes something, and
        for each job that failed or lost workers.
    decision : Decision
        The last decision.
    lost : str
        Why another program scales the group; empty if this one does.
    """

    def __init__(self, limits: Limits, target_duration: float) -> None:
        self.limits = limits
        self.target_duration = target_duration
        self.log: deque[tuple[float, str]] = deque(maxlen=_LOG_LENGTH)
        self.decision = Decision(target=0, reason="no decision yet")
        self.lost = ""

    def decided(self, decision: Decision, *, now: float) -> None:
        """Record a decision. It is logged if it changes something or has a new target."""
        if decision.acts or decision.target != self.decision.target or not self.log:
            self.log.append((now, decision.reason))
        self.decision = decision

    def lose(self, why: str, *, now: float) -> None:
        """Record that another program scales the group from now on."""
        self.lost, self.decision = why, Decision(target=self.decision.target, reason=why)
        self.note(why, now=now)

    def note(self, text: str, *, now: float) -> None:
        """Log an event that is not a decision."""
        self.log.append((now, text))
