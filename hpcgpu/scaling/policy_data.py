"""The input and the result of the scaling policy. Times are epoch seconds, durations seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.scaling.idle_jobs import Gap, Standstill


@dataclass(frozen=True, kw_only=True)
class JobLoad:
    """What the connected workers of a job do and hold.

    Attributes
    ----------
    paused : int
        How many of them take no tasks because their memory is full.
    processing : int
        Tasks that its workers have.
    calls : int
        Calls that run on its workers and are not tasks.
    computing : int
        Workers whose GPU works, or worked a few seconds ago.
    nbytes : int
        Bytes that its workers hold.
    wanted : int
        How many of these bytes a client, or a task that is not computed yet, still needs.
    actors : int
        Actors that live on its workers. They cannot move.
    memory : float
        Bytes that its connected workers may use; infinite without a limit.
    """

    paused: int = 0
    processing: int = 0
    calls: int = 0
    computing: int = 0
    nbytes: int = 0
    wanted: int = 0
    actors: int = 0
    memory: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether its workers do any work. A busy job is not released."""
        return bool(self.processing or self.calls or self.computing)

    @property
    def works_beside(self) -> bool:
        """Whether it does work other than tasks. No other job can do this work."""
        return bool(self.calls or (self.computing and not self.processing))


@dataclass(frozen=True, kw_only=True)
class JobView(JobLoad):
    """One job that has not ended, as the policy sees it, with its load.

    Attributes
    ----------
    name : str
    pending : bool
        Whether it waits in the queue, so that a cancel costs only its place in the queue.
    submitted : float
    leaves : float or None
        The time from which it needs a replacement: its walltime ends, or workers of it are lost for good. None if it
        needs none.
    workers : int
        Connected workers.
    idle_since : float or None
        Since when all its workers are connected and idle.
    draining : bool
        Whether it is draining already.
    """

    name: str
    pending: bool
    submitted: float
    leaves: float | None = None
    workers: int = 0
    idle_since: float | None = None
    draining: bool = False


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How many of these workers the Dask scheduler needs.

    Attributes
    ----------
    jobs : int
        Jobs that would have work.
    seconds : float
        How long the known work will take with the connected workers; infinite without workers.
    waiting : float
        How long one job would need for the tasks that no thread runs yet.
    task : float
        How long one of these tasks takes.
    memory : int
        Jobs that are needed because the memory of the existing jobs is nearly full; 0 while it is not. A job for more
        memory is needed even if the existing jobs could do all work in time.
    held : int
        Jobs whose workers programs hold or wait to hold; they are needed whatever the tasks are.
    """

    jobs: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    task: float = 0.0
    memory: int = 0
    held: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows, in jobs.

    Attributes
    ----------
    minimum, maximum : int
        Equal for a fixed size.
    fixed : bool
        The user set the size. It applies at once, regardless of the scheduler's load.
    backlog : int or None
        Jobs that may wait in the queue at a time.
    idle_timeout : float or None
        How long a job without work is kept; None: as long as it would have paid in earlier gaps.
    interactive : bool
        A person works with the cluster, and makes pauses to read and think.
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
        How long earlier jobs took from their submit until their workers were connected, oldest first.
    startups : sequence of float
        How much of that time was after their start, oldest first.
    gpu_seconds : float
        The used part of the budget.
    uncounted : bool
        A job has ended, and it is not known yet whether that was a failure.
    silent : bool
        The scheduler did not answer the last query, so that the demand is older.
    unread : bool
        The user has just called `adapt`, and the scheduler has not reported its load since then.
    paused : str
        Why nothing is submitted any more; empty if jobs may be submitted.
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
        When there was no work for a first job, for a second job, and so on.
    standstill : Standstill
        When there was work and no worker.
    over : bool
        The budget was used up. This does not change back: when the jobs have ended, a little of the budget is left, and
        another job would only start and end.
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
        The reason, in words.
    ends : mapping
        When jobs without work will end if no work comes, epoch seconds by name.
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
