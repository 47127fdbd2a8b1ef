"""The phases of a job: planned, submitting, queued, running, draining, ended.

Each phase holds the data that exists only in that phase.

The methods of `hpcgpu.jobs.job.Job` move a job from one phase to the next; nothing else does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hpcgpu.polling.queue_monitor import View
from hpcgpu.scaling.decide_actions import Drain
from hpcgpu.scaling.missing_workers import Absence
from hpcgpu.scaling.policy_data import JobLoad


@dataclass
class Work:
    """What the workers of a running job do.

    Attributes
    ----------
    joined_at : float or None
        Epoch seconds at which the first worker was seen.
    load : JobLoad
        What they do and hold, by the scheduler's last answer.
    worked : bool
        Whether its workers have had tasks or data.
    complete : bool
        Whether all its workers were connected at one time, or the missing workers are lost for good.
    idle_since : float or None
        Epoch seconds since which it is complete and its workers are idle.
    absence : Absence
        Its missing workers.
    lost_at : float or None
        Epoch seconds since which the absent workers count as lost for good; this was reported.
    walltime : float
        Its longest walltime so far, in seconds: the walltime may have been shortened.
    retires_at : float or None
        Epoch seconds at which its workers first began to retire, because its walltime ends or it lost other workers.
    stable : bool
        Whether it has run well for so long that earlier failures do not count any more.
    without_scheduler : bool
        Whether its workers have ended with their scheduler, and it waits for the next one.
    wait_known : bool
        Whether its group has already recorded how long it waited, or cannot learn that from it.
    """

    joined_at: float | None = None
    load: JobLoad = JobLoad()
    worked: bool = False
    complete: bool = False
    idle_since: float | None = None
    absence: Absence = field(default_factory=Absence)
    lost_at: float | None = None
    walltime: float = 0.0
    retires_at: float | None = None
    stable: bool = False
    without_scheduler: bool = False
    wait_known: bool = False


@dataclass
class Planned:
    """It will be submitted."""


@dataclass
class Submitting:
    """Its submit is under way, in `task`, or got no answer: then the queue may have the job."""

    task: asyncio.Task[None] | None = None


@dataclass
class Queued:
    """The job is in the queue of the batch system, and waits.

    Attributes
    ----------
    retry_at : float
        Epoch seconds before which it is not drained again.
    presumed_ended : bool
        An earlier manager submitted it, and the queue does not show it: most likely it has ended.
    wait_known : bool
        Whether its group cannot learn from its wait: it ran before, or it started before this program saw it.
    """

    retry_at: float = 0.0
    presumed_ended: bool = False
    wait_known: bool = False


@dataclass
class Running:
    """It runs: the queue reports this, or one of its processes is connected.

    Attributes
    ----------
    work : Work
    retry_at
        See `Queued`.
    proven_after : View or None
        The queue's last report at the time when a process was connected. If it reports the job as pending, it is
        outdated.
    """

    work: Work = field(default_factory=Work)
    retry_at: float = 0.0
    proven_after: View | None = None


#: The phases of a job that neither drains nor has ended.
Active = Planned | Submitting | Queued | Running


@dataclass
class Draining:
    """It must end. It is cancelled while it waits, or when its workers have finished and their data has moved.

    Attributes
    ----------
    before : Planned or Submitting or Queued or Running
        The phase to which it returns if it cannot be drained. The queue and the workers still update that phase.
    why : Drain
    begun : bool
        Whether this program has begun to drain it. False if an earlier manager left it in this phase.
    loses : bool
        Whether the job ends when its work has finished, even if its data does not fit elsewhere and is lost.
    held_by_program : bool
        Whether its drain waits for a program that holds its workers.
    retired : set of str
        Addresses of its workers that were requested to take no more tasks.
    """

    before: Active
    why: Drain
    begun: bool = True
    loses: bool = False
    held_by_program: bool = False
    retired: set[str] = field(default_factory=set)

    @property
    def refuses(self) -> bool:
        """Whether its workers take no more tasks, also if its data does not fit elsewhere."""
        return self.loses or self.why is Drain.DELETED


@dataclass
class Ended:
    """It has ended: the queue reports its end, or has not listed it for long. An unlisted job may come back.

    Attributes
    ----------
    at : float
        Epoch seconds.
    work : Work
        What its workers did.
    drained : bool
        Whether its end was intended.
    presumed : bool
        Whether it most likely ended before this program managed the cluster.
    handled, noted : bool
        Whether the reconciler has processed its end, and whether its end is in the journal.
    """

    at: float
    work: Work
    drained: bool
    presumed: bool = False
    handled: bool = False
    noted: bool = False


Phase = Active | Draining | Ended
