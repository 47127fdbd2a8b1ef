"""What every batch system does for a cluster: submit, query, cancel.

This layer handles jobs and queues only. It does not depend on Dask, GPUs or clusters. All its calls block, so that
they work at interpreter exit too; the manager runs them in threads.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcgpu.batch.estimate import Estimate
from hpcgpu.posix.printable import printable


class JobState(enum.Enum):
    """State of a job, in words that all batch systems share.

    They are Slurm's own names (``man squeue``, JOB STATE CODES) where the meaning is the same. `UNKNOWN` stands for a
    state that a future release adds.
    """

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMEOUT = "timeout"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """Whether a job in this state will never run (again)."""
        return self not in _ALIVE


_ALIVE = frozenset({JobState.PENDING, JobState.RUNNING, JobState.COMPLETING, JobState.UNKNOWN})


def state_named(word: str) -> JobState:
    """Return the state of this name, such as ``failed``; `JobState.UNKNOWN` for any other word."""
    return next((state for state in JobState if state.value == word), JobState.UNKNOWN)


class Outlook(enum.Enum):
    """What to expect of a job that waits."""

    WAIT = "it will start by itself"
    LIMIT = "it waits for other jobs to end"
    NEVER = "it can never start: the job must be changed"
    SITE = "the site must act before it can start"


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """The meaning of a batch system's own words.

    Attributes
    ----------
    pending : callable
        Returns what to expect of a pending job with this reason, and a sentence; None if the reason is not known.
    failed : mapping
        Sentences by the first word of the reason of a failed job, with or without the part after its colon.
    refused : sequence of (str, str)
        A pattern for the words of a refused submit, and what to check then; the first match counts.
    out_of_reach : str
        What removes a cancelled job from the queue whose node is off, with ``{job}`` for its id.
    """

    pending: Callable[[str], tuple[Outlook, str] | None] = lambda reason: None
    failed: Mapping[str, str] = field(default_factory=dict)
    refused: Sequence[tuple[str, str]] = ()
    out_of_reach: str = ""


@dataclass(frozen=True)
class After:
    """What must have happened to a job before another one may start.

    Attributes
    ----------
    job_id : str
    ended : bool
        Whether it must have ended, in whatever way (``afterany`` of Slurm and PBS); otherwise, started (``after``).
    """

    job_id: str
    ended: bool = False

    def __str__(self) -> str:
        return f"{'afterany' if self.ended else 'after'}:{self.job_id}"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the batch system reports about one job at one moment. Its words are made `printable`.

    Attributes
    ----------
    job_id : str
        The batch system's own id.
    state : JobState
    name : str
        The job's name, as submitted.
    reason : str
        Why the job waits or ended, in the batch system's own words; empty if it gives no reason.
    node : str
        The node list, empty before the job runs.
    start, end : float or None
        Epoch seconds of its start and of its end; for a running job `end` is when its walltime is over. None for a
        pending job; a suspended job has no known end.
    closes : float or None
        Epoch seconds at which its queue ends, as a reservation's does: a job that replaces it would end then too.
    expected_start : float or None
        Epoch seconds at which the batch system expects to start a pending job, if it has an estimate.
    exit_code : int or None
        Exit code of the script, if the batch system reports it; 128 + N when signal N ended it.
    suspended : bool
        The batch system has stopped the processes of the running job, and may let them continue.
    out_of_reach : bool
        The batch system has lost contact with the node of the job, which runs or is cancelled, and waits for it; the
        reason says since when, and until when.
    forgotten : bool
        The batch system no longer has a record of the job: whether and how it ended is a guess.
    words : Reasons
        What the reason means.
    """

    job_id: str
    state: JobState
    name: str = ""
    reason: str = ""
    node: str = ""
    start: float | None = None
    end: float | None = None
    closes: float | None = None
    expected_start: float | None = None
    exit_code: int | None = None
    suspended: bool = False
    out_of_reach: bool = False
    forgotten: bool = False
    words: Reasons = field(default=Reasons(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.state is JobState.PENDING:  # a requeued job may still have the times of its first run
            object.__setattr__(self, "start", None)
            object.__setattr__(self, "end", None)
        if self.suspended:  # the end moves with each second: Slurm reports the old one until the job is resumed
            object.__setattr__(self, "end", None)
        for name in ("name", "reason", "node"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def halted(self) -> bool:
        """Whether the queue reports why the running job may do nothing."""
        return self.suspended or (self.out_of_reach and self.state is JobState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class OwnJob:
    """The job in which a process runs, as seen from inside.

    Attributes
    ----------
    job_id, name : str
    node : int
        Index of this node among the nodes of the job, from 0.
    end : float or None
        Epoch seconds at which the walltime is over; None if the environment does not contain it.
    start : float or None
        Epoch seconds at which the job started; None if the environment does not contain it.
    warned : bool
        Whether SIGTERM may be a warning: the job may go on for a while.
    """

    job_id: str
    name: str
    node: int = 0
    end: float | None = None
    start: float | None = None
    warned: bool = False


class BatchSystem(ABC):
    """One batch system. Its methods block and may be called from any thread.

    Attributes
    ----------
    name : str
        Name of its `System`.
    remembers : bool
        It keeps the record of a job so long that a job without a record was certainly never submitted.
    waits_for_end : bool
        A job can wait in the queue for the end of another, see `After`. Without it no scheduler job is kept waiting for
        the end of one whose manager has left.
    unread : str or None
        What the last submit printed, if it was accepted and hpcgpu found no id there.
    """

    name: str
    remembers: bool = False
    waits_for_end: bool = True
    unread: str | None = None

    @abstractmethod
    def check(self) -> None:
        """Raise `BatchError`, with what to do, if the batch system's commands are missing."""

    def probe(self) -> None:
        """Raise `BatchError` unless the batch system can be used now; query it once, with a short timeout."""
        self.check()

    @abstractmethod
    def version(self) -> str:
        """Return the release that the batch system reports.

        Raises
        ------
        BatchError
            It does not answer.
        """

    def identity(self) -> str:
        """Return an identifier of this queue: two clusters of a site with one batch system have different ones.

        Empty if it is not known. The batch system is queried for it once, for a few seconds at most.
        """
        return ""

    @abstractmethod
    def submit(
        self,
        script: Path,
        *,
        job_name: str,
        logs: Path | None = None,
        after: After | None = None,
        exclude: Collection[str] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> str:
        """Submit a script and return the job id.

        Parameters
        ----------
        script : Path
            The job script; its directives request everything that does not change from job to job.
        job_name : str
            Name of this job, unique among the user's live jobs: an ambiguous submit is looked up by it.
        logs : Path, optional
            Directory of the job's log, for a batch system that names the log at the submit, see `log_name`. Default:
            the one in the script.
        after : After, optional
            What must have happened to another job before this one may start.
        exclude : collection of str, optional
            Nodes to avoid, if the batch system can do that.
        wanted : callable, optional
            Returns whether the job is still wanted; called before each attempt.

        Raises
        ------
        SubmitRefused
            The batch system refused the job permanently.
        Cancelled
            Not wanted any more, and certainly not submitted.
        SubmitLimited
            The batch system refused the job because this user has too many jobs at present.
        AmbiguousSubmit
            It is not known whether the job exists.
        BatchUnavailable
            Not submitted, and trying again did not help.
        """

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        """Return what the batch system reports about a job script, without submitting it.

        Parameters
        ----------
        script : Path
        queue : str, optional
            The queue that the script names. Default: that of the batch system.
        walltime : float, optional
            The seconds that the script requests.

        Raises
        ------
        BatchUnavailable
            The queue does not answer.
        """
        return Estimate(known=("this batch system says nothing of a job before it is submitted",))

    def log_name(self, job_name: str, job_id: str) -> str:
        """Return the file name of a job's log."""
        return f"{job_name}-{job_id}.log"

    @abstractmethod
    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Return the status of the given jobs, by one call for all. Jobs that the queue no longer shows are left out.

        Raises
        ------
        BatchUnavailable
            The queue does not answer.
        """

    @abstractmethod
    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Look up jobs that `poll` no longer finds in the accounting, if there is one; leave out unknown jobs."""

    @abstractmethod
    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Cancel jobs by one call for all; ids that are unknown or have ended are no error.

        Parameters
        ----------
        job_ids : iterable of str
        only_pending : bool, default False
            Spare jobs that already run when the queue processes the command, without a race.
        """

    @abstractmethod
    def find(self, job_name: str) -> list[str]:
        """Return the ids of the user's live (not ended) jobs of that name, newest last."""

    def marked(self, wanted: Callable[[Path], bool]) -> dict[str, Path]:
        """Return the scripts of this user's live jobs that hpcgpu has written, by job id, from the queue's own records.

        This finds the jobs of a cluster whose directory was removed.

        Parameters
        ----------
        wanted : callable
            Takes the path of a script, and returns whether it matters. Other scripts are left out.

        Raises
        ------
        BatchUnavailable
            The queue does not answer.
        """
        return {}

    @abstractmethod
    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        """Return the job in which this process runs, from its environment; None outside of a job."""
