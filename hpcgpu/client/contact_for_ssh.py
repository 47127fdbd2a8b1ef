"""What a login node reports to a program of another machine about a scheduler."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from hpcgpu.client import lost_scheduler
from hpcgpu.client.connect import wait_for_contact
from hpcgpu.client.dashboard_forwarding import proven_link
from hpcgpu.client.reached_by_ssh import NextScheduler, ReachedScheduler
from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.posix import checked_files
from hpcgpu.runtime.scheduler_connection import identify, proves_life
from hpcgpu.store import saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Seconds after which a scheduler that ends does not listen any more.
_MAY_BE_ENDING = 1.0


def scheduler_of(
    directory: ClusterDirectory, *, wait: bool, timeout: float | None = None, keys: bool = True
) -> ReachedScheduler:
    """Return the scheduler of a cluster, after a wait for it.

    Raises
    ------
    ClusterError
        It has ended; without `wait` also if it is not there yet.
    TimeoutError
        It did not answer in time.
    """
    contact = wait_for_contact(directory, timeout=timeout) if wait else directory.contact()
    if contact is None:
        raise ClusterError(f"the scheduler of cluster {directory.path.name} is not there yet")
    return _reached(ClusterDirectory.existing(directory.path), contact, keys=keys)


def next_scheduler_of(directory: ClusterDirectory, job_id: str, *, wait: bool) -> NextScheduler:
    """Return which scheduler follows that of a job, after a wait for it if `wait`; and why that one has ended."""
    if wait:
        contact = directory.contact()
        asyncio.run(lost_scheduler.next_contact(directory, contact.client if contact else "", job_id))
    lives = _lives(directory, job_id)
    why = "" if wait or lives else asyncio.run(lost_scheduler.end_in_queue(directory, job_id))
    contact = directory.contact()
    follows = contact is not None and contact.job_id != job_id
    scheduler = _reached(directory, contact, keys=False) if follows and contact is not None else None
    return NextScheduler(scheduler=scheduler, why=why, lives=lives)


def _lives(directory: ClusterDirectory, job_id: str) -> bool:
    """Whether the scheduler of a job lives, so that only the way to it was broken."""
    contact = directory.contact()
    if contact is None or contact.job_id != job_id:
        return False
    for pause in (_MAY_BE_ENDING, 0.0):  # one that ends may still listen
        if not proves_life(identify(contact, directory), contact):
            return False
        time.sleep(pause)
    return True


def _reached(directory: ClusterDirectory, contact: Contact, *, keys: bool) -> ReachedScheduler:
    found, tls = {"certificate": "", "key": "", "ucx_key": "", "dashboard": ""}, directory.tls
    if keys and directory.encrypted:
        found["ucx_key"] = checked_files.read(tls / "ucx.key").decode()
        if not directory.authenticated:
            found["certificate"] = checked_files.read(tls / "cert.pem").decode()
            found["key"] = checked_files.read(tls / "key.pem").decode()
    if keys:
        with suppress(HpcgpuError, OSError):
            found["dashboard"] = proven_link(directory, contact)
    options = saved_options.read(directory).options
    found["on_scheduler_end"] = options.cluster.on_scheduler_end
    workers = options.worker.workers_per_job
    return ReachedScheduler(contact=contact, directory=str(directory.path), workers_per_job=workers, **found)
