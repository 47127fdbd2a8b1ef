"""What the jobs of a cluster cost and what they did. Pure: the facts and the time are arguments.

What is not known is None, and is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypedDict, cast

from dask.utils import format_bytes

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import FORGOTTEN, cancel_of_ours, explain
from hpcgpu.store.journal import Submit
from hpcgpu.store.usage import JobUsage

__all__ = ["JobBill", "JobBillJSON", "Share", "advice", "bill", "share", "total"]

#: GPU hours below which nothing is advised: a short test says nothing about the work to come.
_WORTH = 1.0
#: Parts of the GPU hours of workers from which on waiting is worth a sentence.
_MUCH = 0.25
#: The part of the memory below which a GPU with half as much would do.
_LITTLE_MEMORY = 0.4
#: Per cent that GPUs compute while they have tasks, below which that is worth a sentence.
_LITTLE_USE = 20.0
#: Seconds by which clocks may differ.
_CLOCKS = 5.0
#: Why the manager cancelled a job.
_UNNEEDED = "the cluster no longer needed it"
#: Seconds after which the file of the scheduler has a job that has workers, or never will.
_SOON = 120.0
#: Sentences at most.
_SENTENCES = 2


class JobBillJSON(TypedDict):
    """What a job cost and did. What is not known is null."""

    #: The id that the batch system gave it; empty if it is not known.
    id: str
    name: str
    #: ``scheduler`` or ``worker``.
    kind: str
    #: Its worker group; empty for the scheduler job.
    group: str
    #: How it ended, or its state now.
    state: str
    #: Why, in words.
    reason: str
    #: GPUs that it requested.
    gpus: int | None
    #: Seconds since 1970 of its submit, start and end.
    submitted: float
    started: float | None
    ended: float | None
    #: Whether its end is the last that its workers were heard of, because the queue has forgotten it.
    ended_later: bool
    #: Seconds that it waited and ran.
    waited: float | None
    ran: float | None
    #: GPU hours that it cost: its GPUs, times the hours that it ran.
    gpu_hours: float | None
    #: Of those, the hours of GPUs whose worker had no task yet, that had tasks or computed, and that had none later.
    before: float | None
    busy: float | None
    after: float | None
    #: Of its GPUs, while workers were connected: per cent, and bytes of the whole of one GPU.
    utilization_mean: float | None
    utilization_peak: float | None
    memory_mean: float | None
    memory_peak: float | None
    memory_total: int | None
    #: Tasks that its workers did, and that were lost with workers.
    tasks_done: int | None
    tasks_lost: int | None
    #: Bytes that its workers gave to others, and the most that they had on disk.
    sent: int | None
    spilled: int | None


@dataclass(frozen=True, kw_only=True)
class JobBill:
    """What a job cost and did; what is not known is None.

    Attributes
    ----------
    id, name, kind, group : str
    state, reason : str
        How it ended or its state now, and why.
    gpus : int or None
        GPUs that it requested.
    submitted : float
        Epoch seconds.
    started, ended : float or None
        Epoch seconds.
    ended_later : bool
        Whether `ended` is the time at which its workers were last connected: the queue has forgotten the end.
    waited, ran : float or None
        Seconds.
    gpu_hours : float or None
        Its GPUs, times the hours that it ran.
    before, busy, after : float or None
        The parts of `gpu_hours` before a GPU's first task, with tasks or computing, and idle after the first task.
    utilization_mean, utilization_peak : float or None
        Per cent.
    memory_mean, memory_peak, memory_total : float or None
        Bytes of one GPU.
    tasks_done, tasks_lost : int or None
    sent, spilled : int or None
        Bytes that its workers gave to others, and the most that they had on disk.
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
    utilization_mean: float | None = None
    utilization_peak: float | None = None
    memory_mean: float | None = None
    memory_peak: float | None = None
    memory_total: int | None = None
    tasks_done: int | None = None
    tasks_lost: int | None = None
    sent: int | None = None
    spilled: int | None = None

    def as_json(self) -> JobBillJSON:
        """Return it as ``--json`` prints it."""
        return cast(JobBillJSON, asdict(self))


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


def _times(submit: Submit, used: JobUsage | None, status: JobStatus | None, over: float | None) -> _Times:
    began = used.began if used is not None else None
    if submit.how is not None:  # what the queue said when somebody saw the end
        how = submit.how
        named = next((state for state in JobState if state.value == how.state), JobState.UNKNOWN)
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
    heard = used.last if used is not None and used.last else None
    if submit.ended or over is not None:
        cancelled = over is not None and not submit.ended and (heard is None or heard >= over - 120)
        reason = _UNNEEDED if submit.cancelled else "with the cluster" if cancelled else FORGOTTEN
        return _Times("ended", reason, began, heard, later=heard is not None, known=False)
    return _Times("unknown", "the queue does not know it", began, heard, later=heard is not None, known=False)


def _ended(state: JobState, reason: str, started: float | None, ended: float | None, used: JobUsage | None) -> _Times:
    """Return the times of a job by what the queue said of its end, and by what was heard of it where that is less."""
    began = used.began if used is not None else None
    heard = used.last if used is not None and used.last else None
    end = ended if ended is not None else heard
    return _Times(state.value, reason, _first(started, began), end, later=ended is None and heard is not None)


