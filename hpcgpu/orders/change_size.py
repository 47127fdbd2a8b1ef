"""Change a cluster that another program may manage: its size, its worker groups, and whether it outlives its program.

The program that manages the cluster stays its manager, and carries out the request, even while it computes. If no
program manages the cluster, this program manages it for a moment, or the scheduler job manages it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from hpcgpu.batch import batch_system
from hpcgpu.configuration.resolve import resolve_group
from hpcgpu.display.job_table import JobTable
from hpcgpu.errors import ClusterError
from hpcgpu.existing_clusters.snapshot import snapshot
from hpcgpu.manager.manager import Manager
from hpcgpu.manager.start_cluster import warn_of_end
from hpcgpu.manager.worker_groups import script_of
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.orders.manager_in_scheduler_job import in_scheduler_job
from hpcgpu.orders.send_to_manager import BEGINS, done_by_manager
from hpcgpu.scaling import sizes_to_jobs
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, DeleteGroup, Detach, Resume, Scale, Sent, check_new
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory


def scale(directory: ClusterDirectory, *, worker_group: str = DEFAULT, **size: int | str) -> None:
    """Set the size of a worker group. The cluster's manager does it, or this program if there is no manager.

    Parameters
    ----------
    directory : ClusterDirectory
    worker_group : str, default "default"
    **size
        As `hpcgpu.GPUCluster.scale` takes it: ``jobs``, ``gpus``, ``n``.

    Raises
    ------
    OptionError, ClusterError
        The size is not valid, or it could not be set.
    BatchError
        The batch system does not answer.
    """
    _order(directory, _sized(directory, worker_group, size))


def scale_and_wait(directory: ClusterDirectory, *, jobs: int, worker_group: str = DEFAULT) -> JobTable:
    """Set the number of worker jobs as `scale` does, wait until it is reached, and return the jobs.

    If another manager carries out the command, the wait is short: it may have much other work.
    """
    command = _sized(directory, worker_group, {"jobs": jobs})
    if not done_by_manager(directory, command):
        return _take_over_and_order(directory, command)
    deadline = time.monotonic() + BEGINS
    while time.monotonic() < deadline:
        wanted = [one for one in directory.submits() if one.group == worker_group and one.kind == "worker"]
        there = [one for one in wanted if not (one.refused or one.ended or one.unwanted)]
        if len(there) == jobs and all(one.job_id is not None for one in there):
            break
        time.sleep(0.2)
    return JobTable(snapshot(directory.path).jobs)


def adapt(directory: ClusterDirectory, *, worker_group: str = DEFAULT, **limits: Any) -> str:
    """Scale a worker group by its work. The cluster's manager does it, or else the scheduler job; return which.

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
        The limits are not valid, or they could not be set.
    """
    worker = saved_options.read(directory).worker(worker_group)
    command = Adapt(worker_group, sizes_to_jobs.limits(worker, **limits), sizes_to_jobs.target_duration())
    if not done_by_manager(directory, command):
        try:
            return in_scheduler_job(directory, command)
        except ClusterError:  # a program may have begun to manage the cluster meanwhile
            if not done_by_manager(directory, command):
                raise
    return f"{directory.path.name}: {directory.manager()} scales it by its work from now on"


def add_worker_group(directory: ClusterDirectory, *, name: str, jobs: int = 0, **options: Any) -> None:
    """Add a worker group. The cluster's manager does it, or this program if there is no manager.

    Parameters
    ----------
    directory : ClusterDirectory
    name, jobs, **options
        As `hpcgpu.GPUCluster.add_worker_group` takes them.

    Raises
    ------
    OptionError, ClusterError
        The options are not valid, the group exists, or it could not be added.
    BatchError
        The batch system does not answer.
    """
    kept = saved_options.read(directory)
    check_new(name, {DEFAULT, *kept.groups})
    worker = resolve_group(name, options, kept.options)
    warn_of_end(kept.options, worker)
    target = sizes_to_jobs.jobs_for(worker, jobs=jobs, call="add_worker_group: {}")
    script = script_of(name, worker, kept.options, directory.path)
    _order(directory, AddGroup(name, target, saved_options.group_to_json(worker), script))


def delete_worker_group(directory: ClusterDirectory, *, name: str) -> None:
    """Drain all jobs of a group, and delete the group. The cluster's manager does it, or this program without one.

    Raises
    ------
    OptionError, ClusterError
        There is no such group, it is the default group, or it could not be deleted.
    BatchError
        The batch system does not answer.
    """
    saved_options.read(directory).worker(name)
    _order(directory, DeleteGroup(name))


def resume(directory: ClusterDirectory, *, worker_group: str = DEFAULT) -> str:
    """Submit jobs of a worker group again after a pause because of failures; its size or its limits stay.

    Return that there was no pause; an empty string if there was one, or if that is not known.

    Raises
    ------
    OptionError, ClusterError
        There is no such group, or its manager cannot be reached.
    BatchError
        The batch system does not answer.
    """
    saved_options.read(directory).worker(worker_group)
    pauses = [group["paused"] for group in snapshot(directory.path).groups if group["name"] == worker_group]
    _order(directory, Resume(worker_group))
    return f"{directory.path.name}: worker group {worker_group} was not paused" if pauses == [""] else ""


def detach(directory: ClusterDirectory) -> str:
    """Let the cluster continue when the program that manages it closes it, or ends; return a message on the result.

    Raises
    ------
    ClusterError
        Its scheduler runs in that program, or the detach cannot be recorded.
    BatchError
        The batch system does not answer.
    """
    managed = done_by_manager(directory, Detach())
    if not managed:
        _take_over_and_order(directory, Detach(), quiet=True)
    when = f"after {directory.manager()} has ended" if managed else "without a program"
    return f"{directory.path.name}: continues {when}. To end it, run: hpcgpu stop {directory.in_shell}"


def _order(directory: ClusterDirectory, command: Sent) -> None:
    if not done_by_manager(directory, command):
        _take_over_and_order(directory, command, quiet=True)


def _sized(directory: ClusterDirectory, worker_group: str, size: Mapping[str, Any]) -> Scale:
    """Return the command; raise `OptionError` for a size that is not valid, or a group that does not exist."""
    return Scale(worker_group, sizes_to_jobs.jobs_for(saved_options.read(directory).worker(worker_group), **size))


def _take_over_and_order(directory: ClusterDirectory, command: Sent, *, quiet: bool | None = None) -> JobTable:
    """Manage the cluster until the command is carried out, then detach from it; return its jobs.

    Any other manager stops managing the cluster.
    """

    async def act() -> JobTable:
        there = directory.contact() is not None
        batch = batch_system(directory.system)
        manager = Manager.of_existing(directory, batch, ends_jobs=False, wait=there, quiet=quiet)
        try:
            await manager.start()
            manager.groups.carry_out(command)
            if not isinstance(command, DeleteGroup):  # a job of the group may hold data for long
                await manager.settle()
            return manager.jobs
        finally:
            if manager.managing:
                await manager.detach()
            else:
                await manager.close()

    return asyncio.run(act())
