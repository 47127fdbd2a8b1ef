"""Why a job waits or ended, in words that help a user to act. The batch system's own words are always kept.

The `Reasons` of each batch system, in its own package, explain those words.
"""

from __future__ import annotations

import re

from hpcgpu.batch.base import JobState, JobStatus, Outlook, Reasons

#: Reason of a job that hpcgpu cancelled: the queue does not record why it was cancelled.
OWN_CANCEL = "hpcgpu cancelled it"
#: Reason of a job that has ended, if the batch system keeps no history.
FORGOTTEN = "the queue has forgotten how it ended"
#: What may have become of a job that the queue accepted and does not show. A routing queue of PBS may drop a job
#: without a message: the history does not have the job either (seen on OpenPBS 23.06.06).
DROPPED = (
    "a queue that passes jobs on dropped it, because no queue behind it takes it. Check its log, `queue`, and the "
    "limits of the queues behind that one, `walltime` first"
)
#: What a refusal may mean that names no option: the scheduler job submits too, from a compute node.
NOT_FROM_HERE = (
    "it may accept no job of yours from this host. If this is a compute node, run on a login node: hpcgpu manage NAME"
)

_SUSPENDED = "the batch system has suspended it: nothing in it runs until the batch system resumes it"
_OUT_OF_REACH = "the batch system has lost contact with its node"
_ENDS = {
    JobState.COMPLETED: "it ended by itself",
    JobState.CANCELLED: "a user or the batch system cancelled it",
    JobState.FAILED: "it ended with an error",
    JobState.TIMEOUT: "it reached the end of its walltime",
    JobState.NODE_FAIL: "its node failed",
    JobState.OUT_OF_MEMORY: "it used more memory than it requested: increase `memory`",
    JobState.PREEMPTED: "a job of higher priority preempted it",
    JobState.RUNNING: "",
    JobState.COMPLETING: "it is ending",
    JobState.UNKNOWN: "the batch system gives no information about it",
}


#: States that queues report for a cancelled job: the state depends on how its processes handle the signal.
_CANCELS = frozenset({JobState.CANCELLED, JobState.FAILED, JobState.COMPLETED})
#: Seconds by which the clocks of the queue and of this machine may differ.
_CLOCKS = 5.0


def cancel_of_ours(state: JobState, *, decided: bool, ended: float | None = None, closed: float | None = None) -> bool:
    """Whether a job ended because hpcgpu cancelled it, whatever state the queue reports.

    Parameters
    ----------
    state : JobState
        The state that the queue reports.
    decided : bool
        Whether the journal records the decision to cancel this job.
    ended : float or None, optional
        When it ended, epoch seconds, by the clock of the queue.
    closed : float or None, optional
        When all jobs of the cluster were cancelled, epoch seconds; None if they were not.
    """
    if state not in _CANCELS or decided or closed is None:
        return state in _CANCELS and decided
    if state is JobState.CANCELLED:
        return ended is None or ended >= closed - _CLOCKS
    return ended is not None and ended >= closed  # a job that failed just before may be why the cluster was closed


def _pending(status: JobStatus) -> tuple[Outlook, str]:
    if not status.reason:
        return Outlook.WAIT, "the batch system has not considered it yet"
    return status.words.pending(status.reason) or (Outlook.WAIT, "the batch system gives this reason")


def outlook(status: JobStatus) -> Outlook:
    """Return what to expect of a pending job; a job with an unknown reason is expected to start by itself."""
    return _pending(status)[0]


def explain(status: JobStatus, *, kind: str = "worker") -> str:
    """Return one sentence on why a job waits or ended, with the batch system's own words in brackets.

    Options that the scheduler job does not inherit from the workers are named as its own.
    """
    if status.state is JobState.PENDING:
        sentence = _pending(status)[1]
    elif status.suspended:
        sentence = _SUSPENDED
    elif status.out_of_reach:
        sentence = _OUT_OF_REACH
        if kind == "scheduler" and status.halted:
            sentence += ": wait until the node is back, or stop the cluster and start it again"
    else:
        sentence = _ENDS.get(status.state, "")
        if status.state is JobState.FAILED:
            code = re.split("[(,]", status.reason, maxsplit=1)[0]  # RaisedSignal:53(Real-time signal 19)
            words = status.words.failed
            sentence = FORGOTTEN if status.forgotten else sentence
            sentence = words.get(code) or words.get(code.split(":", 1)[0], sentence)
        if status.exit_code:
            sentence = f"{sentence}, exit code {status.exit_code}"
    if kind == "scheduler":
        sentence = sentence.replace("the scheduler job has started", "the present scheduler job has ended")
        sentence = re.sub("`(cores|memory)`", r"`scheduler={'\1': ...}`", sentence)
    own = status.reason
    return f"{sentence} [{own}]" if own and sentence else sentence or own


def why_it_stays(status: JobStatus) -> str:
    """Return why a cancelled job stays in the queue, and what a user can do; empty if it ends by itself soon."""
    if status.state is not JobState.COMPLETING or not status.out_of_reach:
        return ""
    remedy = status.words.out_of_reach.format(job=status.job_id)
    return (
        f"job {status.job_id} ({status.name}) is cancelled, but stays in the queue: {explain(status)}"
        f"{'. ' if remedy else ''}{remedy}"
    )


def advice(words: str, reasons: Reasons) -> str:
    """Return what to check when a submit was refused with these words; empty if it is not known.

    It is appended to the words.
    """
    found = next((hint for pattern, hint in reasons.refused if re.search(pattern, words, re.IGNORECASE)), "")
    return f". {found[0].upper()}{found[1:]}" if found else ""
