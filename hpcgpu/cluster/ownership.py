"""To whom the jobs of a cluster belong.

They belong to this program, to nobody (detached), to another manager, or the cluster is closed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Owner", "Ownership"]


class Owner(enum.Enum):
    """To whom the jobs of a cluster belong."""

    OWNER = "this program manages its jobs"
    DETACHED = "its jobs continue without this program"
    SUPERSEDED = "another program manages its jobs"
    CLOSED = "this program has closed it"


@dataclass
class Ownership:
    """The one state of ownership of a cluster, as this program has it.

    Attributes
    ----------
    ends_jobs : bool
        Whether `close` ends the jobs while this program owns them.
    ends_at_exit : bool
        Whether the end of this program does, without `close`.
    attached : bool
        Whether another program started the cluster.
    state : Owner
    why : str
        Why it is not this program's any more; empty while it is.
    """

    ends_jobs: bool
    ends_at_exit: bool
    attached: bool = False
    state: Owner = Owner.OWNER
    why: str = ""

    @property
    def owner(self) -> bool:
        """Whether this program keeps the jobs."""
        return self.state is Owner.OWNER

    @property
    def superseded(self) -> bool:
        """Whether another program has taken the cluster over."""
        return self.state is Owner.SUPERSEDED

    @property
    def left(self) -> bool:
        """Whether this program has left the jobs to themselves, or to another manager."""
        return self.superseded or self.state is Owner.DETACHED or bool(self.why)

    def detach(self) -> None:
        """Owner -> detached."""
        if self.owner:
            self.state = Owner.DETACHED

    def supersede(self, why: str) -> bool:
        """Owner -> superseded; return whether that is new."""
        if not self.owner:
            return False
        self.state, self.why = Owner.SUPERSEDED, why
        return True

    def close(self, why: str = "") -> None:
        """Any -> closed. What made it another's stays the reason."""
        self.state, self.why = Owner.CLOSED, self.why or why

    def leaves_jobs(self, *, cancelled: bool, lost: bool) -> bool:
        """Return whether closing leaves the jobs to themselves, or to another manager.

        Parameters
        ----------
        cancelled : bool
            Whether the jobs were cancelled before.
        lost : bool
            Whether the cluster is lost, or could not start.
        """
        if self.superseded:
            return True
        if cancelled:
            return False
        if lost:  # what another program started must not suffer from that
            return self.attached
        return self.state is Owner.DETACHED or not self.ends_jobs
