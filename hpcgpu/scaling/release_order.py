"""Which jobs are released first, and which hold data that is still wanted. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hpcgpu.display.counts_and_durations import counted
from hpcgpu.scaling.policy_data import JobView

#: Share of the memory of the remaining jobs that wanted data may fill. From 60 % on, Dask requests another job.
_HOLD_SHARE = 0.5


def release_order(job: JobView) -> tuple[bool, bool, bool, bool, bool, float, int, int, float, float]:
    """Sort key: the job whose release costs least comes first.

    Pending jobs come first, youngest first. Then jobs whose workers have not connected yet. Then idle jobs: longest
    idle, fewest bytes, least walltime left. Then jobs with the fewest tasks. Jobs that do work other than tasks come
    after jobs with only tasks, because tasks can run again elsewhere. Jobs with actors come last, because actors cannot
    move.
    """
    return (
        not job.pending,
        job.workers > 0,
        job.actors > 0,
        job.works_beside,
        job.idle_since is None,
        job.idle_since or 0.0,
        job.processing,
        job.nbytes,
        job.leaves if job.leaves is not None else math.inf,
        -job.submitted,
    )


def holders(jobs: Sequence[JobView], lasting: Sequence[JobView]) -> int:
    """Return the smallest number of jobs that can hold the data that is still wanted, and the actors.

    Parameters
    ----------
    jobs : sequence of JobView
        All jobs that have not ended: jobs that will end soon hold data, too.
    lasting : sequence of JobView
        The jobs that stay.
    """
    wanted, stay = sum(job.wanted for job in jobs), {job.name for job in lasting}
    # Jobs that end soon come last; they stand for their replacements.
    models = sorted(
        (job for job in jobs if job.memory), key=lambda job: (job.name not in stay, not job.actors, -job.memory)
    )
    count, space = 0, 0.0
    for job in models:
        if space * _HOLD_SHARE >= wanted and not (job.name in stay and job.actors):
            break
        count, space = count + 1, space + job.memory
    return count


def what_is_wanted(jobs: Sequence[JobView]) -> str:
    """Return a text on the data in these jobs that is still needed."""
    wanted, actors = sum(job.wanted for job in jobs), sum(job.actors for job in jobs)
    parts = [f"{_amount(wanted)} of data that clients still need"] if wanted else []
    if actors:
        parts.append(counted(actors, "actor"))
    return " and ".join(parts)


def what_works_beside(jobs: Sequence[JobView]) -> str:
    """Return a text on why jobs without tasks are not idle."""
    called = [job for job in jobs if job.calls]
    computing = [job for job in jobs if job.works_beside and not job.calls]
    parts = []
    if called:
        calls = sum(job.calls for job in called)
        run = "runs" if calls == 1 else "run"
        parts.append(f"{counted(calls, 'call')} {run} on the workers of {counted(len(called), 'job')}")
    if computing:
        parts.append(
            f"job {computing[0].name} is kept, as its GPU works"
            if len(computing) == 1
            else f"{len(computing)} jobs are kept, as their GPUs work"
        )
    return " and ".join(parts)


def _amount(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def to_release(
    idle: Iterable[JobView], jobs: Sequence[JobView], lasting: Sequence[JobView], most: int
) -> list[JobView]:
    """Return the idle jobs to release, `most` at most.

    Jobs with actors stay. Jobs stay, too, if the other jobs could not hold their wanted data.
    """
    wanted = sum(job.wanted for job in jobs)
    staying, gone = {job.name: job.memory for job in lasting}, list[JobView]()
    for job in sorted(idle, key=lambda job: (job.wanted, release_order(job))):
        space = sum(memory for name, memory in staying.items() if name != job.name)
        if len(gone) < most and not job.actors and (not wanted or space * _HOLD_SHARE >= wanted):
            gone.append(job)
            staying.pop(job.name, None)
    return gone
