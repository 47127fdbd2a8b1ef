"""The object that `GPUCluster.adapt` returns: the user's limits, the present state, and the decisions so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hpcgpu.errors import ClusterError
from hpcgpu.jobs.adaptive_record import AdaptiveRecord
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.scaling.forecast import expected_wait
from hpcgpu.scaling.policy_data import Decision
from hpcgpu.scaling.wanted_state import Command, Resume, Scale


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
    """Adaptive scaling of one group of workers, by whole jobs. `GPUCluster.adapt` returns it.

    Two such objects are equal if they belong to the same call of `adapt`.

    Parameters
    ----------
    group : WorkerGroup
    record : AdaptiveRecord
        The request and the decisions.
    order : callable
        Sends a command to the manager of the cluster.
    """

    def __init__(self, group: WorkerGroup, record: AdaptiveRecord, order: Callable[[Command], None]) -> None:
        self.group = group
        self._record = record
        self._order = order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GPUAdaptive) and other._record is self._record

    def __hash__(self) -> int:
        return hash(self._record)

    @property
    def minimum(self) -> int:
        """The smallest size of the group, in Dask workers."""
        return self._record.limits.minimum * self.group.options.workers_per_job

    @property
    def maximum(self) -> int:
        """The largest size of the group, in Dask workers."""
        return self._record.limits.maximum * self.group.options.workers_per_job

    @property
    def target_duration(self) -> float:
        """Seconds in which the known work should be done."""
        return self._record.target_duration

    @property
    def log(self) -> deque[tuple[float, str]]:
        """The last 1000 entries: epoch seconds, and a sentence.

        There is one for each decision that changes something, and for each job that failed or lost workers.
        """
        return self._record.log

    @property
    def decision(self) -> Decision:
        """The last decision."""
        return self._record.decision

    def __repr__(self) -> str:
        group = "" if self.group.name == "default" else f" of group {self.group.name!r}"
        return f"<GPUAdaptive{group}: {self.minimum} to {self.maximum} workers, {self.decision.reason}>"

    @property
    def running(self) -> bool:
        """Whether it still determines the size of its group."""
        return self.group.adaptive is self._record and not self._record.lost

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
        if self._record.lost:
            raise ClusterError(self._record.lost)
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
