"""Starts a cluster.

Refuses options that cannot work here, makes the cluster's directory, starts the scheduler and the worker jobs.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from dask import config
from distributed.security import Security

from hpcgpu.batch import system_registry
from hpcgpu.batch.base import BatchSystem, JobState, Outlook
from hpcgpu.batch.reasons import outlook
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError, ClusterExists, ClusterWarning, NotTrusted, OptionError
from hpcgpu.existing_clusters.lookup import batch_of, system_of
from hpcgpu.existing_clusters.query_jobs import live_jobs, unended
from hpcgpu.existing_clusters.unsubmitted_jobs import unfinished
from hpcgpu.fabric import interface_addresses, ucx_settings
from hpcgpu.jobs.job import Job
from hpcgpu.jobs.job_registry import Registry
from hpcgpu.jobs.local_scheduler import InProcessScheduler
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.manager.periodic_tasks import Periodic
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.manager.take_over import attach, program
from hpcgpu.options.shared_options_and_defaults import DEFAULT, Options, WorkerOptions
from hpcgpu.posix import full_disk, paths
from hpcgpu.posix.filesystems import is_shared
from hpcgpu.posix.ownership import check_parent
from hpcgpu.runtime import scratch
from hpcgpu.scaling.wanted_state import AddGroup, Wanted, apply
from hpcgpu.scripts import container, render
from hpcgpu.store import certificates_and_keys, create_directory, saved_options
from hpcgpu.store.directory import ClusterDirectory

#: Seconds to wait for the queue's first answers on a scheduler job, before this program leaves the job.
_FIRST_ANSWER = 10.0
#: Seconds after which the queue has reported the end of a scheduler that accepts no connection.
_END_IS_KNOWN = 60.0


class Starter:
    """Starts the scheduler of one cluster, or attaches to it, and submits the worker jobs.

    Parameters
    ----------
    reconciler : Reconciler
    periodic : Periodic
    options : Options
    security : Security
    """

    def __init__(self, reconciler: Reconciler, periodic: Periodic, options: Options, security: Security) -> None:
        self.reconciler = reconciler
        self.periodic = periodic
        self.options = options
        self.security = security
        #: The first jobs are in the queue. If the caller waits for the scheduler, their submit may still be under way.
        self.submitted = asyncio.Event()

    async def start(self, connect: Callable[[], Awaitable[None]]) -> None:
        """Return when `connect` has connected to the scheduler, or when one that has followed it is reached."""
        state, restarts = self.reconciler.state, self.reconciler.restarts
        if state.ownership.attached:
            following = await attach(state, self.scheduler_job)
            if restarts is not None:
                restarts.following = following
            self.reconciler.restore(state.dispatcher.directory.wanted())
            self.reconciler.drainer.continue_drains()
        else:
            await self._submit_scheduler()
        self.reconciler.decide()
        self.reconciler.submitter.detach_when_complete()
        submits = asyncio.gather(*state.tasks, return_exceptions=True)
        self.periodic.watch_queue()
        if not self.options.cluster.wait:  # a refused job raises an error in the caller
            await submits
            while restarts is not None and restarts.tasks and not restarts.submitted:
                await asyncio.sleep(0.05)
            self._check()
            # if this program left the scheduler job now, the job might wait for ever, and nobody would get a report
            if not self.options.cluster.shutdown_on_close:
                await self._first_answer()
        self.submitted.set()
        scheduler = state.scheduler
        try:
            if not self.reconciler.scheduler_gone:
                await self._wait_until_reached(submits)
                if state.scheduler is scheduler:
                    await self._connect(connect)
                if state.scheduler is scheduler and not state.phase.restarting:
                    return
        except (ClusterError, OSError):
            if state.scheduler is scheduler and not self.reconciler.scheduler_gone:
                raise
        await self._wait_for_next()

    async def _connect(self, connect: Callable[[], Awaitable[None]]) -> None:
        """Connect to the scheduler; if that fails, it may have ended, and the queue reports that a moment later."""
        state, scheduler, failed = self.reconciler.state, self.reconciler.state.scheduler, 0.0
        follows = state.ownership.attached and self.reconciler.restarts is not None
        while True:
            try:
                return await connect()
            except OSError:
                failed = failed or time.monotonic()
                over = not state.managed or state.scheduler is not scheduler or self.reconciler.scheduler_gone
                if not follows or over or time.monotonic() - failed > _END_IS_KNOWN:
                    raise
            await asyncio.sleep(1.0)

    async def _wait_for_next(self) -> None:
        """Wait for the scheduler that follows one which has ended while this program takes its cluster over."""
        state = self.reconciler.state
        while state.client is None and state.managed:
            with suppress(OSError):  # a filesystem that fails for a while
                self.reconciler.decide()
            await asyncio.sleep(0.5)
        if state.client is None:
            left = f"this program has left cluster {state.name}, which has no scheduler yet"
            raise ClusterError(state.phase.lost or state.phase.not_ours or left)

    async def _wait_until_reached(self, submits: asyncio.Future[Any]) -> None:
        """Wait until the scheduler can be reached, and the worker jobs are submitted."""
        state = self.reconciler.state
        scheduler = state.scheduler
        assert scheduler is not None
        reached = asyncio.ensure_future(scheduler.wait_until_reachable())
        try:
            while not reached.done():
                self._check()
                if state.phase.superseded:  # the other program now waits for the scheduler
                    raise ClusterError(state.phase.not_ours)
                state.check_schedulable(scheduler.entries)
                if any(job.name not in state.registry.jobs for job in scheduler.entries):  # its submit got no answer
                    raise ClusterError("the queue does not have its scheduler job")
                await asyncio.wait([reached], timeout=0.5)
            await reached
            await submits
            self._check()
        finally:
            reached.cancel()

    def _check(self) -> None:
        """Raise `ClusterError` if the cluster cannot start.

        A refused job does not end a take-over: the earlier manager would not continue, and the cluster has its other
        jobs. The user gets a warning.
        """
        state = self.reconciler.state
        if state.phase.lost or not state.ownership.attached:
            state.check()
        elif failures := state.failures.report():
            with suppress(ClusterWarning):  # under `-W error` as well
                warn(failures)

    async def _first_answer(self) -> None:
        """Wait a short time for the queue's status of the scheduler job. Raise `ClusterError` if it can never start."""
        state = self.reconciler.state
        entries = state.scheduler.entries if state.scheduler is not None else []

        def known(job: Job) -> bool:
            if job.view is None or not job.view.polled:
                return False
            never = job.queue_status.state is JobState.PENDING and outlook(job.queue_status) is Outlook.NEVER
            return not never or state.failures.unschedulable([job.name]) is not None

        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_ANSWER):
                while not (state.dispatcher.monitor.error or all(map(known, entries))):
                    await asyncio.sleep(0.05)
        state.check_schedulable(entries)

    async def _submit_scheduler(self) -> None:
        state = self.reconciler.state
        self.reconciler.record(state.wanted)
        if self.options.scheduler is None:
            state.scheduler = InProcessScheduler(self.options, self.security, state.dispatcher.directory)
        else:
            job = self.scheduler_job(f"{self.reconciler.state.name}-scheduler")
            state.registry.add(job)
            state.scheduler = job
        self.reconciler.decide()
        if self.reconciler.submitter.first_scheduler is None:
            raise ClusterError(state.phase.not_ours or f"cluster {state.name} ends")
        await self.reconciler.submitter.first_scheduler
        if not self.options.cluster.jobs:  # otherwise one poll for all jobs follows the last submit
            state.poll_now.set()
        for entry in state.scheduler.entries:
            state.messages.log(f"submitted scheduler job {entry.job_id}")

    def scheduler_job(self, name: str) -> SchedulerJob:
        """Return a job of the scheduler, with this name."""
        state = self.reconciler.state
        script = state.dispatcher.directory.path / render.script_name(self.options.system, "scheduler")
        options, timeout = self.options.scheduler, self.options.worker.death_timeout
        gpus = options.gpus_per_node if options is not None else 0
        job = SchedulerJob(state.dispatcher, script, name, state.registry.logs, timeout, gpus)
        job.directives = options.job_extra_directives if options is not None else ()
        job.restarts = self.options.cluster.on_scheduler_end == "restart"
        return job


