"""Preload of the scheduler.

It adds our extension, publishes the addresses in the cluster directory, and removes them at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.comm.utils import get_tcp_server_address

from hpcgpu.dask_scheduler.add_dashboard import add_dashboard
from hpcgpu.dask_scheduler.after_restart import Kept
from hpcgpu.dask_scheduler.keep_manager_running import ManagerProcess
from hpcgpu.dask_scheduler.published_datasets import PublishedDatasets
from hpcgpu.dask_scheduler.scheduler_extension import Extension, install
from hpcgpu.errors import LaunchError
from hpcgpu.posix.full_disk import cannot_be_written
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime import credentials_of_job
from hpcgpu.runtime.job_identity import job_identity
from hpcgpu.runtime.scheduler_connection import check_alone
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.removed_directory import directory_exists

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


def publish_contact(
    scheduler: Scheduler,
    directory: ClusterDirectory,
    *,
    job_id: str,
    fabric: str,
    network: str = "",
    interface: str = "",
) -> Contact:
    """Write the contact of a scheduler that listens. Its first listener is for workers, its last one for clients."""
    addresses = [listener.contact_address for listener in scheduler.listeners]
    dashboard = ""
    if scheduler.http_server is not None:
        host, port = get_tcp_server_address(scheduler.http_server)[:2]
        if ip_address(host).is_unspecified:
            host = addresses[-1].split("://", 1)[1].rsplit(":", 1)[0]
        dashboard = f"{host}:{port}"
    contact = Contact(
        token=directory.token(),
        job_id=job_id,
        workers=addresses[0],
        client=addresses[-1],
        dashboard=dashboard,
        fabric=fabric,
        network=network,
        interface=interface,
    )
    directory.publish(contact)
    # Like `dask scheduler --scheduler-file`, but with the address for clients: for Client(scheduler_file=...).
    directory.write("scheduler.json", json.dumps({**scheduler.identity(), "address": contact.client}, indent=1))
    return contact


async def dask_setup(scheduler: Scheduler) -> None:
    """Publish the contact; distributed calls this once the scheduler listens.

    If that is impossible, the job ends: nobody could reach this scheduler.

    A scheduler serves nobody before this function returns. So it gets what is kept of an earlier scheduler after that,
    and before the contact is published: a client that connects finds it.
    """
    directory = ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"]))
    with _ending_if_it_fails(directory):
        extension = _join(scheduler, directory)
        if kept := Kept.read(directory):
            extension.setup = asyncio.create_task(_restore(scheduler, directory, extension, kept))
        else:
            _begin_service(scheduler, directory, extension)


@contextmanager
def _ending_if_it_fails(directory: ClusterDirectory) -> Iterator[None]:
    """End the job if the block fails; distributed would only log the error."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, LaunchError):
            traceback.print_exc()
            error = LaunchError(f"the scheduler of cluster {directory.path.name} cannot start: {error!r}")
        write_stderr(error)
        os.kill(os.getpid(), signal.SIGTERM)


def _join(scheduler: Scheduler, directory: ClusterDirectory) -> Extension:
    """Add our extension to a scheduler.

    Raises
    ------
    LaunchError
        Another scheduler has the cluster.
    """
    job_id = os.environ["HPCGPU_SCHEDULER_JOB"]
    check_alone(directory, job_id)  # once more: another may have started meanwhile
    token, lease = directory.token(), float(os.environ.get("HPCGPU_LEASE", "0")) or None
    # what cannot be read when the lease ends does not end the scheduler: it is read again after another lease
    extension = install(scheduler, lease, lambda: not directory_exists(directory, token) or directory.detached)
    extension.manager_process = ManagerProcess(directory, job_id, extension.lease)
    extension.datasets = PublishedDatasets(scheduler, directory)
    extension.usage.write_into(directory, job_identity())
    return extension


async def _restore(scheduler: Scheduler, directory: ClusterDirectory, extension: Extension, kept: Kept) -> None:
    """Give a scheduler what is kept of an earlier one, and then publish the contact."""
    with _ending_if_it_fails(directory):
        await scheduler  # it has started
        await in_thread(kept.restore, scheduler, directory)
        await in_thread(check_alone, directory, os.environ["HPCGPU_SCHEDULER_JOB"])  # it took seconds
        _begin_service(scheduler, directory, extension)


def _begin_service(scheduler: Scheduler, directory: ClusterDirectory, extension: Extension) -> None:
    """Publish the contact, and begin what needs no hurry.

    Raises
    ------
    LaunchError
        The contact cannot be written.
    """
    assert extension.datasets is not None
    assert extension.manager_process is not None
    try:
        publish_contact(
            scheduler,
            directory,
            job_id=os.environ["HPCGPU_SCHEDULER_JOB"],
            **json.loads(os.environ["HPCGPU_FABRIC"]),
        )
    except OSError as error:
        raise LaunchError(
            f"the scheduler of cluster {directory.path.name} ends: {cannot_be_written(directory.path, error)}"
        ) from error
    extension.dashboard = asyncio.create_task(add_dashboard(scheduler, extension.usage.gpus, directory.path.name))
    extension.datasets.begin()
    # after the contact: later requests find the contact, and go to the scheduler
    if directory.wanted().manager_in_scheduler_job:
        extension.manager_process.begin()


async def dask_teardown(scheduler: Scheduler) -> None:
    """Remove the contact if it is still this scheduler's: workers that start now must not wait for it."""
    directory = ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"]))
    credentials_of_job.scheduler_closes()
    extension = scheduler.plugins.get("hpcgpu")
    if extension is not None and extension.manager_process is not None:
        await extension.manager_process.stop(cluster_ends=credentials_of_job.ended_as_intended())
    contact = directory.contact()
    if contact is not None and contact.job_id == os.environ["HPCGPU_SCHEDULER_JOB"]:
        directory.withdraw()
