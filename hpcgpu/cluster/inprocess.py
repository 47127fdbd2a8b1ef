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

from hpcgpu.cluster.job import Job
from hpcgpu.fabric import interfaces
from hpcgpu.options.common import Options
from hpcgpu.runtime import scratch
from hpcgpu.runtime.dashboard import guard
from hpcgpu.runtime.extension import install
from hpcgpu.runtime.scheduler import publish
from hpcgpu.store.directory import ClusterDirectory, Contact

__all__ = ["InProcessScheduler", "LocalScheduler"]


class LocalScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that publishes its contact in the cluster directory, as the scheduler job does."""

    external_address = None

    def __init__(self, options: Options, security: Security, directory: ClusterDirectory) -> None:
        self._directory = directory
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(silence_logging_cmgr(logging.WARNING))  # as distributed's LocalCluster does
        arguments: dict[str, Any] = {}
        if options.cluster.idle_timeout:
            arguments["idle_timeout"] = f"{options.cluster.idle_timeout:g}s"
        self._temporary = contextlib.ExitStack()
        temporary = self._temporary.enter_context(scratch.made(scratch.place()))
        with config.set({"temporary-directory": str(temporary)}):
            super().__init__(
                protocol=directory.stream,
                interface=options.worker.interface or interfaces.default_interface(interfaces.addresses()),
                port=0,
                security=security,
                dashboard_address="127.0.0.1:0",
                **arguments,
            )

    def start_http_server(self, *arguments: Any, **named: Any) -> None:
        """Listen, and answer those who have the token."""
        super().start_http_server(*arguments, **named)
        guard(self.http_server, self._directory)

    async def start_unsafe(self) -> LocalScheduler:
        """Listen, then publish."""
        await super().start_unsafe()
        install(self).usage.keep(self._directory, None)
        self.contact = publish(self, self._directory, job_id="", fabric="the scheduler runs in the client's process")
        return self

    async def close(self, *arguments: Any, **options: Any) -> None:
        """End, remove the temporary files, and let Dask's logging in this process be as it was."""
        try:
            await super().close(*arguments, **options)
        finally:
            self._quiet.close()
            self._temporary.close()


class InProcessScheduler:
    """The scheduler in this process, as `hpcgpu.cluster.scheduler.Scheduler` describes it.

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
        """How it is reached."""
        return self._scheduler.contact if self._scheduler is not None else None

    @property
    def address(self) -> str | None:
        """Where all reach it."""
        return str(self._scheduler.address) if self._scheduler is not None else None

    @property
    def held(self) -> object:
        """What users get as ``cluster.scheduler``."""
        return self._scheduler

    @property
    def submit_done(self) -> bool:
        """Whether worker jobs may be submitted."""
        return self._scheduler is not None

    async def submit(self) -> None:
        """Start it."""
        self._scheduler = await LocalScheduler(*self._made_from)

    async def reach(self) -> None:
        """It listens as soon as it has started."""

    def heard(self, answers: bool) -> None:
        """It is here."""

    def end_is_near(self, *, now: float) -> str:
        """Return nothing: it has no walltime."""
        return ""

    def loss_report(self, cluster: str) -> str:
        """Return what can be said of it."""
        return "the scheduler in this process has ended: make a new cluster"

    async def close(self) -> None:
        """End it."""
        if self._scheduler is not None:
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(self._scheduler.close(), 5)
