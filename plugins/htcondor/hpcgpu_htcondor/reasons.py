"""What HTCondor's own words mean: why a job waits, why a submit was refused, and how a job ended. Pure.

A hold is written ``hold CODE: words``, with HTCondor's HoldReasonCode, and by a full disk ``hold CODE ERRNO: words``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from hpcgpu.batch.base import JobState, Outlook, Reasons

#: The first that is found counts.
_PENDING = [
    (r"hold (1|15):", Outlook.NEVER, "it is held: release it with `condor_release`, or ask who holds it"),
    (r"hold (3|26):", Outlook.NEVER, "a policy of the site holds it"),
    (r"hold ", Outlook.NEVER, "HTCondor holds it: mend what it names, and remove it with `condor_rm`"),
    (r"no machine of the pool", Outlook.NEVER, "it can never start: request less"),
    (r"concurrency limit", Outlook.LIMIT, "a limit of the pool (`concurrency_limits`) is reached: other jobs must end"),
    (
        r".*(group quota|submitter limit)",
        Outlook.LIMIT,
        "the quota of its accounting group is used: other jobs must end",
    ),
    (r"insufficient priority|PREEMPTION", Outlook.WAIT, "jobs of others have priority (`condor_userprio` shows it)"),
    (r"no match found", Outlook.WAIT, "no free slot has what it requests: `condor_q -better-analyze` says more"),
    (r".*", Outlook.WAIT, "the batch system does not run it yet"),
]
_COULD_NOT_START = "HTCondor could not start its script"
_NO_FILES = "its machine cannot reach the files: all machines must share the filesystem of the cluster directory"
#: Errors of the system, which HTCondor reports as HoldReasonSubCode.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_DISK = "the disk of the file that it names is full, or your quota is used: make room there"

REASONS = Reasons(
    pending=lambda reason: next(
        ((outlook, sentence) for pattern, outlook, sentence in _PENDING if re.match(pattern, reason)), None
    ),
    failed={"hold 6": _COULD_NOT_START, "hold 7": _NO_FILES, "hold 8": _NO_FILES, "hold 14": _NO_FILES}
    | {f"hold {code} {number}": _FULL_DISK for code in (6, 7, 8, 14) for number in _FULL},
    refused=[
        (r"Requirements", "check `requirements`, an expression of HTCondor"),
        (r"request_?cpus", "check `cores`"),
        (r"request_?memory", "check `memory`"),
        (r"request_?gpus", "check `gpus_per_node`"),
        (r"accounting_?group", "check `account`, which is HTCondor's accounting group"),
        (r"Parse error", "check `job_extra_directives`"),
    ],
    out_of_reach="If its machine is off, `condor_rm -forcex {job}` removes it at once",
)
#: A sequence for terminals, or a control character.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f]")
#: How a job ended whose hold has this code.
_HOLDS = {
    1: JobState.CANCELLED,
    34: JobState.OUT_OF_MEMORY,
    46: JobState.TIMEOUT,
    47: JobState.TIMEOUT,
}


def hold(job: Mapping[str, Any], prefix: str = "") -> str:
    """Return the hold of a job in words; empty if it has none."""
    code = job.get(f"{prefix}HoldReasonCode")
    number = job.get(f"{prefix}HoldReasonSubCode")
    code = f"{code} {number}" if code is not None and number in _FULL else code
    return f"hold {code}: {plain(job.get(f'{prefix}HoldReason')) or 'no reason was given'}" if code is not None else ""


def plain(text: object) -> str:
    """Return a text on one line, without what it would do to a terminal: users write the reasons of holds."""
    return " ".join(_CONTROL.sub(" ", str(text or "")).split())


def ending(job: Mapping[str, Any]) -> tuple[JobState, str]:
    """Return how a job ended, and HTCondor's words. In the queue it has ended if it is held or idle again."""
    status = job.get("JobStatus")
    if status == 4:
        code = exit_code(job)
        return (JobState.COMPLETED if code == 0 else JobState.FAILED), ""
    if status == 5:
        return _HOLDS.get(job.get("HoldReasonCode", 0), JobState.FAILED), hold(job)
    removed = plain(job.get("RemoveReason"))
    if status == 3 and "-forcex" in removed and job.get("JobDisconnectedDate"):  # no contact: its machine is off
        return JobState.NODE_FAIL, removed
    if status == 3 and "PeriodicRemove" not in removed:  # by a user, or by the site
        return JobState.CANCELLED, removed
    if job.get("LastHoldReasonCode") is not None:
        return _HOLDS.get(job["LastHoldReasonCode"], JobState.FAILED), hold(job, "Last")
    vacated = plain(job.get("VacateReason")) or "its machine was taken away"
    return (JobState.NODE_FAIL if "disconnected too long" in vacated else JobState.PREEMPTED), vacated


def exit_code(job: Mapping[str, Any]) -> int | None:
    """Return the exit code of a job's script, 128 + N if signal N ended it; None if HTCondor does not report it."""
    if job.get("ExitBySignal") is True and isinstance(job.get("ExitSignal"), int):
        return 128 + int(job["ExitSignal"])
    return int(job["ExitCode"]) if isinstance(job.get("ExitCode"), int) else None
