"""Adaptive scaling without a living client: ``python -m hpcgpu.cluster.unattended DIRECTORY``.

`hpcgpu.runtime.manager_process` starts it.

It manages the cluster like any program that took it over, until another one does, or the cluster ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpcgpu.cluster.discovery import cluster_class
from hpcgpu.errors import ClusterError, ClusterWarning, HpcgpuError
from hpcgpu.runtime.reach import no_answer, scheduler_of
from hpcgpu.scaling import units
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory, Contact
from hpcgpu.store.managers import AdaptArguments

if TYPE_CHECKING:
    from hpcgpu.cluster.gpucluster import GPUCluster

__all__ = ["main", "request"]

#: Seconds that the scheduler may take to start the manager: it queries the queue first.
_TIMEOUT = 120.0


def request(directory: ClusterDirectory, group: str, arguments: AdaptArguments) -> str:
    """Let the scheduler job scale a group of workers, from now on or from its start; return a message on the outcome.

    Parameters
    ----------
    directory : ClusterDirectory
    group : str
        Of workers.
    arguments : AdaptArguments
        Of `hpcgpu.cluster.gpucluster.GPUCluster.adapt`: ``minimum_jobs``, ``maximum_jobs``, ``idle_timeout``,
        ``maximum_gpu_hours``.

    Raises
    ------
    OptionError
        Limits that cannot be, or no such group.
    ClusterError
        The cluster was closed, or jobs cannot be submitted from its scheduler's node.
    """
    name, kept = directory.path.name, saved.read(directory)
    if directory.closing:
        raise ClusterError(f"cluster {name} was closed")
    if kept.options.scheduler is None:
        raise ClusterError(
            f"cluster {name} has no scheduler job: its scheduler runs in the program that made it (scheduler='local'). "
            "Call `adapt` in that program"
        )
    units.limits(
        kept.worker(group),
        minimum={"jobs": arguments.get("minimum_jobs")},
        maximum={"jobs": arguments.get("maximum_jobs")},
        backlog=None,
        idle_timeout=arguments.get("idle_timeout"),
        maximum_gpu_hours=arguments.get("maximum_gpu_hours"),
    )
    if not directory.detached:
        directory.detach()
    earlier = directory.adapt() or {}
    directory.request_adapt({**earlier, group: arguments})
    contact = directory.contact()  # after the request: a scheduler that starts now reads it
    if contact is None:
        return f"{name}: adaptive scaling begins when its scheduler job does"
    try:
        problem = asyncio.run(asyncio.wait_for(_start(contact, directory), _TIMEOUT))
    except (OSError, TimeoutError) as error:
        problem = f"its scheduler at {contact.client} does not answer: {no_answer(error)}"
    if problem:
        directory.request_adapt(earlier)
        raise ClusterError(
            f"the scheduler job of cluster {name} cannot scale it: {problem}. Let a program on a login node do it, "
            f"by from_name({name!r}).adapt(...)"
        )
    return f"{name}: its scheduler job scales it from now on"


async def _start(contact: Contact, directory: ClusterDirectory) -> str:
    async with scheduler_of(directory, contact) as scheduler:
        if problem := str(await scheduler.hpcgpu_manage()):
            return problem
        await scheduler.hpcgpu_release()
        return ""


def main(path: Path) -> None:
    """Scale as the cluster directory requests, until the cluster ends."""
    directory = ClusterDirectory(path)
    end, ended = threading.Event(), threading.Event()
    signal.signal(signal.SIGHUP, lambda number, frame: end.set())  # another manager follows

    def scheduler_ends(number: int, frame: object) -> None:
        ended.set()
        end.set()

    signal.signal(signal.SIGTERM, scheduler_ends)
    # of the cluster: printed below; of its directory: said when it began
    warnings.simplefilter("ignore", ClusterWarning)
    _scale(directory, end, ended)


def _scale(directory: ClusterDirectory, end: threading.Event, ended: threading.Event) -> None:
    """Scale until `end`; `ended` is set if the scheduler has ended."""
    found = cluster_class(directory.system)
    # its orders are in a file
    unattended = cast("type[GPUCluster]", type(found.__name__, (found,), {"_serves_requests": False}))
    cluster = unattended.from_name(directory.path, shutdown_on_close=False)
    printed = 0
    try:
        for group, arguments in (directory.adapt() or {}).items():
            cluster.adapt(worker_group=group, **arguments)
        while not end.wait(1.0) and cluster.managing:
            printed = _print_new(cluster, printed)
    finally:
        if ended.is_set() and cluster.managing:
            cluster.reconciler.state.tell("ended", f"the scheduler of cluster {cluster.name} has ended")
        cluster.close()
        _print_new(cluster, printed)


def _print_new(cluster: GPUCluster, printed: int) -> int:
    """Print what the manager did since the last call; return how much of its log is printed."""
    text = str(cluster.get_logs(scheduler=False, workers=False)["Cluster"])
    if len(text) > printed:
        print(text[printed:].strip(), flush=True)
    return len(text)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except HpcgpuError as error:  # a sentence is enough: its log is read by people
        sys.exit(f"hpcgpu: {error}")