def check(options: Options) -> None:
    """Refuse options that cannot work on this machine."""
    for job in (options.worker, options.scheduler):
        if job is not None and job.local_directory is not None and "$" not in job.local_directory:
            check_local_directory(job.local_directory, everywhere=system_registry.system(options.system).one_machine)
    if options.cluster.security == "authenticated" and config.get("distributed.comm.require-encryption"):
        raise OptionError(
            "security='authenticated' does not encrypt, and your Dask configuration sets "
            "distributed.comm.require-encryption: remove it there, or use security=True"
        )
    if options.scheduler is None and not options.cluster.shutdown_on_close:
        raise OptionError(
            "scheduler='local' does not work with shutdown_on_close=False or with `hpcgpu start`: the scheduler runs "
            "in this program and ends with it. Leave scheduler out, so that the scheduler gets a job"
        )
    if options.scheduler is None and options.cluster.on_scheduler_end == "restart":
        raise OptionError(
            "scheduler='local' does not work with on_scheduler_end='restart': the scheduler runs in this program and "
            "ends with it. Leave scheduler out, so that the scheduler gets a job"
        )
    if options.scheduler is None and options.worker.interface:
        if problem := interface_addresses.missing(options.worker.interface, interface_addresses.addresses()):
            raise OptionError(f"scheduler='local': {problem}")


