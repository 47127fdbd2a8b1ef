"""The job that a process is in, and the start of that job: the bill needs it after the queue has forgotten the job."""

from __future__ import annotations

import json
import os
import time
from typing import TypedDict

from hpcgpu.batch.base import OwnJob
from hpcgpu.posix.process_identity import identity

#: The key under which a worker reports its job when it registers; also the variable of its process with that, as JSON.
JOB = "HPCGPU_JOB_SELF"


class JobIdentity(TypedDict):
    """The job of a process, as the process reports it."""

    id: str
    name: str
    #: Epoch seconds.
    began: float
    #: Epoch seconds at which the walltime ends, if it is known at the start of the job; else None.
    ends: float | None
    #: The option `walltime_margin`; None if the user has not set it.
    margin: float | None


def remember(own: OwnJob, walltime: float | None, margin: float | None) -> None:
    """Record the job in the environment, for the child processes.

    Its end is that of the environment, or follows from the walltime that the script requests.

    If the environment does not contain the start of the job, the start of this process counts: the job's script becomes
    this process.
    """
    began = own.start if own.start is not None else _started(os.getpid())
    ends = own.end if own.end is not None or walltime is None else round(began + walltime, 2)
    job = JobIdentity(id=own.job_id, name=own.name, began=round(began, 2), ends=ends, margin=margin)
    os.environ[JOB] = json.dumps(job)


def job_identity() -> JobIdentity | None:
    """Return the recorded job; None in a process that no job of hpcgpu started."""
    text = os.environ.get(JOB)
    return json.loads(text) if text else None


def _started(pid: int) -> float:
    """Return the start of a process in epoch seconds; the present time if the start is not known."""
    process = identity(pid)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process[1] / os.sysconf("SC_CLK_TCK") if process else 0.0
    return time.time() - max(0.0, age)
