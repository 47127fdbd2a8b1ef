"""Cost and work of a cluster's jobs. Pure: the facts and the time are arguments.

An unknown value is None, and is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcgpu.batch.base import JobState, JobStatus, state_named
from hpcgpu.batch.reasons import FORGOTTEN, cancel_of_ours, explain
from hpcgpu.scaling.scheduler_restarts import ended_too_early
from hpcgpu.store.journal import Submit
from hpcgpu.store.saved_options import Saved
from hpcgpu.store.usage_file import JobUsage

#: Seconds by which clocks may differ.
_CLOCKS = 5.0
#: Why the manager cancelled a job.
_UNNEEDED = "the cluster no longer needed it"
#: Two times in epoch seconds between which a cluster had no scheduler.
Gap = tuple[float, float]
#: Seconds after which the scheduler's file contains a job, if that job ever has workers.
_SOON = 120.0


@dataclass(frozen=True, kw_only=True)
class JobBill:
    """Cost and work of a job. An unknown value is None.

    Attributes
    ----------
    id : str
        The job id of the batch system; empty if it is not known.
    name : str
    kind : str
        ``"scheduler"`` or ``"worker"``.
    group : str
        Its worker group; empty for the scheduler job.
    state, reason : str
        How it ended or its state now, and why.
    gpus : int or None
        GPUs that it requested.
    submitted, started, ended : float or None
        Seconds since 1970 of its submit, start and end.
    ended_later : bool
        Whether its end is the last heartbeat of its workers, because the queue has forgotten the job.
    waited, ran : float or None
        Seconds that it waited and ran.
    gpu_hours : float or None
        GPU hours that it cost: its GPUs, times the hours that it ran.
    before, busy, after : float or None
        Parts of these GPU hours: before the first task, with tasks or computing, and idle after the first task.
    waiting : float or None
        GPU hours in which the job waited for the next scheduler of its cluster. No other part includes them.
    utilization_mean, utilization_peak : float or None
        Use of its GPUs while workers were connected, in per cent.
    memory_mean, memory_peak, memory_total : float or None
        Memory of one GPU, in bytes.
    tasks_done, tasks_lost : int or None
        Tasks that its workers finished, and tasks that were lost with workers.
    sent, spilled : int or None
        Bytes that its workers sent to others, and the most bytes that they had on disk.
    """

    id: str
    name: str
    kind: str
    group: str
    state: str
    reason: str
    gpus: int | None
    submitted: float
    started: float | None = None
    ended: float | None = None
    ended_later: bool = False
    waited: float | None = None
    ran: float | None = None
    gpu_hours: float | None = None
    before: float | None = None
    busy: float | None = None
    after: float | None = None
    waiting: float | None = None
    utilization_mean: float | None = None
    utilization_peak: float | None = None
    memory_mean: float | None = None
    memory_peak: float | None = None
    memory_total: int | None = None
    tasks_done: int | None = None
    tasks_lost: int | None = None
    sent: int | None = None
    spilled: int | None = None


@dataclass(frozen=True)
class _Times:
    """When a job started and ended, and how."""

    state: str
    reason: str
    started: float | None
    ended: float | None
    alive: bool = False
    later: bool = False
    #: Whether nothing is missing: a job without a start never started.
    known: bool = True


def _times(submit: Submit, used: JobUsage | None, status: JobStatus | None, closed: float | None) -> _Times:
    began = used.began if used is not None else None
    if submit.how is not None:  # the queue's report when a program saw the end
        how = submit.how
        named = state_named(how.state)
        if named is JobState.UNKNOWN:
            return replace(_ended(named, FORGOTTEN, how.start, how.end, used), state="ended")
        reason = explain(JobStatus(job_id="", state=named), kind=submit.kind)
        return _ended(named, reason, how.start, how.end, used)
    if status is not None and status.state.ended:
        return _ended(status.state, explain(status, kind=submit.kind), status.start, status.end, used)
    if status is not None:
        pending = status.state is JobState.PENDING
        reason = explain(status, kind=submit.kind)
        return _Times(status.state.value, reason, None if pending else _first(status.start, began), None, alive=True)
    last_heartbeat = used.last if used is not None and used.last else None
    if submit.ended or closed is not None:
        cancelled = (
            closed is not None and not submit.ended and (last_heartbeat is None or last_heartbeat >= closed - 120)
        )
        reason = _UNNEEDED if submit.unwanted else "with the cluster" if cancelled else FORGOTTEN
        return _Times("ended", reason, began, last_heartbeat, later=last_heartbeat is not None, known=False)
    return _Times(
        "unknown", "the queue does not know it", began, last_heartbeat, later=last_heartbeat is not None, known=False
    )


def _ended(state: JobState, reason: str, started: float | None, ended: float | None, used: JobUsage | None) -> _Times:
    """Return the times of a job from the queue's report of its end; missing times come from its workers' heartbeats."""
    began = used.began if used is not None else None
    last_heartbeat = used.last if used is not None and used.last else None
    end = ended if ended is not None else last_heartbeat
    return _Times(state.value, reason, _first(started, began), end, later=ended is None and last_heartbeat is not None)


def _first(started: float | None, began: float | None) -> float | None:
    """Return when a job first started.

    If a queue has run a job again (`qrerun`), it reports only the last start. An earlier heartbeat of the job's workers
    counts as the first start: those hours were paid too, and the pause between the runs counts with them.
    """
    if started is not None and began is not None and began < started - _CLOCKS:
        return began
    return started or began


def _cancelled(submit: Submit, times: _Times, closed: float | None) -> str:
    """Return why hpcgpu cancelled a job; empty if another program did, or if the job was not cancelled."""
    named = state_named(times.state)
    if not cancel_of_ours(named, decided=submit.unwanted, ended=times.ended, closed=closed):
        return ""
    return _UNNEEDED if submit.unwanted else "with the cluster"


def bill(  # noqa: PLR0913  # what is known of one job, from four places
    submit: Submit,
    used: JobUsage | None,
    status: JobStatus | None,
    gpus: int | None,
    *,
    now: float,
    closed: float | None = None,
    written: float | None = None,
    gaps: Sequence[Gap] = (),
) -> JobBill:
    """Return what one job cost and did.

    Parameters
    ----------
    submit : Submit
        What the journal records.
    used : JobUsage or None
        What the scheduler kept.
    status : JobStatus or None
        What the queue or the accounting reports; None if neither has it.
    gpus : int or None
        GPUs that it requested; None if that is not known.
    now : float
        Epoch seconds.
    closed : float or None
        Epoch seconds at which all jobs of the cluster were cancelled; None if they were not.
    written : float or None
        Epoch seconds at which the scheduler wrote its file, if that has all jobs that ever had workers: then a job that
        it lacks had none.
    gaps : sequence of (float, float), optional
        When the cluster had no scheduler.
    """
    closed = closed if closed is not None and submit.time <= closed and not submit.before_close else None
    times = _times(submit, used, status, closed)
    own = _cancelled(submit, times, closed)
    end = now if times.alive else times.ended
    ran = max(0.0, end - times.started) if times.started is not None and end is not None else None
    if times.started is None and (times.known or times.alive):  # it never started
        ran = 0.0
    waited = times.started if times.started is not None else end
    if used is None and submit.kind == "worker" and _had_none(times.started, end, written):
        used = JobUsage(id=submit.job_id or "")
    worker = submit.kind == "worker" and used is not None
    mean = used.utilization.mean if worker and used is not None else None
    memory = used.memory.mean if worker and used is not None else None
    hours = None if ran is None or gpus is None else gpus * ran / 3600
    before, busy, after = _parts(used, times.started, ran, gpus, gaps) if worker else (None, None, None)
    waiting = None
    if submit.kind == "worker" and ran is not None and gpus is not None:
        waiting = gpus * _overlap(times.started, ran, gaps) / 3600
    return JobBill(
        id=submit.job_id or "",
        name=submit.name,
        kind=submit.kind,
        group=submit.group if submit.kind == "worker" else "",
        state=JobState.CANCELLED.value if own else times.state,
        reason=own or times.reason,
        gpus=gpus,
        submitted=submit.time,
        started=times.started,
        ended=times.ended,
        ended_later=times.later,
        waited=max(0.0, waited - submit.time) if waited is not None else None,
        ran=ran,
        gpu_hours=hours,
        before=before,
        busy=busy,
        after=after,
        waiting=waiting,
        utilization_mean=mean,
        utilization_peak=used.utilization.peak if used is not None and mean is not None else None,
        memory_mean=memory,
        memory_peak=used.memory.peak if used is not None and memory is not None else None,
        memory_total=used.memory_total if worker and used is not None else None,
        tasks_done=used.done if worker and used is not None else None,
        tasks_lost=used.lost if worker and used is not None else None,
        sent=used.sent if worker and used is not None else None,
        spilled=used.spilled if worker and used is not None else None,
    )


def gpus_of(submit: Submit, options: Saved | None, kept: Mapping[str, JobUsage]) -> int | None:
    """Return how many GPUs a job requested, or how many were connected if these are more; None if unknown."""
    known = options.gpus(submit.kind, submit.group) if options is not None else None
    used = kept.get(submit.job_id or "")
    return max(known or 0, used.gpus) or known if used is not None else known


def _had_none(started: float | None, ended: float | None, written: float | None) -> bool:
    """Whether a job that the scheduler's file lacks certainly had no worker."""
    if written is None or ended is None:
        return started is None and ended is not None
    return started is None or written >= min(ended, started + _SOON)