def _first(started: float | None, began: float | None) -> float | None:
    """Return when a job first started.

    A queue reports the last start of a job that it has run again (`qrerun`), but its workers were heard of before:
    their hours were paid too, and the pause between the runs counts with them.
    """
    if started is not None and began is not None and began < started - _CLOCKS:
        return began
    return started or began


def _cancelled(submit: Submit, times: _Times, over: float | None) -> str:
    """Return why hpcgpu cancelled a job; empty if somebody else did, or if it was not cancelled."""
    named = next((state for state in JobState if state.value == times.state), JobState.UNKNOWN)
    if not cancel_of_ours(named, decided=submit.cancelled, ended=times.ended, over=over):
        return ""
    return _UNNEEDED if submit.cancelled else "with the cluster"


def bill(  # noqa: PLR0913  # what is known of one job, from four places
    submit: Submit,
    used: JobUsage | None,
    status: JobStatus | None,
    gpus: int | None,
    *,
    now: float,
    over: float | None = None,
    written: float | None = None,
) -> JobBill:
    """Return what one job cost and did.

    Parameters
    ----------
    submit : Submit
        What the journal says.
    used : JobUsage or None
        What the scheduler kept.
    status : JobStatus or None
        What the queue or the accounting says; None if neither knows it.
    gpus : int or None
        GPUs that it requested; None if that is not known.
    now : float
        Epoch seconds.
    over : float or None
        Epoch seconds at which all jobs of the cluster were cancelled; None if they were not.
    written : float or None
        Epoch seconds at which the scheduler wrote its file, if that has all jobs that ever had workers: then a job that
        it lacks had none.
    """
    over = over if over is not None and submit.time <= over else None
    times = _times(submit, used, status, over)
    own = _cancelled(submit, times, over)
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
    before, busy, after = _parts(used, times.started, ran, gpus) if worker else (None, None, None)
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


def _had_none(started: float | None, ended: float | None, written: float | None) -> bool:
    """Whether a job that the scheduler's file lacks certainly had no worker."""
    if written is None or ended is None:
        return started is None and ended is not None
    return started is None or written >= min(ended, started + _SOON)


def _parts(
    used: JobUsage | None, started: float | None, ran: float | None, gpus: int | None
) -> tuple[float | None, float | None, float | None]:
    """Return the GPU hours before the first task of each GPU, with tasks, and without later: together all of them."""
    if used is None or ran is None or gpus is None:
        return None, None, None
    if started is None:
        return 0.0, 0.0, 0.0
    paid = gpus * ran
    waits = sorted(min(ran, max(0.0, first - started)) for first in used.firsts)[:gpus]
    before = sum(waits) + (gpus - len(waits)) * ran
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
    """Return how much of all GPU hours is of one part: ``"before"``, ``"busy"`` or ``"after"``."""
    return Share(total(getattr(job, part) for job in jobs), of)


def advice(jobs: Sequence[JobBill], used: Iterable[JobUsage] = ()) -> list[str]:
    """Return what would have cost less, in two sentences at most: what costs most first.

    Parameters
    ----------
    jobs : sequence of JobBill
    used : iterable of JobUsage
        What the scheduler kept of them.
    """
    workers = [job for job in jobs if job.kind == "worker"]
    paid = total(job.gpu_hours for job in jobs)
    if paid < _WORTH:
        return []
    before, after = share(workers, "before", paid), share(workers, "after", paid)
    own = Share(total(job.gpu_hours for job in jobs if job.kind == "scheduler"), paid)
    found: list[tuple[float, str]] = []
    if before.hours >= _MUCH * paid:
        text = f"{before.per_cent:.0f} % of the GPU hours were before the first task: start with fewer jobs, or adapt"
        found.append((before.hours, f"{text} the number of jobs to the work."))
    if after.hours >= _MUCH * paid:
        text = f"{after.per_cent:.0f} % of the GPU hours were idle after the first task: adapt the number of jobs"
        found.append((after.hours, f"{text} to the work, or close the cluster earlier."))
    if own.hours >= _MUCH * paid:
        text = f"The GPU of the scheduler job took {own.per_cent:.0f} % of the GPU hours: over TCP it needs none"
        found.append((own.hours, f"{text} unless the task graph holds GPU objects (scheduler={{'gpus_per_node': 0}})."))
    found += _too_large(workers)
    kept = list(used)
    busy, computed = sum(job.working.seconds for job in kept), sum(job.working.total for job in kept)
    if busy / 3600 >= _WORTH and computed / busy < _LITTLE_USE:
        text = f"While they had tasks, the GPUs computed {computed / busy:.0f} % of the time: larger partitions, more"
        found.append((busy / 3600 * 0.5, f"{text} threads for each worker, or CPU workers may do the same for less."))
    return [text for _, text in sorted(found, key=lambda one: -one[0])[:_SENTENCES]]


def _too_large(workers: Sequence[JobBill]) -> list[tuple[float, str]]:
    """Return a sentence if no GPU ever used much of its memory, though it worked."""
    known = [job for job in workers if job.memory_peak is not None and job.memory_total]
    busy = total(job.busy for job in known)
    if not known or busy < _WORTH:
        return []
    peak, size = max(job.memory_peak or 0.0 for job in known), min(job.memory_total or 0 for job in known)
    if peak >= _LITTLE_MEMORY * size:
        return []
    text = f"GPU memory was never above {format_bytes(round(peak))} of {format_bytes(size)}: a smaller GPU would do."
    return [(busy * 0.5, text)]