def warn_of_options(options: Options) -> None:
    """Warn of options that the user probably does not want."""
    if not options.cluster.security:
        warn(
            "security=False: everybody who can reach a port of the scheduler or of a worker can run programs with your "
            "rights, and many users share the network of compute nodes"
        )
    for warning in ucx_settings.warnings(options.worker):
        warn(warning)
    warn_of_end(options, options.worker)


def warn_of_end(options: Options, worker: WorkerOptions) -> None:
    """Warn if the walltime of the scheduler job is shorter than that of worker jobs, and ends the cluster."""
    scheduler = options.scheduler if options.cluster.on_scheduler_end == "end" else None
    if scheduler is None or scheduler.walltime is None or worker.walltime is None:
        return
    if scheduler.walltime >= worker.walltime:
        return
    has, have = duration(scheduler.walltime), duration(worker.walltime)
    warn(
        f"the walltime of the scheduler job, {has}, is shorter than that of the worker jobs, {have}: the cluster ends "
        f"with the scheduler job. Write scheduler={{'walltime': ...}} with at least {have}"
    )


def existing(options: Options, batch: BatchSystem) -> ClusterDirectory | None:
    """Return the directory of the live cluster of this name to which the user wants to attach; else None."""
    settings = options.cluster
    path = settings.cluster_directory / settings.name
    if settings.if_exists != "connect" or not (path / "cluster.json").exists():
        return None
    directory = ClusterDirectory.existing(path, any_format=True)
    if directory.closing:
        return None
    directory.check_format()
    return directory if live_jobs(directory, batch) else None


def warn_of_differences(requested: Options, existing_options: Options, log: Callable[[str], None]) -> None:
    """Warn of options that differ from the requested ones, because the cluster existed before."""
    if differ := differences(requested, existing_options):
        log(message := f"cluster {existing_options.cluster.name} already existed: it keeps its own {', '.join(differ)}")
        warn(message)


def differences(requested: Options, existing_options: Options) -> list[str]:
    """Return which options of an existing cluster differ from the requested ones."""
    pairs = [
        ("", requested.worker, existing_options.worker),
        ("scheduler: ", requested.scheduler, existing_options.scheduler),
    ]
    return [
        f"{where}{f.name}"
        for where, wanted, kept in pairs
        if wanted is not None and kept is not None
        for f in fields(wanted)
        if getattr(wanted, f.name) != getattr(kept, f.name)
    ]