def without_scheduler(
    schedulers: Iterable[JobBill], served: Mapping[str, float | None], *, now: float, closed: float | None = None
) -> list[Gap]:
    """Return when a cluster whose scheduler is restarted had no scheduler, and waited for the next one.

    Parameters
    ----------
    schedulers : iterable of JobBill
        Its scheduler jobs.
    served : mapping of str to float or None
        By the ids of jobs whose scheduler was there, since when, in epoch seconds; None: since the start of the job.
        The first job of a cluster always had a scheduler.
    now, over
        See `bill`.
    """
    started = sorted((job for job in schedulers if job.started is not None), key=lambda job: job.started or 0.0)
    were = [job for number, job in enumerate(started) if not number or job.id in served]
    ends = [served[job.id] or job.started for job in were[1:]]
    if were and not _intended(were[-1]):
        ends.append(now if closed is None else closed)
    pairs = zip(were, ends, strict=False)
    return [(job.ended, end) for job, end in pairs if job.ended is not None and end is not None and end > job.ended]


def _intended(job: JobBill) -> bool:
    """Whether a scheduler job has ended as intended, so that no other one follows."""
    state = state_named(job.state)
    return state.ended and not ended_too_early(state)


def _overlap(started: float | None, ran: float, gaps: Sequence[Gap]) -> float:
    """Return for how many of the seconds that a job ran its cluster had no scheduler."""
    if started is None:
        return 0.0
    return sum(max(0.0, min(started + ran, end) - max(started, begin)) for begin, end in gaps)


