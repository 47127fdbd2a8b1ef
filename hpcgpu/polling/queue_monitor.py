"""The one poller of a cluster: joins the queue's answers over time into one view of every job.

`observe` decides and is pure. `Monitor.query` queries, as often as `hpcgpu.polling.poll_interval` allows. A failed poll
is no answer and keeps the last state. A job that the queue no longer shows is looked up in the accounting;
`presumed_ended` is the one rule for when it counts as ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpcgpu.batch.base import BatchSystem, JobState, JobStatus
from hpcgpu.batch.reasons import DROPPED
from hpcgpu.errors import BatchError
from hpcgpu.polling.poll_interval import Cadence

#: Seconds for which a job may be missing from the queue, before it counts as ended.
GRACE = 60.0
#: A job that was submitted less than this many seconds ago cannot be missing because it ended long ago.
_RECENT = 600.0
#: A job counts as ended only after this many answers in a row without it: a single answer may leave out a live job.
_ANSWERS = 2


def presumed_ended(*, missing: float, answers: int, cancelled: bool = False, grace: float = GRACE) -> bool:
    """Whether a job counts as ended if neither the queue nor the accounting shows it any more.

    Parameters
    ----------
    missing : float
        Seconds since the queue first left it out.
    answers : int
        Answers of the queue in a row that left it out. Polls that failed do not count.
    cancelled : bool, default False
        Whether the job was cancelled: then its end is expected, and no grace period is needed.
    grace : float, default 60
    """
    return answers >= _ANSWERS and (cancelled or missing >= grace)


@dataclass(frozen=True)
class View:
    """What is known of one job.

    Attributes
    ----------
    status : JobStatus
    submitted : float
        Epoch seconds of its submit.
    missing_since : float or None
        Since when the queue no longer shows it.
    answers : int
        Answers in a row since then that left it out.
    polled : bool
        Whether the queue has answered a query for it since the submit.
    seen : bool
        Whether any answer has contained the job.
    """

    status: JobStatus
    submitted: float
    missing_since: float | None = None
    answers: int = 0
    polled: bool = True
    seen: bool = True


def observe(
    known: Mapping[str, View],
    answer: Mapping[str, JobStatus],
    accounting: Mapping[str, JobStatus],
    *,
    now: float,
    grace: float,
) -> dict[str, View]:
    """Join one answer of the queue with the known views of the jobs.

    Parameters
    ----------
    known : mapping of job id to View
    answer : mapping of job id to JobStatus
        The jobs that the queue reported.
    accounting : mapping of job id to JobStatus
        The jobs that the accounting reported, of those that the queue left out.
    now : float
        Epoch seconds.
    grace : float
        Seconds after which a job that neither the queue nor the accounting shows counts as ended.

    Returns
    -------
    dict of job id to View
        One for each known job.
    """
    views = {}
    for job_id, view in known.items():
        status = answer.get(job_id)
        recorded = accounting.get(job_id)
        if status is None and recorded is not None and recorded.state.ended:
            status = recorded
        if view.status.state.ended:
            views[job_id] = view
        elif status is not None:
            if status.state is JobState.UNKNOWN:  # an unknown state: keep the last one, with the new word as reason
                status = replace(status, state=view.status.state)
            views[job_id] = View(replace(status, node=status.node or view.status.node), view.submitted)
        else:
            since = view.missing_since if view.missing_since is not None else now
            answers = view.answers + 1
            state = JobState.UNKNOWN
            reason = "the queue no longer knows it"
            if presumed_ended(missing=now - since, answers=answers, grace=grace):
                state, reason = JobState.FAILED, f"the queue has not known it for {now - since:.0f} s"
                if not view.seen and now - view.submitted < _RECENT:
                    reason += f", nor ever since its submit: it ended at once, or {DROPPED}"
            status = replace(view.status, state=state, reason=reason, forgotten=True)
            views[job_id] = View(status, view.submitted, since, answers, seen=view.seen)
    return views


@dataclass(frozen=True)
class Answer:
    """The answer of the batch system to one query for these jobs; `error` is the reason if there is none."""

    job_ids: frozenset[str]
    queue: Mapping[str, JobStatus] = field(default_factory=dict)
    accounting: Mapping[str, JobStatus] = field(default_factory=dict)
    error: str = ""


@dataclass
class Monitor:
    """The view of all jobs of one cluster.

    `query` blocks and changes nothing. `record` changes the view and does not block.

    Parameters
    ----------
    batch : BatchSystem
    grace : float, default 60
        Seconds for which a job may be missing from the queue before it counts as ended.
    cadence : Cadence, optional
        When the next poll is due; `record` updates it.
    """

    batch: BatchSystem
    grace: float = GRACE
    cadence: Cadence = field(default_factory=Cadence)
    views: dict[str, View] = field(default_factory=dict)
    error: str = ""
    #: Epoch seconds of the last answer on all jobs; None before the first.
    answered_at: float | None = None

    def watch(self, job_id: str, name: str, *, now: float) -> None:
        """Begin to watch a job that was just submitted."""
        self.views[job_id] = View(
            JobStatus(job_id=job_id, state=JobState.PENDING, name=name), now, polled=False, seen=False
        )

    def proven(self, job_id: str) -> None:
        """Record that a process of the job is connected: it runs, even if the queue no longer shows it."""
        view = self.views.get(job_id)
        if view is not None and view.missing_since is not None and view.status.state.ended:
            self.views[job_id] = replace(view, status=replace(view.status, state=JobState.UNKNOWN))

    def alive(self) -> frozenset[str]:
        """Ids of the jobs that have not ended, as far as is known."""
        return frozenset(job_id for job_id, view in list(self.views.items()) if not view.status.state.ended)

    def ended(self) -> frozenset[str]:
        """Return the ids of the jobs that the batch system itself reported as ended.

        A job that the queue no longer shows may still run.
        """
        views = list(self.views.items())
        return frozenset(job_id for job_id, view in views if view.status.state.ended and view.missing_since is None)

    def query(self, job_ids: frozenset[str]) -> Answer:
        """Query the queue once for these jobs, and the accounting for those that the queue left out."""
        if not job_ids:
            return Answer(job_ids)
        try:
            queue = self.batch.poll(job_ids)
            missing = job_ids - set(queue)
            return Answer(job_ids, queue, self.batch.ended(missing) if missing else {})
        except BatchError as error:
            return Answer(job_ids, error=str(error))

    def record(self, answer: Answer, *, now: float, waiting: bool | None = None) -> None:
        """Record an answer.

        Parameters
        ----------
        answer : Answer
        now : float
            Epoch seconds.
        waiting : bool, optional
            Whether somebody waits for a change. Default: whether a job is pending, or the queue does not show it.
        """
        self.error = answer.error
        if answer.error:
            self.cadence.failed(now=now)
            return
        if answer.job_ids >= self.alive():
            self.answered_at = now
        known = {job_id: self.views[job_id] for job_id in answer.job_ids if job_id in self.views}
        self.views.update(observe(known, answer.queue, answer.accounting, now=now, grace=self.grace))
        states = {job_id: view.status.state for job_id, view in list(self.views.items())}
        unsettled = any(state in (JobState.PENDING, JobState.UNKNOWN) for state in states.values())
        self.cadence.answered(states, now=now, waiting=unsettled if waiting is None else waiting)

    def poll_if_due(self, *, now: float, waiting: bool | None = None) -> bool:
        """Poll for all jobs that have not ended, if a poll is due; return whether it was due. Blocks."""
        if not self.cadence.due(now=now):
            return False
        self.record(self.query(self.alive()), now=now, waiting=waiting)
        return True