def claim(options: Options, batch: BatchSystem) -> tuple[ClusterDirectory, int]:
    """Make the directory with all its content; return the directory and this program's manager number."""
    settings = options.cluster
    path = settings.cluster_directory / settings.name
    rendered = {
        kind: render.render(options.system, kind, options, path)
        for kind in ("scheduler", "worker")
        if kind == "worker" or options.scheduler is not None
    }
    render.make_log_directory(options)
    manager = 0

    def complete(directory: ClusterDirectory) -> None:
        nonlocal manager
        if settings.security:
            ends = options.scheduler is not None and settings.on_scheduler_end == "end"
            certificates_and_keys.create(directory, options.scheduler.walltime if options.scheduler and ends else None)
        saved_options.write(directory, options)
        container.provide(directory.path, options.worker, options.scheduler)
        for kind, text in rendered.items():
            directory.write(render.script_name(options.system, kind), text)
        manager = directory.take_over(program()).number

    try:
        queue = batch.identity()
        directory = create_directory.claim(
            path, alive, system=options.system, queue=queue, security=settings.security, complete=complete
        )
    except ClusterExists as error:
        rest = unfinished(ClusterDirectory(path), now=time.time()) if (path / "cluster.json").exists() else ""
        if not rest:
            raise
        raise ClusterExists(f"{error}. {rest}") from None
    except NotTrusted as error:
        raise OptionError(f"cluster_directory={str(settings.cluster_directory)!r}: {error}") from error
    except OSError as error:
        place = f"cluster_directory={str(settings.cluster_directory)!r}"
        otherwise = "It must be on a filesystem that login and compute nodes share"
        raise OptionError(full_disk.cannot_be_written(place, error, otherwise)) from error
    return directory, manager


def alive(directory: ClusterDirectory) -> list[str]:
    """Return the ids of an earlier cluster's jobs that are still in the queue of its own batch system."""
    return unended(directory, batch_of(directory))


def check_local_directory(given: str, *, everywhere: bool) -> None:
    """Refuse a `local_directory` that cannot be used, if this machine and the nodes share that directory.

    Otherwise the jobs check it themselves.
    """
    try:
        path = Path(paths.expand(given, os.environ))
        there = next(place for place in (path, *path.parents) if place.exists())
        if not everywhere and not is_shared(there):
            return
        check_parent(there)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if everywhere and not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except (NotTrusted, OSError) as error:
        raise OptionError(scratch.refusal(given, error)) from error
    except ValueError as error:
        raise OptionError(f"local_directory={given!r}: {error}") from error


def registry_of(options: Options, groups: Mapping[str, WorkerOptions], dispatcher: Dispatcher) -> Registry:
    """Return a registry without jobs, with the default group and these other groups."""
    settings, directory = options.cluster, dispatcher.directory
    jobs = Registry(settings.name, dispatcher, settings.log_directory or directory.logs, settings.worker_restarts)
    for name, worker in {DEFAULT: options.worker, **groups}.items():
        script = render.script_name(options.system, "worker", *([name] if name != DEFAULT else []))
        jobs.add_group(name, worker, directory.path / script)
    return jobs


def wanted_first(groups: Mapping[str, WorkerGroup], jobs: int) -> Wanted:
    """Return the wanted state before the first command: this number of jobs in the default group."""
    wanted = Wanted()
    for name, group in groups.items():
        wanted = apply(wanted, AddGroup(name, jobs if name == DEFAULT else 0))
        group.want(wanted.groups[name])
    return wanted


def attachable(directory: ClusterDirectory, system: str) -> saved_options.Saved:
    """Return the saved options of a cluster that this program can take over.

    Raises
    ------
    ClusterError
        The cluster has another batch system, was closed, or its scheduler ran in the program that made it.
    """
    name = directory.path.name
    if (its := system_of(directory)) != system:
        raise ClusterError(f"cluster {name} belongs to batch system {its!r}, not {system!r}")
    if directory.closing:
        raise ClusterError(directory.how_it_ended())
    kept = saved_options.read(directory)
    if kept.options.scheduler is None:
        raise ClusterError(
            f"cluster {name} cannot be taken over: its scheduler runs in the program that made it (scheduler='local')"
        )
    return kept