def _parts(
    used: JobUsage | None, started: float | None, ran: float | None, gpus: int | None, gaps: Sequence[Gap]
) -> tuple[float | None, float | None, float | None]:
    """Return the GPU hours before the first task of each GPU, with tasks, and without later.

    Together these are all in which the cluster had a scheduler.
    """
    if used is None or ran is None or gpus is None:
        return None, None, None
    if started is None:
        return 0.0, 0.0, 0.0
    waits = sorted(min(ran, max(0.0, first - started)) for first in used.firsts)[:gpus]
    waits += [ran] * (gpus - len(waits))
    paid = gpus * (ran - _overlap(started, ran, gaps))
    before = sum(wait - _overlap(started, wait, gaps) for wait in waits)
    busy = min(used.busy if gpus else 0.0, paid - before)
    return before / 3600, busy / 3600, max(0.0, paid - before - busy) / 3600


@dataclass(frozen=True)
class Share:
    """A part of the GPU hours.

    Attributes
    ----------
    hours : float
    of : float
        All GPU hours.
    """

    hours: float
    of: float

    @property
    def per_cent(self) -> float:
        """Per cent of all."""
        return 100 * self.hours / self.of if self.of > 0 else 0.0


def total(values: Iterable[float | None]) -> float:
    """Return the sum of what is known."""
    return sum(value for value in values if value is not None)


def share(jobs: Iterable[JobBill], part: str, of: float) -> Share:
    """Return how much of all GPU hours is of one part: ``"before"``, ``"busy"``, ``"after"`` or ``"waiting"``."""
    return Share(total(getattr(job, part) for job in jobs), of)
