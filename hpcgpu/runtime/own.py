"""The job that a process is in, and when it began: the queue forgets that, and the bill needs it."""

from __future__ import annotations

import json
import os
import time
from typing import TypedDict

from hpcgpu.batch.base import OwnJob
from hpcgpu.posix.processes import identity

__all__ = ["JOB", "Told", "remember", "told"]

#: Under this name a worker says this when it registers; the same in the environment of its process, as JSON.
JOB = "HPCGPU_JOB_SELF"


class Told(TypedDict):
    """What a process knows of its job."""

    id: str
    name: str
    #: Epoch seconds.
    began: float


def remember(own: OwnJob) -> None:
    """Tell the processes that this one starts.

    Where the environment does not say when the job started, that is when this process started: the job's script becomes
    this process.
    """
    began = own.start if own.start is not None else _started(os.getpid())
    os.environ[JOB] = json.dumps(Told(id=own.job_id, name=own.name, began=round(began, 2)))


def told() -> Told | None:
    """Return what was remembered; None in a process that no job of hpcgpu started."""
    text = os.environ.get(JOB)
    return json.loads(text) if text else None


def _started(pid: int) -> float:
    """Return the epoch seconds at which a process started; now if that is not known."""
    process = identity(pid)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process[1] / os.sysconf("SC_CLK_TCK") if process else 0.0
    return time.time() - max(0.0, age)
