"""What `GPUCluster.adapt` returns: the limits that the user gave, the present state, and the decisions so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hpcgpu.cluster.groups import WorkerGroup
from hpcgpu.errors import ClusterError
from hpcgpu.scaling.forecast import expected_wait
from hpcgpu.scaling.model import Decision, Limits
from hpcgpu.scaling.wanted import Command, Resume, Scale

__all__ = ["AdaptiveState", "GPUAdaptive"]

_LOG_LENGTH = 1000


@dataclass(frozen=True, kw_only=True)
class AdaptiveState:
    """The present state of adaptive scaling.

    Attributes
    ----------
    target : int
        Number of jobs that it wants.
    jobs : int
        Number of jobs that run or wait; jobs that drain do not count.
    running, pending : int
        How many of these run, and how many wait in the queue.
    waiting : dict of str to str
        Why each pending job waits, by job id.
    expected_wait : float or None
        Seconds from the submit of another job until its workers connect, as learned from earlier jobs. None before the
        first one.
    gpu_hours : float
        GPU hours that the group has used so far.
    reason : str
        Why the group does, or does not, scale.
    paused : str
        Why nothing is submitted until `GPUAdaptive.resume`; empty if scaling is not paused.
    """

    target: int
    jobs: int
    running: int
    pending: int
    waiting: dict[str, str]
    expected_wait: float | None
    gpu_hours: float
    reason: str
    paused: str


class GPUAdaptive:
    """Adaptive scaling of one group of workers, by whole jobs. `GPUCluster.adapt` makes it.

    Parameters
    ----------
    group : WorkerGroup
    limits : Limits
        In jobs.
    target_duration : float
        Seconds in which the known work should be done.
    order : callable
        Passes a command on to the manager of the cluster.

    Attributes
    ----------
    minimum, maximum : int
        Limits of the group's size, in Dask workers.
    log : collections.deque of (float, str)
        The last 1000 entries: epoch seconds, and a sentence. There is one for each decision that changes something, and
        for each job that failed or lost workers.
    decision : Decision
        The last one.
    """

    def __init__(
        self,
        group: WorkerGroup,
        limits: Limits,
        target_duration: float,
        order: Callable[[Command], None],
    ) -> None:
        self.group = group
        self.target_duration = target_duration
        self.minimum = limits.minimum * group.options.workers_per_job
        self.maximum = limits.maximum * group.options.workers_per_job
        self.log: deque[tuple[float, str]] = deque(maxlen=_LOG_LENGTH)
        self._order = order
        self._lost = ""
        self.decision = Decision(target=0, reason="no decision yet")

    def __repr__(self) -> str:
        group = "" if self.group.name == "default" else f" of group {self.group.name!r}"
        return f"<GPUAdaptive{group}: {self.minimum} to {self.maximum} workers, {self.decision.reason}>"

    @property
    def running(self) -> bool:
        """Whether it still decides the size of its group."""
        return self.group.adaptive is self and not self._lost

    @property
    def periodic_callback(self) -> GPUAdaptive | None:
        """Not None while it runs; distributed's widget reads it."""
        return self if self.running else None

    @property
    def state(self) -> AdaptiveState:
        """The present state, as an `AdaptiveState`.

        Raises
        ------
        ClusterError
            Another program has taken the cluster over, and scales it.
        """
        if self._lost:
            raise ClusterError(self._lost)
        now = time.time()
        jobs = [job for job in self.group.jobs if job.active]
        waiting = {job.job_id: job.info(now=now).reason for job in jobs if job.pending and job.job_id}
        views = [self.group.view(job) for job in jobs]
        return AdaptiveState(
            target=self.decision.target,
            jobs=len(jobs),
            running=sum(not job.pending for job in jobs),
            pending=sum(job.pending for job in jobs),
            waiting=waiting,
            expected_wait=expected_wait(self.group.waits, views, now),
            gpu_hours=self.group.gpu_seconds(now=now) / 3600,
            reason=self.decision.reason,
            paused=self.group.failures.paused,
        )

    def decided(self, decision: Decision, *, now: float) -> None:
        """Record a decision; those that change something are logged, and those whose target is new."""
        if decision.acts or decision.target != self.decision.target or not self.log:
            self.log.append((now, decision.reason))
        self.decision = decision

    def lose(self, why: str, *, now: float) -> None:
        """Record that another program scales the group from now on."""
        self._lost, self.decision = why, Decision(target=self.decision.target, reason=why)
        self.note(why, now=now)

    def note(self, text: str, *, now: float) -> None:
        """Log what is no decision."""
        self.log.append((now, text))

    def resume(self) -> None:
        """Submit jobs again after a pause because of failures, and count failures from zero.

        Raises
        ------
        ClusterError
            The cluster has failed or is closed, or another program manages it.
        """
        self._order(Resume(self.group.name))

    def stop(self) -> None:
        """End adaptive scaling. The group keeps the jobs that it has."""
        if self.running:
            self._order(Scale(self.group.name, sum(job.active for job in self.group.jobs)))
