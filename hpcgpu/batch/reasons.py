"""Why a job waits or ended, in words that a user can act on. Pure functions; the batch system's own word is always kept."""

from __future__ import annotations

import enum
import re

from hpcgpu.batch.base import JobState, JobStatus

__all__ = ["Outlook", "advice", "explain", "outlook"]


class Outlook(enum.Enum):
    """What to expect of a job that waits."""

    WAIT = "it will start by itself"
    LIMIT = "it waits for other jobs to end"
    NEVER = "it will never start as it is"
    SITE = "something at the site keeps it from starting"


#: Slurm's reason codes (https://slurm.schedmd.com/job_reason_codes.html): pattern, outlook, sentence.
_REASONS: list[tuple[str, Outlook, str]] = [
    (r"None|", Outlook.WAIT, "the batch system has not considered it yet"),
    (r"Priority", Outlook.WAIT, "other jobs have a higher priority"),
    (r"Resources", Outlook.WAIT, "no free node has what it asks for"),
    (r"Dependency", Outlook.WAIT, "it starts once the scheduler job has started"),
    (r"BeginTime", Outlook.WAIT, "its earliest start time is in the future; after a requeue that is two minutes away"),
    (r"Cleaning|Prolog", Outlook.WAIT, "its node is being prepared"),
    (r"DependencyNeverSatisfied", Outlook.NEVER, "the job that it depends on has ended, so cancel this one"),
    (r"PartitionTimeLimit", Outlook.NEVER, "its walltime is above the queue's limit: ask for a shorter `walltime`"),
    (r"PartitionNodeLimit", Outlook.NEVER, "it asks for more nodes than the queue gives: reduce `nodes_per_job`"),
    (r"BadConstraints", Outlook.NEVER, "no node can satisfy it: check `gpu_type`, `constraint`, `cores` and `memory`"),
    (r"InvalidAccount|AccountNotAllowed", Outlook.NEVER, "the account may not be used here: check `account`"),
    (r"InvalidQOS|QOSNotAllowed", Outlook.NEVER, "the quality of service may not be used here: check `qos`"),
    (r"JobHeldUser", Outlook.NEVER, "you hold it: release it with `scontrol release`"),
    (r"JobHeldAdmin|JobHoldMaxRequeue", Outlook.NEVER, "the system holds it: ask the site's support"),
    (r"(QOS|Assoc)MaxWall\w*", Outlook.NEVER, "its walltime is above your limit: ask for a shorter `walltime`"),
    (r"(QOS|Assoc)Max\w*(PerJob|PerNode)\w*", Outlook.NEVER, "it asks for more than the limit for a single job: reduce what it asks for"),
    (r"(QOS|Assoc)Grp\w*", Outlook.LIMIT, "your group has reached its limit: other jobs must end first"),
    (
        r"(QOS|Assoc)Max\w*|Max\w*PerAccount|JobArrayTaskLimit",
        Outlook.LIMIT,
        "you have reached your limit: other jobs of yours must end first",
    ),
    (r"Licenses", Outlook.SITE, "it waits for a licence"),
    (
        r"ReqNodeNotAvail",
        Outlook.SITE,
        "its nodes are reserved or down, often for maintenance: with a shorter `walltime` it may run before that",
    ),
    (r"NodeDown|PartitionDown|PartitionInactive|Reservation\w*", Outlook.SITE, "its nodes or its queue are out of service"),
]

#: PBS's comments (OpenPBS, ``job_info.c`` of its scheduler; those recorded in tests/queue), and the attributes that hold a job. The first
#: that is found counts.
_COMMENTS: list[tuple[str, Outlook, str]] = [
    (
        r"Can Never Run: .*resource",
        Outlook.NEVER,
        "no node can ever give what it asks for: check `cores`, `memory`, `gpus_per_node`, `gpu_type` and `nodes_per_job`",
    ),
    (r"Can Never Run", Outlook.NEVER, "it can never run as it is: change what it asks for"),
    (
        r"Not Running: .*; (no node has|\d+ times)",
        Outlook.NEVER,
        "no node of its queue is large enough: check `cores`, `memory`, `gpus_per_node`, `gpu_type` and `nodes_per_job`",
    ),
    # Before the holds, as it is held too.
    (r".*too many failed attempts", Outlook.NEVER, "PBS could not start it several times and now holds it: ask the site's support"),
    (r"Hold_Types = \w*u", Outlook.NEVER, "you hold it: release it with `qrls`"),
    (r"(Hold_Types = s, )?depend = ", Outlook.WAIT, "it starts once the scheduler job has started"),
    (r"Hold_Types = \w*[osp]", Outlook.NEVER, "the system holds it: ask the site's support"),
    (
        r"Not Running: .*(Insufficient amount|free nodes|right type of nodes|too few free)",
        Outlook.WAIT,
        "no free node has what it asks for",
    ),
    (
        r"Not Running: .*(limit|would exceed)",
        Outlook.LIMIT,
        "the limit on running jobs is reached, yours or that of all users: other jobs must end first",
    ),
    (
        r"Not Running: .*([Dd]edicated|reservation|primetime|cross into)",
        Outlook.SITE,
        "it would still run when a reserved time begins, often maintenance: with a shorter `walltime` it may run before that",
    ),
    (
        r"Not Running: .*([Qq]ueue .*not (started|an execution)|not started|ineligible state|provision)",
        Outlook.SITE,
        "its nodes or its queue are out of service",
    ),
    (r"Not Running: .*(top job|strict|fairshare|preempt|threshold)", Outlook.WAIT, "other jobs have a higher priority"),
    (r"Not Running", Outlook.WAIT, "the batch system does not run it yet"),
]
#: What PBS says of a shortage: requested, available, total.
_SHORT = re.compile(r"Not Running: .*\(R: (\d+)(\w*) A: \w* ?T: (\d+)(\w*)\)")

