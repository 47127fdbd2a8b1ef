"""Decides whether another scheduler job follows one that has ended, and when it is submitted. Pure.

The manager decides it by these rules, and jobs decide by them whether they wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpcgpu.batch.base import JobState, JobStatus

#: How many scheduler jobs may follow in this number of seconds.
LIMIT, PERIOD = 3, 3600.0
#: A person has cancelled it, or it has ended as intended, for example because of `idle_timeout`.
_INTENDED = frozenset({JobState.CANCELLED, JobState.COMPLETED})
#: The next scheduler job is submitted so many times its expected wait before the end of the present one, and at least
#: so many seconds.
_MARGIN, _LEAST = 1.5, 600.0
#: Seconds until a refused submit is tried again: the first time, and at most; how often; and after that.
_PAUSE, _LAST_PAUSE, _REFUSALS, _SELDOM = 5.0, 300.0, 10, 3600.0
#: Seconds until another job is submitted in the place of one that has ended before its scheduler was reached: a full
#: disk may have room again by then. The first one comes at once.
_PAUSE_AFTER_FAILURE, _LAST_PAUSE_AFTER_FAILURE = 60.0, 240.0
#: What a scheduler job does that runs before its time.
STANDBY = "it takes over when the present scheduler job ends"


def ended_too_early(state: JobState) -> bool:
    """Whether a scheduler job in this state has ended, and nobody wanted that."""
    return state.ended and state not in _INTENDED


def expected(state: JobState) -> bool:
    """Whether the end of a scheduler job that worked was expected: its walltime. Such an end is no failure."""
    return state is JobState.TIMEOUT


def too_many(restarts: Sequence[float], *, now: float) -> str:
    """Return why no other scheduler job follows after these restarts, in epoch seconds; empty if one may."""
    recent = sum(now - at < PERIOD for at in restarts)
    return f"it was restarted {recent} times within an hour" if recent >= LIMIT else ""


def next_is_due(start: float | None, end: float | None, waits: Iterable[float], *, now: float) -> bool:
    """Whether the next scheduler job should be in the queue by now, so that it has waited when the present one ends.

    It may start early, and then costs its GPU until it takes over. So it comes at most half a walltime early.

    Parameters
    ----------
    start, end : float or None
        Epoch seconds at which the present scheduler job began and its walltime ends; None if that is not known.
    waits : iterable of float
        Seconds for which jobs of the cluster have waited in the queue.
    now : float
        Epoch seconds.
    """
    if start is None or end is None:
        return False
    return end - now <= min((end - start) / 2, max(_LEAST, _MARGIN * max(waits, default=0.0)))


@dataclass(frozen=True, kw_only=True)
class Tries:
    """Failures in a row to get another scheduler job.

    Attributes
    ----------
    refused : int
        Submits that the queue refused, and jobs that were lost before they were needed.
    failed : int
        Jobs whose scheduler was not reached.
    again_at : float
        Epoch seconds before which nothing is tried again.
    """

    refused: int = 0
    failed: int = 0
    again_at: float = 0.0

    @property
    def exhausted(self) -> str:
        """Why a lost scheduler is not submitted again; empty if it is."""
        return f"the queue has not accepted it {self.refused} times" if self.refused > _REFUSALS else ""

    def after_refusal(self, *, now: float) -> Tries:
        """Return the tries after a submit that was refused."""
        refused = self.refused + 1
        pause = min(_LAST_PAUSE, _PAUSE * 2.0**refused) if refused <= _REFUSALS else _SELDOM
        return replace(self, refused=refused, again_at=now + pause)

    def after_failure(self, *, now: float) -> Tries:
        """Return the tries after a job whose scheduler was not reached."""
        pause = min(_LAST_PAUSE_AFTER_FAILURE, _PAUSE_AFTER_FAILURE * self.failed)
        return replace(self, failed=self.failed + 1, again_at=now + pause)

    def after_loss(self, submitted: float | None, *, now: float) -> Tries:
        """Return the tries after the loss of a job that the queue had accepted; earlier failures may be long ago."""
        long = submitted is not None and now - submitted > _SELDOM
        return (Tries() if long else self).after_refusal(now=now)


@dataclass(frozen=True, kw_only=True)
class KnownScheduler:
    """A scheduler job that has not ended, as far as the journal reports.

    Attributes
    ----------
    name : str
    job_id : str or None
        None if its submit got no answer, and the queue does not show it.
    alive : bool
        Whether the queue reports that it has not ended, or may still accept it.
    wanted : bool
        Whether no manager has decided to end it.
    """

    name: str
    job_id: str | None = None
    alive: bool = True
    wanted: bool = True


def roles(
    jobs: Sequence[KnownScheduler], served: str | None
) -> tuple[KnownScheduler | None, KnownScheduler | None, list[KnownScheduler]]:
    """Decide what the scheduler jobs are for of a cluster that another program takes over.

    Parameters
    ----------
    jobs : sequence of KnownScheduler
        In the order of the journal.
    served : str or None
        The job of the contact; None without a contact.

    Returns
    -------
    present : KnownScheduler or None
        The one on which the cluster depends, also if it has ended and nobody has noticed it.
    following : KnownScheduler or None
        The one that should follow it.
    surplus : list of KnownScheduler
        Those that are, or may be, in the queue and must end.
    """
    there = [job for job in jobs if job.job_id is not None]
    ready = [job for job in there if job.alive and job.wanted]
    unanswered = [job for job in jobs if job.alive and job.job_id is None]
    by_contact = [job for job in there if job.job_id == served]
    after_it = ready if served is not None else []  # the journal has the end of the job of the contact
    wanted = [job for job in there if job.wanted]
    present = next(iter([*by_contact, *after_it, *wanted, *reversed(there)]), None)
    following = next((job for job in (*ready, *unanswered) if job is not present), None)
    return present, following, [job for job in jobs if job.alive and job not in (present, following)]


@dataclass(frozen=True, kw_only=True)
class ObservedNext:
    """The scheduler job that was submitted before it is needed.

    Attributes
    ----------
    accepted : bool
        Whether the queue has it.
    held : bool
        Whether the queue starts it only when the present one has ended.
    replaces : bool
        Whether the job that it replaces is still there.
    lost : str
        Why it cannot follow the present one; empty if it can.
    """

    accepted: bool = True
    held: bool = False
    replaces: bool = False
    lost: str = ""


@dataclass(frozen=True, kw_only=True)
class ObservedScheduler:
    """The scheduler of a cluster.

    Attributes
    ----------
    status : JobStatus or None
        What the queue reports of its job; None if it has none.
    reached : bool
        Whether this program has reached it.
    gone : bool
        Whether it has ended, and no other one has followed yet.
    closes : bool
        Whether it ends as intended, and the cluster with it, for example because of `idle_timeout`.
    certain : bool
        Whether it is certain that its job has ended: the queue reports it, or has accepted its cancel.
    cancelled : bool
        Whether this program has cancelled its job, because its scheduler was not reached.
    restarts : bool
        Whether another one should follow.
    coming : bool
        Whether a scheduler job is submitted now, or is there and should soon be reached.
    stopped : bool or None
        Whether another program has stopped the cluster; None if that is not known, because the journal cannot be read.
    removed : bool
        Whether the directory of the cluster was removed.
    final : str
        Why none can follow one that did not end as intended; empty if one can.
    restarted : sequence of float
        Epoch seconds at which a scheduler job was replaced that had ended unexpectedly.
    tries : Tries
        What was tried since it has ended.
    next : ObservedNext or None
        The job that was submitted to follow it.
    next_tries : Tries
        What was tried to get that job.
    waits : sequence of float
        Seconds for which jobs of the cluster have waited in the queue.
    unattended : bool
        Whether perhaps no program is there when it ends, so that the queue should start the next one.
    leaving : bool
        Whether this program leaves the cluster now.
    tried_at_leaving : bool
        Whether it has tried since then to get a job that follows.
    """

    status: JobStatus | None = None
    reached: bool = True
    gone: bool = False
    closes: bool = False
    certain: bool = True
    cancelled: bool = False
    restarts: bool = False
    coming: bool = False
    stopped: bool | None = False
    removed: bool = False
    final: str = ""
    restarted: Sequence[float] = ()
    tries: Tries = Tries()
    next: ObservedNext | None = None
    next_tries: Tries = Tries()
    waits: Sequence[float] = ()
    unattended: bool = False
    leaving: bool = False
    tried_at_leaving: bool = False


@dataclass(frozen=True)
class SubmitNext:
    """Submit a scheduler job that follows the present one; if it is held, the queue starts it at that one's end."""

    held: bool


