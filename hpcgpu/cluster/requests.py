"""Change the size of a cluster which another program may manage.

The program that manages it keeps it, and does what is requested, even while it computes. Where no program manages the
cluster, this one does for a moment, or the scheduler job does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from hpcgpu.cluster.discovery import cluster_class
from hpcgpu.cluster.unattended import request as request_adapt
from hpcgpu.display.table import JobTable
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError
from hpcgpu.options.common import DEFAULT
from hpcgpu.remote.snapshot import snapshot
from hpcgpu.runtime.reach import no_answer, scheduler_of
from hpcgpu.runtime.wire import RequestAnswer
from hpcgpu.scaling import units
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory, Contact
from hpcgpu.store.managers import AdaptArguments

__all__ = ["adapt", "scale", "scale_and_wait"]

#: Seconds until the scheduler has passed on the answer of the manager.
_TIMEOUT = 45.0
#: Seconds until a manager takes requests, from when its scheduler runs.
_BEGINS = 10.0


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
    if not _done_by_manager(directory, "scale", {**size, "worker_group": worker_group}):
        _take_over_and_scale(directory, worker_group=worker_group, **size)


def scale_and_wait(directory: ClusterDirectory, *, jobs: int, worker_group: str = DEFAULT) -> JobTable:
    """Set the number of worker jobs as `scale` does, wait until it is reached, and return the jobs.

    For a manager that does it, the wait is short: it may have much else to do.
    """
    if not _done_by_manager(directory, "scale", {"jobs": jobs, "worker_group": worker_group}):
        return _take_over_and_scale(directory, worker_group=worker_group, jobs=jobs)
    deadline = time.monotonic() + _BEGINS
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
        Limits in jobs or GPUs, ``idle_timeout`` and ``maximum_gpu_hours``, as `hpcgpu.GPUCluster.adapt` takes them.

    Raises
    ------
    OptionError, ClusterError
        The limits cannot be, or it was not possible.
    """
    if _done_by_manager(directory, "adapt", {**limits, "worker_group": worker_group}):
        return f"{directory.path.name}: {directory.manager()} scales it by its work from now on"
    return request_adapt(directory, worker_group, _in_jobs(directory, worker_group, limits))


def _in_jobs(directory: ClusterDirectory, group: str, limits: Mapping[str, Any]) -> AdaptArguments:
    """Return the limits in jobs, which is how the scheduler job takes them."""
    given = units.limits(
        saved.read(directory).worker(group),
        minimum={unit: limits.get(f"minimum_{unit}") for unit in ("jobs", "gpus")},
        maximum={unit: limits.get(f"maximum_{unit}") for unit in ("jobs", "gpus")},
        backlog=None,
        idle_timeout=limits.get("idle_timeout"),
        maximum_gpu_hours=limits.get("maximum_gpu_hours"),
    )
    return AdaptArguments(
        minimum_jobs=given.minimum,
        maximum_jobs=given.maximum,
        idle_timeout=limits.get("idle_timeout"),
        maximum_gpu_hours=limits.get("maximum_gpu_hours"),
    )


def _take_over_and_scale(directory: ClusterDirectory, *, worker_group: str = DEFAULT, **size: Any) -> JobTable:
    """Manage the cluster until it has this size, then leave it to itself; return its jobs.

    Any other program stops managing it.

    Raises
    ------
    OptionError
        The size cannot be, or there is no such group. Nothing is changed then.
    """
    units.jobs_for(saved.read(directory).worker(worker_group), **size)  # refused before anything changes
    requested = directory.adapt() or {}
    if requested.pop(worker_group, None) is not None:  # the manager in the scheduler job must not undo it
        directory.request_adapt(requested)
    there = directory.contact() is not None
    cluster = cluster_class(directory.system).from_name(directory.path, shutdown_on_close=False, wait=there)
    try:
        cluster.scale(**size, worker_group=worker_group)
        cluster.settle()
        return cluster.jobs
    finally:
        if cluster.managing:
            cluster.detach()
        else:
            cluster.close()


def _done_by_manager(directory: ClusterDirectory, what: str, arguments: dict[str, Any]) -> bool:
    """Let the manager do it; return whether there is one that could.

    A manager that nobody can find any more does not hold up the cluster: a warning says so.

    Raises
    ------
    ClusterError
        The manager refuses, or it cannot be reached though it lives: the cluster is not taken away from it.
    """
    deadline = time.monotonic() + _BEGINS
    while True:
        contact, manager = directory.contact(), directory.manager()
        # the manager in the scheduler job takes no requests: it does what ``adapt.json`` says
        if manager is None or manager.lives is False or not manager.serves:
            return False
        if contact is not None and _passed_on(directory, contact, what, arguments):
            return True
        late = time.monotonic() > deadline
        if contact is not None and late and manager.lives is None:
            warn(
                f"cluster {directory.path.name} is taken away from {manager}: the scheduler has not heard from it for "
                "a minute, and it is not known whether it lives"
            )
            return False
        if contact is None or late:
            raise ClusterError(
                f"{manager} manages cluster {directory.path.name}, and takes no requests now. Other programs can send "
                f"requests while it is connected to the scheduler. Try again later, or call `{what}` in that program"
            )
        time.sleep(0.5)  # it is about to connect


def _passed_on(directory: ClusterDirectory, contact: Contact, what: str, arguments: dict[str, Any]) -> bool:
    """Request it of the manager through the scheduler; return whether there is one that takes requests."""
    try:
        answer = asyncio.run(_request(directory, contact, what, arguments))
    except (OSError, TimeoutError, ValueError) as error:  # ValueError: a damaged address, or certificate
        raise ClusterError(
            f"cluster {directory.path.name} cannot be changed now, because its scheduler at {contact.client} does not "
            f"answer: {no_answer(error)}"
        ) from error
    if answer["error"]:
        raise ClusterError(answer["error"])
    return answer["taken"]


async def _request(
    directory: ClusterDirectory, contact: Contact, what: str, arguments: dict[str, Any]
) -> RequestAnswer:
    async with scheduler_of(directory, contact) as scheduler:
        call = scheduler.hpcgpu_request(what=what, arguments=arguments)
        answer: RequestAnswer = await asyncio.wait_for(call, _TIMEOUT)
        return answer
