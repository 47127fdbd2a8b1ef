"""The phases of a job: planned, submitting, queued, running, draining, ended.

Data that exists in one phase only belongs to that phase.

The methods of `hpcgpu.cluster.job.Job` move a job from one phase to the next; nothing else does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hpcgpu.batch.monitor import View
from hpcgpu.scaling.deciding import Drain
from hpcgpu.scaling.lost_workers import Absence

__all__ = ["Active", "Draining", "Ended", "Phase", "Planned", "Queued", "Running", "Submitting", "Work"]


@dataclass
class Work:
    """What the workers of a running job do.

    Attributes
    ----------
    joined_at : float or None
        Epoch seconds at which the first worker was seen.
    paused, processing, calls, computing, nbytes, wanted, actors : int
        Workers that are paused, tasks that its workers have, calls that run on them, workers whose GPU works, bytes
        that they hold, those of them that somebody still wants, and actors that live on them.
    memory : float
        Bytes that its workers may use; infinite without a limit.
    worked : bool
        Whether its workers have had tasks or data.
    complete : bool
        Whether all its workers have been connected at one time, or those that are missing are lost for good.
    idle_since : float or None
        Epoch seconds since which it is complete and its workers have nothing to do.
    absence : Absence
        Workers that it lacks.
    lost_at : float or None
        Since when the absent workers count as lost for good, which was said.
    walltime : float
        Seconds that it may run, or was to run before its end came nearer.
    retires_at : float or None
        When its workers retired first because its walltime ends, or it has lost others.
    stable : bool
        Whether it has run well for so long that earlier failures no longer count.
    wait_known : bool
        Whether its group has nothing more to learn from it about how long jobs wait.
    """

    joined_at: float | None = None
    paused: int = 0
    processing: int = 0
    calls: int = 0
    computing: int = 0
    nbytes: int = 0
    wanted: int = 0
    actors: int = 0
    memory: float = 0.0
    worked: bool = False
    complete: bool = False
    idle_since: float | None = None
    absence: Absence = field(default_factory=Absence)
    lost_at: float | None = None
    walltime: float = 0.0
    retires_at: float | None = None
    stable: bool = False
    wait_known: bool = False


@dataclass
class Planned:
    """It is to be submitted."""


@dataclass
class Submitting:
    """Its submit is under way, in `task`."""

    task: asyncio.Task[None] | None = None


@dataclass
class Queued:
    """The batch system has it, and it waits.

    Attributes
    ----------
    retry_at : float
        Epoch seconds before which it is not drained again.
    cancel_requested : bool
        The batch system was told to cancel it, but the answer was lost.
    presumed_ended : bool
        An earlier manager submitted it, and the queue does not know it: most likely it has ended.
    wait_known : bool
        Whether its group has nothing to learn from how long it waits: it ran before, or before this program saw it.
    """

    retry_at: float = 0.0
    cancel_requested: bool = False
    presumed_ended: bool = False
    wait_known: bool = False


@dataclass
class Running:
    """It runs: the queue says so, or one of its processes is connected.

    Attributes
    ----------
    work : Work
    retry_at, cancel_requested
        See `Queued`.
    proven_after : View or None
        What the queue had said when a process was connected last. That it waits proves nothing any more.
    """

    work: Work = field(default_factory=Work)
    retry_at: float = 0.0
    cancel_requested: bool = False
    proven_after: View | None = None


#: The phases of a job that is to stay.
Active = Planned | Submitting | Queued | Running


@dataclass
class Draining:
    """It is to end: cancelled while it waits, or when its workers have finished and their data has moved.

    Attributes
    ----------
    before : Planned or Submitting or Queued or Running
        What it goes back to where it cannot be drained; the queue and the workers move it on meanwhile.
    why : Drain
    begun : bool
        Whether this program has begun; an earlier manager may have left it so.
    loses : bool
        Whether data that fits nowhere else is lost with it, once what runs on its workers has ended.
    retired : set of str
        Addresses of its workers that were told to take no more tasks.
    cancelled_at : float or None
        Epoch seconds at which it was cancelled.
    """

    before: Active
    why: Drain
    begun: bool = True
    loses: bool = False
    retired: set[str] = field(default_factory=set)
    cancelled_at: float | None = None

    @property
    def refuses(self) -> bool:
        """Whether its workers take no more tasks, whatever becomes of its data."""
        return self.loses or self.why is Drain.DELETED


@dataclass
class Ended:
    """It has ended, as the queue says or as its long absence there shows. One that was only absent may come back.

    Attributes
    ----------
    at : float
        Epoch seconds.
    work : Work
        What its workers did.
    drained : bool
        Whether it was to end.
    presumed : bool
        Whether it had ended before this program came, most likely.
    handled, noted : bool
        Whether the reconciler has dealt with its end, and whether the journal has it.
    """

    at: float
    work: Work
    drained: bool
    presumed: bool = False
    handled: bool = False
    noted: bool = False


Phase = Active | Draining | Ended