#: What to check when a submit was refused, by the words of sbatch and qsub.
_REFUSALS: list[tuple[str, str]] = [
    (
        r"violates queue and/or server resource limits",
        "check `walltime` first, then `cores`, `memory`, `gpus_per_node` and `queue`",
    ),
    (r"requested time limit is invalid|(exceeds|above) .*walltime|walltime .*(exceeds|limit)", "ask for a shorter `walltime`"),
    (r"invalid account", "check `account`, and whether it may use `queue`"),
    (r"invalid partition|unknown queue|access denied to queue|not an execution queue|unauthorized request", "check `queue`"),
    (r"invalid qos", "check `qos`"),
    (r"node configuration is not available", "no node can satisfy it: check `gpu_type`, `constraint`, `cores` and `memory`"),
]

_ENDS = {
    JobState.COMPLETED: "it ended by itself",
    JobState.CANCELLED: "a user or the batch system cancelled it",
    JobState.FAILED: "it ended with an error",
    JobState.TIMEOUT: "it reached the end of its walltime",
    JobState.NODE_FAIL: "its node failed",
    JobState.OUT_OF_MEMORY: "it used more memory than it asked for: increase `memory`",
    JobState.PREEMPTED: "a job of higher priority preempted it",
    JobState.RUNNING: "",
    JobState.COMPLETING: "it is ending",
    JobState.UNKNOWN: "the batch system says nothing about it",
}

_FAILURES = {
    "JobLaunchFailure": "the node could not start it, often because it cannot write the log there, or killed it because of its memory",
    "NonZeroExitCode": "its script failed",
    "RaisedSignal": "a signal ended it",
}


def _match(reason: str) -> tuple[Outlook, str] | None:
    if (short := _SHORT.match(reason)) and short[2] == short[4] and int(short[1]) > int(short[3]):
        reason = reason.replace("Not Running: ", "Can Never Run: ", 1)
    for pattern, prospect, sentence in _COMMENTS:
        if re.match(pattern, reason):
            return prospect, sentence
    code = reason.split(",", 1)[0].strip()  # "ReqNodeNotAvail, UnavailableNodes:n1"
    for pattern, prospect, sentence in _REASONS:
        if re.fullmatch(pattern, code):
            return prospect, sentence
    return None


def outlook(status: JobStatus) -> Outlook:
    """Return what to expect of a pending job; reasons unheard of are waited for."""
    found = _match(status.reason)
    return found[0] if found else Outlook.WAIT


def explain(status: JobStatus) -> str:
    """Return one sentence on why a job waits or ended, with the batch system's own word in brackets."""
    if status.state is JobState.PENDING:
        found = _match(status.reason)
        sentence = found[1] if found else "the batch system gives this reason"
    else:
        sentence = _ENDS.get(status.state, "")
        if status.state is JobState.FAILED:
            sentence = _FAILURES.get(status.reason.split(":", 1)[0].split(",", 1)[0], sentence)
        if status.exit_code:
            sentence = f"{sentence}, exit code {status.exit_code}"
    own = status.reason
    return f"{sentence} [{own}]" if own and sentence else sentence or own


def advice(words: str) -> str:
    """Return what to check when a submit was refused with these words, to be put behind them; empty where nothing is known."""
    found = next((hint for pattern, hint in _REFUSALS if re.search(pattern, words, re.IGNORECASE)), "")
    return f". {found[0].upper()}{found[1:]}" if found else ""
