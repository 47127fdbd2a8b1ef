"""What the scaling policy is told, and what it answers. Times are epoch seconds, durations seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.scaling.gaps import Gap, Standstill

__all__ = ["Decision", "Demand", "History", "Hysteresis", "JobView", "Limits"]


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What the policy must know of one job that has not ended.

    Attributes
    ----------
    name : str
    pending : bool
        Whether it waits in the queue, so that cancelling it costs nothing but its place there.
    submitted : float
    leaves : float or None
        From when on another job is needed in its place: its walltime ends, or workers of it are lost for good. None if
        that is not so.
    workers : int
        Connected workers.
    paused : int
        Those of them that take no tasks, as their memory is full.
    processing : int
        Tasks that its workers have.
    calls : int
        Calls that run on its workers and are no tasks.
    computing : int
        Workers whose GPU works, or has worked a few seconds ago.
    nbytes : int
        Bytes that its workers hold.
    wanted : int
        Those of them that a client, or a task that is not computed yet, still needs.
    actors : int
        Actors that live on its workers. They cannot move.
    memory : float
        Bytes that its connected workers may use; infinite without a limit.
    idle_since : float or None
        Since when all its workers are connected and idle.
    retiring : bool
        Whether it is draining already.
    """

    name: str
    pending: bool
    submitted: float
    leaves: float | None = None
    workers: int = 0
    paused: int = 0
    processing: int = 0
    calls: int = 0
    computing: int = 0
    nbytes: int = 0
    wanted: int = 0
    actors: int = 0
    memory: float = 0.0
    idle_since: float | None = None
    retiring: bool = False

    @property
    def busy(self) -> bool:
        """Whether its workers do anything, so that it is not released."""
        return bool(self.processing or self.calls or self.computing)

    @property
    def works_beside(self) -> bool:
        """Whether it works on what is no task: no other job can do this."""
        return bool(self.calls or (self.computing and not self.processing))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How many of these workers the Dask scheduler needs.

    Attributes
    ----------
    jobs : int
        Jobs that would have something to do.
    seconds : float
        How long the work that is known will take with the workers that are there; infinite without any.
    waiting : float
        How long one job would take for the tasks that no thread runs yet.
    task : float
        How long one of them takes.
    memory : int
        Jobs that are needed as the memory of those that are there is nearly full; 0 while it is not. A job for more
        memory is needed even if those that are there could do all work in time.
    """

    jobs: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    task: float = 0.0
    memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows, in jobs.

    Attributes
    ----------
    minimum, maximum : int
        Equal for a fixed size.
    fixed : bool
        The user set the size: it counts at once, whatever the scheduler needs.
    backlog : int or None
        Jobs that may wait in the queue at a time.
    idle_timeout : float or None
        How long a job without work is kept; None: as long as experience says that it pays.
    interactive : bool
        A person works with the cluster: pauses are those of somebody who reads and thinks.
    gpu_seconds : float or None
        The budget.
    gpus_per_job : int
    """

    minimum: int = 0
    maximum: int
    fixed: bool = False
    backlog: int | None = None
    idle_timeout: float | None = None
    interactive: bool = False
    gpu_seconds: float | None = None
    gpus_per_job: int = 1


@dataclass(frozen=True, kw_only=True)
class History:
    """Events so far.

    Attributes
    ----------
    waits : sequence of float
        How long earlier jobs took from their submit until their workers were there, oldest first.
    startups : sequence of float
        How much of it was after their start, oldest first.
    gpu_seconds : float
        What was used of the budget.
    uncounted : bool
        A job has ended, and it is not known yet whether that was a failure.
    silent : bool
        The scheduler did not answer when it was last queried: the demand is an earlier one.
    unread : bool
        The user has just called `adapt`, and the scheduler has not reported its load since then.
    paused : str
        Why nothing is submitted any more; empty if something may be.
    next_try : float
        No submit before this time: the batch system refused one, or a job failed, shortly before.
    full : str
        The queue's words while the site accepts no more jobs; empty otherwise.
    """

    waits: Sequence[float] = ()
    startups: Sequence[float] = ()
    gpu_seconds: float = 0.0
    uncounted: bool = False
    silent: bool = False
    unread: bool = False
    paused: str = ""
    next_try: float = 0.0
    full: str = ""


@dataclass(frozen=True)
class Hysteresis:
    """What one decision passes on to the next.

    Attributes
    ----------
    gaps : tuple of Gap
        When there was no work for a first job, for a second one, and so on.
    standstill : Standstill
        When there was work and no worker.
    over : bool
        The budget was used up. It stays so: a little of it is left once the jobs have ended, and another job would only
        start and end.
    """

    gaps: tuple[Gap, ...] = ()
    standstill: Standstill = Standstill()
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do.

    Attributes
    ----------
    target : int
        The number of jobs that the group should have.
    submit : int
        Jobs to request.
    cancel : tuple of str
        Pending jobs to cancel, only while they are still pending.
    retire : tuple of str
        Running jobs to drain: they end when their workers have finished and their data has moved.
    reason : str
        Why, in words.
    ends : mapping
        When jobs without work will end if none comes, epoch seconds by name.
    hysteresis : Hysteresis
    over : bool
        The budget is used up: jobs end at once.
    short : bool
        There is work and no job, and the rest of the budget is too small for one.
    """

    target: int
    submit: int = 0
    cancel: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    reason: str
    ends: Mapping[str, float] = field(default_factory=dict)
    hysteresis: Hysteresis = Hysteresis()
    over: bool = False
    short: bool = False

    @property
    def acts(self) -> bool:
        """Whether it changes anything."""
        return bool(self.submit or self.cancel or self.retire)
