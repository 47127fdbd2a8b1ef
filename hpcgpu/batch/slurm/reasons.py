"""What Slurm's own words mean: the reasons of jobs, and those of sbatch when it refuses one."""

from __future__ import annotations

import re

from hpcgpu.batch.base import Outlook, Reasons
from hpcgpu.batch.reasons import NOT_FROM_HERE

#: Reason codes (https://slurm.schedmd.com/job_reason_codes.html): pattern, outlook, sentence.
_PENDING = [
    (r"Priority", Outlook.WAIT, "other jobs have a higher priority"),
    (r"Resources", Outlook.WAIT, "no free node has the resources that it requests"),
    (r"Dependency", Outlook.WAIT, "it starts once the scheduler job has started"),
    (r"BeginTime", Outlook.WAIT, "its earliest start time is in the future; after a requeue Slurm waits two minutes"),
    (r"Cleaning|Prolog", Outlook.WAIT, "its node is being prepared"),
    (r"DependencyNeverSatisfied", Outlook.NEVER, "the job that it depends on did not succeed: cancel this job"),
    (r"PartitionTimeLimit", Outlook.NEVER, "its walltime is above the queue's limit: request a shorter `walltime`"),
    (r"PartitionNodeLimit", Outlook.NEVER, "it requests more nodes than the queue allows: reduce `nodes_per_job`"),
    (
        r"BadConstraints",
        Outlook.NEVER,
        "no node can satisfy it: check `gpus_per_node`, `gpu_type`, `constraint`, `cores` and `memory`",
    ),
    (r"InvalidAccount|AccountNotAllowed", Outlook.NEVER, "the account may not be used here: check `account`"),
    (r"InvalidQOS|QOSNotAllowed", Outlook.NEVER, "the quality of service may not be used here: check `qos`"),
    (r"JobHeldUser", Outlook.NEVER, "you hold it: release it with `scontrol release`"),
    (r"JobHeldAdmin|JobHoldMaxRequeue", Outlook.NEVER, "the system holds it: ask the site's support"),
    (r"job requeued in held state", Outlook.NEVER, "the system requeued it and holds it: ask the site's support"),
    (r"(QOS|Assoc)MaxWall\w*", Outlook.NEVER, "its walltime is above your limit: request a shorter `walltime`"),
    (
        r"(QOS|Assoc)Max\w*(PerJob|PerNode)\w*",
        Outlook.NEVER,
        "it requests more than the limit for a single job: request less",
    ),
    (
        r"(QOS|Assoc)Grp(?!\w*RunMinutes)\w*Minutes",
        Outlook.LIMIT,
        "it may use more than is left of your group's budget: request a shorter `walltime`, or more budget",
    ),
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
        "its nodes are reserved or down, often for maintenance: a shorter `walltime` may let it start earlier",
    ),
    (
        r"NodeDown|PartitionDown|PartitionInactive|Reservation\w*",
        Outlook.SITE,
        "its nodes or its queue are out of service",
    ),
]


def pending(reason: str) -> tuple[Outlook, str] | None:
    """Return what to expect of a job that waits for this reason, and a sentence."""
    code = reason.split(",", 1)[0].strip()  # "ReqNodeNotAvail, UnavailableNodes:n1"
    return next(((prospect, sentence) for pattern, prospect, sentence in _PENDING if re.fullmatch(pattern, code)), None)


REASONS = Reasons(
    pending=pending,
    failed={
        "JobLaunchFailure": "its node could not start it (often because the log cannot be written), or a signal "
        "ended it: it crashed, or the node killed it because it used too much memory: check `log_directory` and "
        "`memory`",
        "NonZeroExitCode": "its script failed",
        "RaisedSignal": "a signal ended it",
        # no signal: 24.11 reports this where 22.05 reports JobLaunchFailure
        "RaisedSignal:53": "its node could not start it (often its log cannot be written): check `log_directory`",
    },
    refused=[
        (r"requested time limit is invalid", "request a shorter `walltime`"),
        (r"invalid account", "check `account`, and whether it may use `queue`"),
        (r"invalid partition", "check `queue`"),
        (r"partition not available", "the partition accepts no jobs now: wait, or choose another `queue`"),
        (r"invalid qos", "check `qos`"),
        (r"submission failed: access/permission denied", NOT_FROM_HERE),
        (r"MaxWall", "request a shorter `walltime`"),
        (
            r"node configuration is not available",
            "no node can satisfy it: check `gpus_per_node`, `gpu_type`, `constraint`, `cores` and `memory`",
        ),
    ],
)
