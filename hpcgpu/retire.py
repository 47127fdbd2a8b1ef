"""Takes Dask workers out of a running cluster without losing what they hold or run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

from hpcgpu.jobs import WorkerJob

__all__ = ["retire"]

_PAUSE = 0.5


async def retire(scheduler: Any, jobs: Collection[WorkerJob], *, deadline: float | None) -> list[WorkerJob]:
    """Retire all workers of these jobs together; return the jobs that hold data which fits nowhere else.

    Data moves and no new tasks come; what runs is let finish; then data moves again and the workers close.

    Parameters
    ----------
    scheduler : distributed.core.rpc
    jobs : collection of WorkerJob
    deadline : float or None
        Epoch seconds after which running tasks are not waited for. Retiring alone would cancel and rerun them.
    """
    names = [name for job in jobs for name in job.workers.values()]
    addresses = {address: job for job in jobs for address in job.workers}
    if not names:
        return []
    try:
        moved = await scheduler.retire_workers(names=names, close_workers=False, remove=False)
        leaving = [job for job in jobs if all(address in moved for address in job.workers)]
        names = [name for job in leaving for name in job.workers.values()]
        while names and (deadline is None or time.time() < deadline) and await scheduler.hpcgpu_unfinished(names=names):
            await asyncio.sleep(_PAUSE)
        retired = await scheduler.retire_workers(names=names, close_workers=True, remove=True) if names else {}
    except OSError:  # without the scheduler the data is lost anyway
        return []
    stuck = {job.name for address, job in addresses.items() if address not in retired and address in job.workers}
    kept = [job for job in jobs if job.name in stuck]
    if kept:
        await scheduler.hpcgpu_resume(names=[name for job in kept for name in job.workers.values()])
    return kept
