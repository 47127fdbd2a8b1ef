"""The phases of a cluster in this program, and what happens to its jobs when this program closes it.

The methods of `hpcgpu.state.cluster_state.ClusterState` move a cluster from one phase to the next; nothing else does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a phase is."""

    CREATED = "nothing was requested yet"
    STARTING = "its jobs are requested, or looked up; its scheduler was not reached yet"
    RUNNING = "its scheduler was reached"
    RESTARTING = "its scheduler job has ended; the next one was not reached yet"
    LOST = "it cannot continue"
    SUPERSEDED = "another program manages its jobs"
    DETACHED = "its jobs continue without this program"
    CLOSING = "this program is closing it"
    CLOSED = "this program has closed it"


@dataclass(frozen=True)
class Phase:
    """One phase of a cluster, with the phases before it: a lost cluster is still lost after it was closed.

    Attributes
    ----------
    kind : Kind
    why : str
        Why the cluster is lost, or why it does not belong to this program any more.
    before : Phase or None
    """

    kind: Kind
    why: str = ""
    before: Phase | None = None

    def of(self, *kinds: Kind) -> Phase | None:
        """Return the latest phase of one of these kinds: this phase or an earlier one."""
        phase: Phase | None = self
        while phase is not None and phase.kind not in kinds:
            phase = phase.before
        return phase

    @property
    def managed(self) -> bool:
        """Whether this program manages the jobs."""
        return self.kind in (Kind.CREATED, Kind.STARTING, Kind.RUNNING, Kind.RESTARTING)

    @property
    def restarting(self) -> bool:
        """Whether its scheduler job has ended, and the next one was not reached yet."""
        return self.kind is Kind.RESTARTING

    @property
    def owned(self) -> bool:
        """Whether the jobs belong to this program. The jobs of a lost cluster do, too."""
        return self.managed or (self.kind is Kind.LOST and not self.superseded)

    @property
    def closing(self) -> bool:
        """Whether this program is closing the cluster, or has closed it."""
        return self.kind in (Kind.CLOSING, Kind.CLOSED)

    @property
    def lost(self) -> str:
        """Why the cluster is lost, or could not start; empty if neither."""
        phase = self.of(Kind.LOST)
        return phase.why if phase is not None else ""

    @property
    def failed(self) -> bool:
        """Whether the cluster was lost after it had started."""
        phase = self.of(Kind.LOST)
        return phase is not None and phase.of(Kind.RUNNING) is not None

    @property
    def superseded(self) -> bool:
        """Whether another program has taken the cluster over."""
        return self.of(Kind.SUPERSEDED) is not None

    @property
    def left(self) -> bool:
        """Whether this program has left the jobs to themselves, or to another manager."""
        return self.of(Kind.SUPERSEDED, Kind.DETACHED) is not None or bool(self.not_ours)

    @property
    def not_ours(self) -> str:
        """Why the cluster does not belong to this program any more; empty while it does."""
        phase = self.of(Kind.SUPERSEDED) or self.of(Kind.CLOSED)
        return phase.why if phase is not None else ""


@dataclass
class Ownership:
    """What happens to the jobs of a cluster when this program closes it, or ends.

    Attributes
    ----------
    ends_jobs : bool
        Whether `close` ends the jobs while this program owns them.
    ends_at_exit : bool
        Whether the end of this program ends the jobs, without `close`.
    attached : bool
        Whether another program started the cluster.
    in_scheduler_job : bool
        Whether this program runs in the scheduler job, and ends with it.
    after : int or None
        The number of the manager from which this program takes the cluster over; None for any.
    """

    ends_jobs: bool
    ends_at_exit: bool
    attached: bool = False
    in_scheduler_job: bool = False
    after: int | None = None

    def leaves_jobs(self, phase: Phase, *, cancelled: bool) -> bool:
        """Return whether closing leaves the jobs to themselves, or to another manager.

        Parameters
        ----------
        phase : Phase
        cancelled : bool
            Whether the jobs were cancelled before.
        """
        if phase.superseded:
            return True
        if cancelled:
            return False
        if phase.lost:  # not cancelled: it could not be taken over, or not started. `Reconciler.fail` cancels before
            return self.attached
        return phase.kind is Kind.DETACHED or not self.ends_jobs
