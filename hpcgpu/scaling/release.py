"""Which jobs are released first, and which hold data that is still wanted. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hpcgpu.display.words import counted
from hpcgpu.scaling.model import JobView

__all__ = ["dispensable", "dispensed", "holders", "what_is_wanted", "what_works_beside"]

#: Share of the memory of the remaining jobs that wanted data may fill. From 60 % on, Dask requests another job.
_HOLD_SHARE = 0.5


def dispensable(job: JobView) -> tuple[bool, bool, bool, bool, bool, float, int, int, float, float]:
    """Sort key: the job that costs least is released first.

    Pending jobs, youngest first; then those whose workers have not connected yet; then idle ones, longest idle first,
    fewest bytes, least walltime left; then those with the fewest tasks. Jobs that work on what is no task come after
    those with tasks alone, which can run again elsewhere. Jobs with actors come last, as actors cannot move.
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
    """Return how many jobs are needed for the data that is still wanted, and for actors: as few as can hold it.

    Parameters
    ----------
    jobs : sequence of JobView
        All that have not ended: also those that leave hold data.
    lasting : sequence of JobView
        Those that stay.
    """
    wanted, stay = sum(job.wanted for job in jobs), {job.name for job in lasting}
    # Jobs that end are counted last, in place of their replacements.
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
    """Return what the jobs hold that is still needed, in words."""
    wanted, actors = sum(job.wanted for job in jobs), sum(job.actors for job in jobs)
    parts = [f"{_amount(wanted)} of data that clients still need"] if wanted else []
    if actors:
        parts.append(counted(actors, "actor"))
    return " and ".join(parts)


def what_works_beside(jobs: Sequence[JobView]) -> str:
    """Return why jobs without tasks are not idle, in words."""
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


def dispensed(idle: Iterable[JobView], jobs: Sequence[JobView], lasting: Sequence[JobView], most: int) -> list[JobView]:
    """Return the idle jobs to release, `most` at most.

    Jobs with actors stay, and jobs whose wanted data the others could not hold.
    """
    wanted = sum(job.wanted for job in jobs)
    staying, gone = {job.name: job.memory for job in lasting}, list[JobView]()
    for job in sorted(idle, key=lambda job: (job.wanted, dispensable(job))):
        space = sum(memory for name, memory in staying.items() if name != job.name)
        if len(gone) < most and not job.actors and (not wanted or space * _HOLD_SHARE >= wanted):
            gone.append(job)
            staying.pop(job.name, None)
    return gone
