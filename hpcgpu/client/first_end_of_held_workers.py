"""Which of the jobs that a block needs ends first, in words: those of its workers, and the scheduler job."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from hpcgpu.batch.base import JobState
from hpcgpu.display.counts_and_durations import duration, listed
from hpcgpu.display.job_info import JobInfo
from hpcgpu.scaling.walltime_margin import margin


async def first_end(
    workers: Iterable[Mapping[str, Any]],
    scheduler: Mapping[str, Any] | None,
    jobs: Callable[[], Awaitable[Iterable[JobInfo]]],
    poll: Callable[[list[str]], Awaitable[bool]] | None,
) -> str:
    """Return which job ends first, and when; empty if none has an end.

    Parameters
    ----------
    workers : iterable of mapping
        The jobs of the workers, as these report them: `hpcgpu.runtime.job_identity.JobIdentity`.
    scheduler : mapping or None
        The scheduler job; None if the scheduler runs in the user's program.
    jobs : callable
        Returns the jobs of the cluster as the queue last reported them.
    poll : callable or None
        Queries the queue; returns whether it has answered. None if `jobs` does so.
    """
    named = {str(job["id"]): job for job in workers}
    if scheduler is not None:
        named[str(scheduler["id"])] = scheduler
    reported, answered = {job.id: job for job in await jobs()}, poll is None
    unknown = [i for i, job in named.items() if job.get("ends") is None and _end(reported.get(i)) is None]
    if unknown and poll is not None:
        answered = await poll(unknown)
        reported = {job.id: job for job in await jobs()}
    ends = {i: _known_end(job, reported.get(i), answered=answered) for i, job in named.items()}
    return words(named, ends, str(scheduler["id"]) if scheduler is not None else "", now=time.time())


def _end(job: JobInfo | None) -> float | None:
    return time.time() + job.time_left if job is not None and job.time_left is not None else None


def _known_end(own: Mapping[str, Any], job: JobInfo | None, *, answered: bool) -> float | None:
    """Return the end of a job: that of the queue, or what the job reported at its start; infinite if it has none."""
    if (end := _end(job)) is not None:
        return end
    if (known := own.get("ends")) is not None:
        return float(known)
    runs = job is not None and job.state == JobState.RUNNING.value and job.started is not None
    return math.inf if runs and answered else None


def words(
    named: Mapping[str, Mapping[str, Any]], ends: Mapping[str, float | None], scheduler: str, *, now: float
) -> str:
    """Return which job ends first, and which ends are not known; empty if there is nothing to report.

    The workers of a job are a set until it drains. When the scheduler ends, no worker is held any more, also if
    another scheduler follows.

    Parameters
    ----------
    named : mapping
        The jobs as their own processes report them, by id.
    ends : mapping
        Epoch seconds, by id; infinite for a job without an end, None if the end is not known.
    scheduler : str
        The id of the scheduler job; empty if there is none.
    now : float
        Epoch seconds.
    """
    until = list[tuple[float, str]]()
    for job_id, job in named.items():
        end = ends[job_id]
        if end is None or end == math.inf:
            continue
        if job_id == scheduler:
            until.append((end, f"scheduler job {job['name']} ends first, in {_in(end, now)}, and the block with it"))
        else:
            leaves = end - margin(max(0.0, end - job["began"]), job.get("margin"))
            text = f"job {job['name']} drains first, in {_in(leaves, now)}, as its walltime ends in {_in(end, now)}"
            until.append((leaves, text))
    unknown = [str(job["name"]) for job_id, job in named.items() if ends[job_id] is None]
    found = [min(until)[1]] if until else []
    if unknown:
        found.append(f"it is not known when the walltime of {listed(unknown, ', ')} ends")
    return "; ".join(found)


def _in(moment: float, now: float) -> str:
    return duration(max(0.0, moment - now))
