"""What Grid Engine's own words mean: why a job waits, why a submit was refused, and how a job ended. Pure.

The words of `pending` begin with the letters of the job's state in qstat, as `hpcgpu_gridengine.answers` writes them.
"""

from __future__ import annotations

import re

from hpcgpu.batch.base import JobState, Outlook, Reasons

#: The first that is found counts.
_PENDING = [
    (
        r"\w*E\w*:.*",
        Outlook.NEVER,
        "Grid Engine could not start it, and does not try again: mend the cause; `qmod -cj` clears the error",
    ),
    (r"h\w+:.*(job dependencies|predecessor)", Outlook.WAIT, "it starts once the present scheduler job has ended"),
    (r"h\w+:", Outlook.NEVER, "it is held: release it with `qrls`, or ask who holds it"),
    (
        r".*exceeds limit",
        Outlook.LIMIT,
        "a limit of the site (a resource quota) is reached: other jobs must end first (`qquota` shows it)",
    ),
    (
        r".*(has no permission|not in (its|the) (list|project)|does not have access)",
        Outlook.NEVER,
        "you may not use these queues or this project: check `queue` and `account`",
    ),
    (
        r".*(offers only|only offers|dropped because it is (full|overloaded|temporarily))",
        Outlook.WAIT,
        "no free node has the resources that it requests",
    ),
    (r".*dropped because it is (disabled|suspended|in error)", Outlook.SITE, "its queue is out of service"),
    (r".*", Outlook.WAIT, "the batch system does not run it yet"),
]

#: "failed 37 : qmaster enforced h_rt, h_cpu, or h_vmem limit"
LIMIT = 37

REASONS = Reasons(
    pending=lambda reason: next(
        ((outlook, sentence) for pattern, outlook, sentence in _PENDING if re.match(pattern, reason)), None
    ),
    refused=[
        (r"\bJSV\b", "a program that verifies jobs at this site (JSV) does not work: ask the site"),
        (r"unknown queue|no suitable queues?.*hard queue list", "check `queue`: `qconf -sql` lists them"),
        (r"parallel environment .* does not exist", "check `parallel_environment`: `qconf -spl` lists them"),
        (r"unknown resource", "check `gpu_resource` and `memory_resource`: `qconf -sc` lists them"),
        (r"project .* does not exist|no access to project", "check `account`, which is Grid Engine's project"),
        (
            r"no suitable queues?|cannot run in",
            "no node can ever satisfy it: check `walltime`, `cores`, `memory`, `gpus_per_node`, `queue` and "
            "`parallel_environment`",
        ),
    ],
)


def ending(failed: int, status: int, *, wallclock: float, limit: float | None) -> JobState:
    """Return how a job ended, from its record in the accounting (``man sge_status``).

    Parameters
    ----------
    failed : int
        Grid Engine's code; 0 if the script ran to its end.
    status : int
        Exit status of the script; 128 + N if signal N ended it.
    wallclock : float
        Seconds for which it ran.
    limit : float or None
        The seconds that it could run: those that it requested, or those of its queue.
    """
    if failed == 0:
        return JobState.COMPLETED if status == 0 else JobState.FAILED
    if failed == LIMIT:
        return JobState.TIMEOUT if limit is not None and wallclock >= limit else JobState.OUT_OF_MEMORY
    if failed == 100 and status == 137:  # qdel sends SIGKILL; the record does not have who sent it
        return JobState.CANCELLED
    if failed in (24, 25):  # migrated, rescheduled
        return JobState.PREEMPTED
    if failed in (19, 21, 22):  # its execution host lost it
        return JobState.NODE_FAIL
    return JobState.FAILED