@dataclass(frozen=True)
class DropNext:
    """Cancel the job that should follow; `why` is the reason, and empty if none follows."""

    why: str = ""


@dataclass(frozen=True)
class DropReplaced:
    """Cancel the job that another one replaces, which the queue has now."""


@dataclass(frozen=True)
class CancelEnded:
    """Cancel the present job, which only counts as ended: the queue may be wrong, and there is one scheduler."""


@dataclass(frozen=True)
class Restart:
    """Let another scheduler job follow: the one that waits for it, or a new one."""


@dataclass(frozen=True)
class Lose:
    """Let the cluster end with its scheduler; `why` is the reason why no other one follows."""

    why: str = ""


SchedulerAction = SubmitNext | DropNext | DropReplaced | CancelEnded | Restart | Lose


def why_none_follows(scheduler: ObservedScheduler, *, now: float) -> str:
    """Return why no other scheduler job follows the last one; empty if one does."""
    if scheduler.removed:
        return "its directory was removed"
    if scheduler.stopped:
        return "another program has stopped the cluster"
    state = scheduler.status.state if scheduler.status is not None else JobState.UNKNOWN
    if state in _INTENDED and not scheduler.cancelled:
        return "it has ended as intended, or was cancelled"
    if scheduler.final:
        return scheduler.final
    worked_to_the_end = scheduler.reached and expected(state)
    return scheduler.tries.exhausted or ("" if worked_to_the_end else too_many(scheduler.restarted, now=now))


