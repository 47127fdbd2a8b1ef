"""The Dask scheduler in the client's process, for sites that allow it: ``scheduler="local"``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from dask import config
from distributed.scheduler import Scheduler
from distributed.security import Security
from distributed.utils import silence_logging_cmgr

from hpcgpu.client import lost_scheduler
from hpcgpu.dask_scheduler.published_datasets import PublishedDatasets
from hpcgpu.dask_scheduler.scheduler_extension import install
from hpcgpu.dask_scheduler.scheduler_preload import publish_contact
from hpcgpu.fabric import interface_addresses
from hpcgpu.jobs.job import Job
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.runtime import dashboard_access, scratch
from hpcgpu.runtime.complete_dask_commands import NO_LIMIT
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory


class LocalScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that publishes its contact in the cluster directory, as the scheduler job does."""

    external_address = None

    def __init__(self, options: Options, security: Security, directory: ClusterDirectory) -> None:
        self._directory = directory
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(silence_logging_cmgr(logging.WARNING))  # as distributed's LocalCluster does
        self._idle_timeout = options.cluster.idle_timeout
        ours = {"distributed.scheduler.worker-ttl": None, "distributed.scheduler.idle-timeout": None}  # hpcgpu's limits
        self._temporary = contextlib.ExitStack()
        temporary = self._temporary.enter_context(scratch.made(scratch.temporary_directory()))
        dashboard_access.escape_text()
        with config.set({"temporary-directory": str(temporary), **ours}), dashboard_access.token_required(directory):
            super().__init__(
                protocol=directory.stream,
                interface=options.worker.interface
                or interface_addresses.default_interface(interface_addresses.addresses()),
                port=0,
                security=security,
                dashboard_address="127.0.0.1:0",
                allowed_failures=NO_LIMIT,  # hpcgpu counts them
            )

    async def start_unsafe(self) -> LocalScheduler:
        """Listen, then publish the contact."""
        await super().start_unsafe()
        extension = install(self)
        extension.idle_time.limit = self._idle_timeout or extension.idle_time.limit
        extension.usage.write_into(self._directory, None)
        extension.datasets = PublishedDatasets(self, self._directory)
        extension.datasets.begin()
        self.contact = publish_contact(
            self, self._directory, job_id="", fabric="the scheduler runs in the client's process"
        )
        return self

    async def close(self, *arguments: Any, **options: Any) -> None:
        """End, remove the temporary files, and restore Dask's logging in this process."""
        try:
            await super().close(*arguments, **options)
        finally:
            self._quiet.close()
            self._temporary.close()


class InProcessScheduler:
    """The scheduler in this process, with the attributes and methods of a `SchedulerJob` that a cluster uses.

    Parameters
    ----------
    options : Options
    security : Security
    directory : ClusterDirectory
    """

    in_process = True
    dependency = None
    ended = False
    external_address = None
    entries: Sequence[Job] = ()

    def __init__(self, options: Options, security: Security, directory: ClusterDirectory) -> None:
        self._made_from = (options, security, directory)
        self._scheduler: LocalScheduler | None = None

    @property
    def contact(self) -> Contact | None:
        """The addresses by which the scheduler is reached."""
        return self._scheduler.contact if self._scheduler is not None else None

    @property
    def address(self) -> str | None:
        """The address for workers and clients."""
        return str(self._scheduler.address) if self._scheduler is not None else None

    @property
    def for_users(self) -> object:
        """The value of ``cluster.scheduler`` for users."""
        return self._scheduler

    @property
    def submit_done(self) -> bool:
        """Whether worker jobs may be submitted."""
        return self._scheduler is not None

    async def submit(self) -> None:
        """Start it."""
        self._scheduler = await LocalScheduler(*self._made_from)

    async def wait_until_reachable(self) -> None:
        """Return at once: the scheduler listens as soon as it has started."""

    def record_answer(self, answers: bool) -> None:
        """Do nothing: the scheduler runs in this process."""

    def end_is_near(self, *, now: float) -> str:
        """Return an empty string: the scheduler has no walltime."""
        return ""

    def loss_report(self, cluster: str, *, restarts: bool = False) -> str:
        """Return the report for the user when it has ended."""
        return lost_scheduler.IN_PROCESS

    async def close(self) -> None:
        """End it."""
        if self._scheduler is not None:
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(self._scheduler.close(), 5)
