"""Change the size of a cluster which another program may manage.

The program that manages it keeps it, and does what is requested, even while it computes. Where no program manages the
cluster, this one does for a moment, or the scheduler job does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from hpcgpu.batch import batch_system
from hpcgpu.cluster.manager import Manager
from hpcgpu.cluster.passing_on import BEGINS, done_by_manager
from hpcgpu.cluster.unattended import in_scheduler_job
from hpcgpu.display.table import JobTable
from hpcgpu.options.common import DEFAULT
from hpcgpu.remote.snapshot import snapshot
from hpcgpu.scaling import units
from hpcgpu.scaling.wanted import Adapt, Scale
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["adapt", "scale", "scale_and_wait"]


def scale(directory: ClusterDirectory, *, worker_group: str = DEFAULT, **size: int | str) -> None:
    """Set the size of a worker group; its manager does it, or this program if there is none.

    Parameters
    ----------
    directory : ClusterDirectory
    worker_group : str, default "default"
    **size
        As `hpcgpu.GPUCluster.scale` takes it: ``jobs``, ``gpus``, ``n``.

    Raises
    ------
    OptionError, ClusterError
        The size cannot be, or it was not possible.
    BatchError
        The batch system does not answer.
    """
    command = _sized(directory, worker_group, size)
    if not done_by_manager(directory, command):
        _take_over_and_scale(directory, command, quiet=True)


def scale_and_wait(directory: ClusterDirectory, *, jobs: int, worker_group: str = DEFAULT) -> JobTable:
    """Set the number of worker jobs as `scale` does, wait until it is reached, and return the jobs.

    For a manager that does it, the wait is short: it may have much else to do.
    """
    command = _sized(directory, worker_group, {"jobs": jobs})
    if not done_by_manager(directory, command):
        return _take_over_and_scale(directory, command)
    deadline = time.monotonic() + BEGINS
    while time.monotonic() < deadline:
        wanted = [one for one in directory.submits() if one.group == worker_group and one.kind == "worker"]
        there = [one for one in wanted if not (one.refused or one.ended or one.cancelled)]
        if len(there) == jobs and all(one.job_id is not None for one in there):
            break
        time.sleep(0.2)
    return JobTable(snapshot(directory.path).jobs)


def adapt(directory: ClusterDirectory, *, worker_group: str = DEFAULT, **limits: Any) -> str:
    """Scale a worker group by its work; its manager does it, or the scheduler job if there is none. Say which.

    Parameters
    ----------
    directory : ClusterDirectory
    worker_group : str, default "default"
    **limits
        Limits in jobs or GPUs, ``idle_timeout``, ``interactive`` and ``maximum_gpu_hours``, as
        `hpcgpu.GPUCluster.adapt` takes them.

    Raises
    ------
    OptionError, ClusterError
        The limits cannot be, or it was not possible.
    """
    worker = saved.read(directory).worker(worker_group)
    command = Adapt(worker_group, units.limits(worker, **limits), units.target_duration())
    if done_by_manager(directory, command):
        return f"{directory.path.name}: {directory.manager()} scales it by its work from now on"
    return in_scheduler_job(directory, command)


def _sized(directory: ClusterDirectory, worker_group: str, size: Mapping[str, Any]) -> Scale:
    """Return the command; raise `OptionError` for a size that cannot be, or a group that is not there."""
    return Scale(worker_group, units.jobs_for(saved.read(directory).worker(worker_group), **size))


def _take_over_and_scale(directory: ClusterDirectory, command: Scale, *, quiet: bool | None = None) -> JobTable:
    """Manage the cluster until it has this size, then leave it to itself; return its jobs.

    Any other program stops managing it.
    """

    async def act() -> JobTable:
        there = directory.contact() is not None
        batch = batch_system(directory.system)
        manager = Manager.of_existing(directory, batch, ends_jobs=False, wait=there, quiet=quiet)
        try:
            await manager.start()
            manager.order(command)
            await manager.settle()
            return manager.jobs
        finally:
            if manager.managing:
                await manager.detach()
            else:
                await manager.close()

    return asyncio.run(act())
