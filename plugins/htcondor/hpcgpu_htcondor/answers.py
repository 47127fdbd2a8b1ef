"""Reads what HTCondor's commands print. Pure; seen on HTCondor 23.9.6."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu_htcondor.reasons import REASONS, ending, exit_code, hold, plain

#: The attributes of a job that hpcgpu reads.
ATTRIBUTES = (
    "ClusterId,JobStatus,JobBatchName,HpcgpuScript,NumShadowStarts,LastRejMatchReason,HoldReason,HoldReasonCode,"
    "HoldReasonSubCode,LastHoldReason,LastHoldReasonCode,LastHoldReasonSubCode,RemoveReason,VacateReason,"
    "RemoteHost,LastRemoteHost,JobCurrentStartDate,AllowedJobDuration,AllowedExecuteDuration,MaxRuntime,"
    "CompletionDate,EnteredCurrentStatus,ExitCode,ExitBySignal,ExitSignal,RequestCpus,RequestMemory,RequestGPUs,"
    "JobDisconnectedDate,JobLeaseDuration"
)
#: Of JobStatus. A job that is held or idle after it ran has ended: it does not start again.
_STATES = {
    1: JobState.PENDING,
    2: JobState.RUNNING,
    3: JobState.COMPLETING,
    5: JobState.PENDING,
    6: JobState.COMPLETING,
    7: JobState.RUNNING,
}


def parse_ads(stdout: str) -> list[dict[str, Any]]:
    """Return the ads that a command prints with ``-json``; it prints nothing if there is none.

    Raises
    ------
    ValueError
        It is cut off.
    """
    ads = json.loads(stdout) if stdout.strip() else []
    if not isinstance(ads, list) or not all(isinstance(ad, dict) for ad in ads):
        raise ValueError("not a list of ads")
    return ads


def statuses(ads: list[dict[str, Any]], *, over: bool = False) -> dict[str, JobStatus]:
    """Return the jobs of condor_q, or of condor_history if they are over."""
    return {str(ad["ClusterId"]): _status(ad, over) for ad in ads if isinstance(ad.get("ClusterId"), int)}


def _status(job: Mapping[str, Any], over: bool) -> JobStatus:
    status = job.get("JobStatus")
    started = _number(job.get("NumShadowStarts")) or 0
    if over or status == 4 or (started and status in (1, 5)):
        state, reason = ending(job)
        end = _number(job.get("CompletionDate")) or _number(job.get("EnteredCurrentStatus"))
    else:
        state = _STATES.get(status, JobState.UNKNOWN) if isinstance(status, int) else JobState.UNKNOWN
        waits = hold(job) or plain(job.get("LastRejMatchReason"))
        reason = waits if state is JobState.PENDING else _no_contact(job)
        end = _walltime_over(job)
    host = str(job.get("RemoteHost") or job.get("LastRemoteHost") or "")
    return JobStatus(
        job_id=str(job["ClusterId"]),
        state=state,
        name=str(job.get("JobBatchName", "")),
        reason=reason,
        node=host.rpartition("@")[2],
        start=_number(job.get("JobCurrentStartDate")),
        end=end,
        exit_code=exit_code(job) if status == 4 else None,
        suspended=status == 7,
        out_of_reach=state in (JobState.RUNNING, JobState.COMPLETING) and bool(reason),
        words=REASONS,
    )


def _no_contact(job: Mapping[str, Any]) -> str:
    """Return since when a job's machine has been silent, and until when HTCondor waits for it; empty if it answers."""
    if (since := _number(job.get("JobDisconnectedDate"))) is None:
        return ""
    lease = _number(job.get("JobLeaseDuration"))
    until = f"; HTCondor waits for it until {_moment(since + lease)} (job_lease_duration)" if lease else ""
    return f"no contact with its machine since {_moment(since)}{until}"


def _moment(seconds: float) -> str:
    return time.strftime("%F %T", time.localtime(seconds))


def _walltime_over(job: Mapping[str, Any]) -> float | None:
    limits = (job.get(name) for name in ("AllowedJobDuration", "AllowedExecuteDuration", "MaxRuntime"))
    start, limit = _number(job.get("JobCurrentStartDate")), next((n for n in map(_number, limits) if n), None)
    return None if start is None or limit is None else start + limit


def _number(value: object) -> float | None:
    """Return a number of an ad; None for an expression, and for 0, the time of what has not happened."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value else None


def parse_job_id(stdout: str) -> str | None:
    """Return the id that ``condor_submit -terse`` prints, even if a wrapper of the site prints other text around it."""
    found = re.findall(r"^([0-9]{1,18})\.0 - \1\.0\s*$", stdout, re.MULTILINE)
    return found[-1] if found else None
