"""Describes a job from what is known of it, for all that shows jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.batch.base import JobState, JobStatus, state_named
from hpcgpu.batch.reasons import DROPPED, FORGOTTEN, OWN_CANCEL, cancel_of_ours, explain
from hpcgpu.display.job_info import JobInfo
from hpcgpu.polling.queue_monitor import GRACE
from hpcgpu.store.journal import End, Submit


def job_info(
    status: JobStatus | None, state: JobState, *, submitted: float, began: float | None, now: float, **facts: Any
) -> JobInfo:
    """Return a job in a state, with the times and the node that the queue reports.

    Parameters
    ----------
    status : JobStatus or None
        What the queue reports; None if it does not know the job.
    state : JobState
        What is shown.
    submitted : float
        Epoch seconds.
    began : float or None
        When it started, epoch seconds; None if it has not, or if that is not known.
    now : float
        Epoch seconds.
    **facts
        Other fields of `JobInfo`.
    """
    left = status.end - now if status is not None and status.end is not None else None
    shown: dict[str, Any] = {
        "node": status.node if status is not None else "",
        "expected_start": status.expected_start if status is not None and state is JobState.PENDING else None,
        "time_left": max(0.0, left) if state is JobState.RUNNING and left is not None else None,
        "waited": max(0.0, (began or now) - submitted),
        "workers": 0,
        "log": Path(),
    }
    return JobInfo(state=state.value, submitted=submitted, started=began, **(shown | facts))


def described(submit: Submit, status: JobStatus | None, *, proven: bool = False, now: float) -> JobInfo:
    """Describe a job of a cluster that another program manages.

    Parameters
    ----------
    submit : Submit
        The job in the journal, which also has how it ended.
    status : JobStatus or None
        What the queue reports; None if it does not know the job.
    proven : bool, default False
        Whether a process of it is connected: then it runs, whatever the queue reported before.
    now : float
        Epoch seconds.
    """
    if submit.ended and status is None:
        how = submit.how or End()
        status = JobStatus(job_id="", state=state_named(how.state), start=how.start, end=how.end)
        now = how.end or submit.time
    if proven and (status is None or status.state in (JobState.PENDING, JobState.UNKNOWN)):
        state, reason = JobState.RUNNING, ""
    elif status is None:
        state, reason = JobState.UNKNOWN, "the queue does not know it"
        if now - submit.time > GRACE:
            reason += f": it has ended, or {DROPPED}"
    else:
        quiet = status.state is JobState.RUNNING and not status.halted
        state, reason = status.state, "" if quiet else explain(status, kind=submit.kind)
    forgotten = submit.ended and state is JobState.UNKNOWN
    return job_info(
        status,
        state,
        id=submit.job_id or "",
        kind=submit.kind,
        name=submit.name,
        group=submit.group if submit.kind == "worker" else "",
        reason=FORGOTTEN if forgotten else reason,
        submitted=submit.time,
        began=status.start if status is not None else None,
        ended=status.end if status is not None and (state.ended or forgotten) else None,
        now=now,
    )


def as_the_journal_records(job: JobInfo, submit: Submit | None, closed: float | None) -> JobInfo:
    """Mark a job as cancelled by hpcgpu if the journal records that, whatever the queue reports.

    Parameters
    ----------
    job : JobInfo
    submit : Submit or None
        The job's record in the journal.
    closed : float or None
        When the cluster was closed or stopped, epoch seconds. The clocks of the queue and of this machine may differ.
    """
    state, decided = JobState(job.state), submit is not None and submit.unwanted
    if submit is not None and submit.before_close:
        closed = None
    if cancel_of_ours(state, decided=decided, ended=job.ended, closed=closed):
        return replace(job, state=JobState.CANCELLED.value, reason=OWN_CANCEL)
    # a job with workers moves their data first; the cancel of a pending job may come too late
    ends = not job.workers and (state in (JobState.RUNNING, JobState.COMPLETING) and (decided or closed is not None))
    if ends or (state is JobState.PENDING and closed is not None):
        return replace(job, state=JobState.COMPLETING.value, reason=OWN_CANCEL, time_left=None, expected_start=None)
    return job
