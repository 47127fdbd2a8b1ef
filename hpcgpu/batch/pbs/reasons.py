"""What PBS's own words mean: the comments of jobs, and the words of qsub when it refuses one."""

from __future__ import annotations

import re

from hpcgpu.batch.base import Outlook, Reasons
from hpcgpu.batch.reasons import NOT_FROM_HERE

#: Comments of jobs (OpenPBS, ``job_info.c`` of its scheduler; those recorded in tests/queue), and the attributes that
#: hold a job. The first that is found counts.
_COMMENTS = [
    (
        r"Can Never Run: .*resource",
        Outlook.NEVER,
        "no node can satisfy it: check `cores`, `memory`, `gpus_per_node`, `gpu_type`, `select_extra` and "
        "`nodes_per_job`",
    ),
    (
        r"Can Never Run: Not enough total nodes",
        Outlook.NEVER,
        "there are fewer such nodes than it requests: check `nodes_per_job`",
    ),
    (r"Can Never Run", Outlook.NEVER, "it can never run: change the resources that it requests"),
    (
        r"Not Running: .*; (no node has|the job requests \d+ chunks)",
        Outlook.NEVER,
        "no node of its queue is large enough: check `cores`, `memory`, `gpus_per_node`, `gpu_type`, `select_extra` "
        "and `nodes_per_job`",
    ),
    (r"Not Running: .*; reservation \w+ from ", Outlook.WAIT, "it waits for the start of its reservation"),
    # Before the holds, because such a job is held too.
    (
        r".*too many failed attempts",
        Outlook.NEVER,
        "PBS could not start it several times and now holds it: ask the site's support",
    ),
    (r"Hold_Types = \w*u", Outlook.NEVER, "you hold it: release it with `qrls`"),
    (r"(Hold_Types = s, )?depend = ", Outlook.WAIT, "it starts once the scheduler job has started"),
    (r"Hold_Types = \w*p", Outlook.NEVER, "PBS holds it, because the password that it has for you is wrong"),
    (r"Hold_Types = \w*[os]", Outlook.SITE, "an operator or the system holds it: it waits until the site releases it"),
    (
        r"Not Running: .*(Insufficient amount|available resources|free nodes|right type of nodes|too few free|"
        r"pack placement)",
        Outlook.WAIT,
        "no free node has the resources that it requests",
    ),
    (
        r"Not Running: .*(limit|would exceed)",
        Outlook.LIMIT,
        "the limit on running jobs is reached, yours or that of all users: other jobs must end first",
    ),
    (
        r"Not Running: .*([Dd]edicated|reservation|primetime|cross into)",
        Outlook.SITE,
        "it would still be running when a reserved time begins, often for maintenance: a shorter `walltime` may "
        "let it start earlier",
    ),
    (
        r"Not Running: .*([Qq]ueue .*not (started|an execution)|not started|ineligible state|provision)",
        Outlook.SITE,
        "its nodes or its queue are out of service",
    ),
    (r"Not Running: .*(top job|strict|fairshare|preempt|threshold)", Outlook.WAIT, "other jobs have a higher priority"),
    (r"Not Running", Outlook.WAIT, "the batch system does not run it yet"),
]
#: PBS's comment on a shortage: requested, available, total.
_SHORT = re.compile(r"Not Running: .*\(R: (\d+)(\w*) A: \w* ?T: (\d+)(\w*)\)")


def pending(reason: str) -> tuple[Outlook, str] | None:
    """Return what to expect of a job that waits for this reason, and a sentence."""
    if (short := _SHORT.match(reason)) and short[2] == short[4] and int(short[1]) > int(short[3]):
        reason = reason.replace("Not Running: ", "Can Never Run: ", 1)
    return next(((prospect, sentence) for pattern, prospect, sentence in _COMMENTS if re.match(pattern, reason)), None)


REASONS = Reasons(
    pending=pending,
    refused=[
        (
            r"violates queue and/or server resource limits",
            "check `walltime` first, then `cores`, `memory`, `gpus_per_node` and `queue`",
        ),
        (r"(exceeds|above) .*walltime|walltime .*(exceeds|limit)", "request a shorter `walltime`"),
        (r"invalid account", "check `account`, and whether it may use `queue`"),
        (r"bad uid for job execution", NOT_FROM_HERE),
        (r"unknown queue|access denied to queue|not an execution queue|unauthorized request", "check `queue`"),
    ],
)