def decide(scheduler: ObservedScheduler, *, now: float) -> SchedulerAction | None:
    """Decide what is done about the scheduler job of a cluster, and about the job that follows it.

    Parameters
    ----------
    scheduler : ObservedScheduler
    now : float
        Epoch seconds.
    """
    if scheduler.closes:
        return DropNext() if scheduler.next is not None else None
    if scheduler.coming or scheduler.stopped is None:
        return None
    return _after_the_end(scheduler, now) if scheduler.gone else _before_the_end(scheduler, now)


def _after_the_end(scheduler: ObservedScheduler, now: float) -> SchedulerAction | None:
    if not scheduler.restarts or scheduler.stopped:
        return Lose("another program has stopped the cluster" if scheduler.stopped else "")
    may = now >= scheduler.tries.again_at
    if not scheduler.certain:
        return CancelEnded() if may else None
    if why := why_none_follows(scheduler, now=now):
        return Lose(why)
    return Restart() if may else None


def _before_the_end(scheduler: ObservedScheduler, now: float) -> SchedulerAction | None:
    present, following = scheduler.status, scheduler.next
    if following is not None and following.lost:
        return DropNext(following.lost)
    if following is not None and following.accepted and following.replaces:
        return DropReplaced()
    if not scheduler.restarts or present is None or present.state.ended or scheduler.stopped:
        return None
    held = SubmitNext(held=True) if scheduler.unattended and following is None else None
    may = now >= scheduler.next_tries.again_at
    if scheduler.leaving:  # once at least: perhaps this program has no other occasion
        return held if may or not scheduler.tried_at_leaving else None
    works = scheduler.reached and present.state is JobState.RUNNING and not present.suspended
    if not works or not may or not (following is None or following.held):
        return None
    return SubmitNext(held=False) if next_is_due(present.start, present.end, scheduler.waits, now=now) else held
