"""Preload of the scheduler.

It adds our extension, publishes the addresses in the cluster directory, and removes them at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.comm.utils import get_tcp_server_address

from hpcgpu.errors import LaunchError
from hpcgpu.runtime import gpu_page
from hpcgpu.runtime.extension import install
from hpcgpu.runtime.manager_process import Unattended
from hpcgpu.runtime.own import told
from hpcgpu.runtime.reach import check_alone
from hpcgpu.store.directory import ClusterDirectory, Contact
from hpcgpu.store.gone import is_there

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

__all__ = ["dask_setup", "dask_teardown", "publish"]


def publish(
    scheduler: Scheduler,
    directory: ClusterDirectory,
    *,
    job_id: str,
    fabric: str,
    network: str = "",
    interface: str = "",
) -> Contact:
    """Write the contact of a scheduler that listens. Its first listener is for workers, its last for clients."""
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
    # As `dask scheduler --scheduler-file` writes it, with the address for clients: for Client(scheduler_file=...).
    directory.write("scheduler.json", json.dumps({**scheduler.identity(), "address": contact.client}, indent=1))
    return contact


async def dask_setup(scheduler: Scheduler) -> None:
    """Publish the contact; distributed calls this once the scheduler listens."""
    environ = os.environ
    directory = ClusterDirectory(Path(environ["HPCGPU_CLUSTER_DIRECTORY"]))
    try:
        check_alone(directory, environ["HPCGPU_SCHEDULER_JOB"])  # once more: another one may have started meanwhile
    except LaunchError as error:
        print(f"hpcgpu: {error}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # distributed only logs an exception of a preload
        return
    token, lease = directory.token(), float(environ.get("HPCGPU_LEASE", "0")) or None
    # a directory that is not there now says nothing
    extension = install(
        scheduler,
        None if directory.detached else lease,
        lambda: not is_there(directory, token) or directory.detached,
    )
    extension.unattended = Unattended(directory, environ["HPCGPU_SCHEDULER_JOB"])
    extension.usage.keep(directory, told())
    publish(scheduler, directory, job_id=environ["HPCGPU_SCHEDULER_JOB"], **json.loads(environ["HPCGPU_FABRIC"]))
    try:
        gpu_page.add(scheduler, extension.usage.now, directory.path.name)
    except Exception as error:  # of a release of Dask or Bokeh that we do not know: the page is not worth a cluster
        print(f"hpcgpu: the dashboard has no page /hpcgpu: {error!r}", file=sys.stderr, flush=True)
    if directory.wanted().unattended:  # after the contact: later requests find it, and go to the scheduler
        if problem := await extension.unattended.start():
            print(f"hpcgpu: adaptive scaling is off: {problem}", file=sys.stderr, flush=True)
            await extension.heartbeat(about=f"adaptive scaling is off: {problem}")


async def dask_teardown(scheduler: Scheduler) -> None:
    """Remove the contact if it is still this scheduler's: workers that start now must not wait for it."""
    directory = ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"]))
    extension = scheduler.plugins.get("hpcgpu")
    if extension is not None and extension.unattended is not None:
        await extension.unattended.stop()
    contact = directory.contact()
    if contact is not None and contact.job_id == os.environ["HPCGPU_SCHEDULER_JOB"]:
        directory.withdraw()
