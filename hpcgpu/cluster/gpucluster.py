"""What the user holds: a Dask cluster whose scheduler and workers are jobs of a batch queue.

It scales, waits and tells; `hpcgpu.cluster.lifecycle` begins and ends it, `hpcgpu.cluster.manager` keeps its jobs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import dask
from dask.utils import parse_timedelta
from distributed import Client
from distributed.core import Status
from distributed.deploy.spec import NoOpAwaitable
from distributed.exceptions import WorkerStartTimeoutError
from distributed.utils import Log, Logs

from hpcgpu.cluster.adaptive import GPUAdaptive
from hpcgpu.cluster.groups import WorkerGroup
from hpcgpu.cluster.jobs import WorkerJob
from hpcgpu.cluster.lifecycle import Lifecycle
from hpcgpu.configuration.classes import option_classes
from hpcgpu.configuration.resolve import resolve_group
from hpcgpu.display.progress import Progress
from hpcgpu.display.table import JobTable
from hpcgpu.errors import ClusterError, OptionError, Superseded
from hpcgpu.fabric import interfaces, report
from hpcgpu.fabric.report import Fabric
from hpcgpu.options import documentation, values
from hpcgpu.options.arguments import checked
from hpcgpu.options.common import DEFAULT
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime import dashboard
from hpcgpu.scaling import units
from hpcgpu.scaling.policy import Limits
from hpcgpu.scripts import render
from hpcgpu.store import saved

if TYPE_CHECKING:
    from hpcgpu.configuration import typed

__all__ = ["GPUCluster", "LocalGPUCluster", "PBSGPUCluster", "SlurmGPUCluster"]


class GPUCluster(Lifecycle):
    """A Dask cluster of batch jobs; use the subclass of your batch system.

    Parameters
    ----------
    scheduler : dict or "local", optional
        Options of the scheduler job, or "local" to run the scheduler in this process.
    asynchronous : bool, default False
        Use from a running event loop, with ``await`` and ``async with``.
    **options
        See `hpcgpu.options.schema`.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed. Nothing was submitted.
    ClusterExists
        A cluster of this name has jobs in the queue; see `if_exists`.
    BatchError
        The batch system is not installed here, or it does not answer.
    NotTrusted
        Another user can write to the cluster directory, or to a file that the jobs run.
    ClusterError
        The batch system refused a job, or the scheduler job ended before its scheduler answered. No job is left then.
    """

    # Scaling

    @checked(
        n_workers="write scale(n), which counts Dask workers",
        workers="write scale(n), which counts Dask workers",
    )
    def scale(
        self,
        n: int | None = None,
        memory: str | int | None = None,
        cores: int | None = None,
        *,
        jobs: int | None = None,
        gpus: int | None = None,
        worker_group: str = DEFAULT,
    ) -> Awaitable[None] | None:
        """Set the size of a group of workers, in one of these units; rounded up to whole jobs. Ends its adaptive scaling.

        Data moves to the jobs that stay. Where none is left, after ``scale(0)``, it is lost.

        Parameters
        ----------
        n : int, optional
            Dask workers: one per GPU.
        memory : str or int, optional
            Memory of all workers, such as "1TB"; needs the option `memory`.
        cores : int, optional
            Threads of all workers.
        jobs : int, optional
            Worker jobs.
        gpus : int, optional
            GPUs of all workers.
        worker_group : str, optional
            See `add_worker_group`.

        Raises
        ------
        OptionError
            A negative number, no unit at all, or no such group.
        ClusterError
            The cluster has failed.
        """
        group = self._group(worker_group)
        target = units.jobs_for(group.options, n=n, memory=memory, cores=cores, jobs=jobs, gpus=gpus)
        self._resize(group, Limits(maximum=target, fixed=True), None)
        return NoOpAwaitable() if self.asynchronous else None

    scale_up = scale

    @checked(
        Adaptive="hpcgpu has rules of its own, see the page on adaptive scaling: remove it",
        interval="hpcgpu decides whenever something has changed, and each second: remove it",
        wait_count="write idle_timeout, which says how long a job without work is kept",
        worker_key="hpcgpu keeps and releases whole jobs: remove it",
        jobs="write minimum_jobs and maximum_jobs",
        n="write minimum and maximum",
    )
    def adapt(
        self,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        minimum_gpus: int | None = None,
        maximum_gpus: int | None = None,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        minimum_memory: str | int | None = None,
        maximum_memory: str | int | None = None,
        backlog: int | None = None,
        idle_timeout: float | str | None = None,
        target_duration: float | str | None = None,
        maximum_gpu_hours: float | None = None,
        worker_group: str = DEFAULT,
    ) -> GPUAdaptive:
        """Let the work decide the size of a group of workers, in whole jobs; see `hpcgpu.scaling.policy`.

        Jobs stay while they are needed to hold results that clients still want.

        Parameters
        ----------
        minimum, maximum : int, optional
            Dask workers. A maximum is needed, in one of these units; it is rounded down to whole jobs, the minimum up.
        minimum_jobs, maximum_jobs : int, optional
            Worker jobs.
        minimum_gpus, maximum_gpus : int, optional
            GPUs.
        minimum_cores, maximum_cores : int, optional
            Threads of workers.
        minimum_memory, maximum_memory : str or int, optional
            Memory of all workers; needs the option `memory`.
        backlog : int, optional
            Jobs that may wait in the queue at a time. Default: as many as the maximum.
        idle_timeout : float or str, optional
            How long a job without work is kept, seconds or "5m". Default: as long as it takes to get another one, as learned from the
            queue; 5 s at least, 30 s at most. Give more for interactive work.
        target_duration : float or str, optional
            In what time the work that is known shall be done; the larger, the fewer jobs. Default: dask's
            ``distributed.adaptive.target-duration``.
        maximum_gpu_hours : float, optional
            Budget of the group's GPUs, counted from the starts and ends of its jobs. When it is used up all its jobs are given up.
        worker_group : str, optional
            See `add_worker_group`.

        Returns
        -------
        GPUAdaptive

        Raises
        ------
        OptionError
            Numbers that are not allowed, or there is no such group.
        ClusterError
            The cluster has failed.
        """
        group = self._group(worker_group)
        limits = units.limits(
            group.options,
            minimum={
                "n": minimum,
                "jobs": minimum_jobs,
                "gpus": minimum_gpus,
                "cores": minimum_cores,
                "memory": minimum_memory,
            },
            maximum={
                "n": maximum,
                "jobs": maximum_jobs,
                "gpus": maximum_gpus,
                "cores": maximum_cores,
                "memory": maximum_memory,
            },
            backlog=backlog,
            idle_timeout=idle_timeout,
            maximum_gpu_hours=maximum_gpu_hours,
        )
        if target_duration is None:
            target_duration = dask.config.get("distributed.adaptive.target-duration")
        seconds = values.duration("target_duration", target_duration)
        adaptive = GPUAdaptive(group, limits, seconds, lambda: self._in_loop(self._decide_now.set))
        self._resize(group, limits, adaptive)
        return adaptive

    def settle(self) -> Awaitable[None] | None:
        """Wait until the requested jobs are submitted, and the draining jobs have finished and are cancelled.

        Raises
        ------
        ClusterError
            The cluster has failed, or a job was refused.
        """
        self._check_usable()
        return self.sync(self._settle)  # type: ignore[no-any-return]

    async def _settle(self) -> None:
        with Progress(self.options.cluster.quiet) as progress:
            while tasks := [task for task in self._changing if not task.done()]:
                leaving = [job for job in self._all_jobs.values() if isinstance(job, WorkerJob) and job.leaving and job.alive]
                names = ", ".join(job.name for job in leaving)
                what = f"{names} to finish what they run and to move their data" if names else "the queue"
                progress.update(f"cluster {self.name}: waiting for {what}")
                await asyncio.wait(tasks, timeout=0.5)
        self._raise_problem()

    def add_worker_group(self, name: str, *, jobs: int = 0, **options: Any) -> None:
        """Add a family of worker jobs that ask for other things: GPUs of another type, much memory, another queue.

        Tasks reach it by Dask's own ``resources`` annotations.

        Parameters
        ----------
        name : str
        jobs : int, default 0
            Worker jobs to begin with.
        **options
            Of a worker job, see `hpcgpu.options.common.WorkerOptions`. Account, walltime, environment and whatever else the scheduler job
            inherits are those of the default group where not given.

        Raises
        ------
        OptionError
            An unknown option, a value that is not allowed, or a group of that name exists.
        ClusterError
            The cluster has failed.
        """
        self._check_usable()
        if name in self._groups:
            raise OptionError(f"a worker group named {name!r} exists: its size is set by scale(worker_group={name!r})")
        worker = resolve_group(name, options, self.options)
        script = render.script_name(self.system, "worker", name)
        text = render.render(self.system, "worker", replace(self.options, worker=worker), self.directory.path, name)
        target = units.jobs_for(worker, jobs=jobs, call="add_worker_group: {}")
        path = self.directory.write(script, text)
        group = self._groups[name] = WorkerGroup(name, worker, path, self.options.cluster.worker_restarts)
        self._save_groups()
        self._resize(group, Limits(maximum=target, fixed=True), None)

    def delete_worker_group(self, name: str) -> None:
        """Give up all jobs of a group, and the group. A job whose data fits nowhere else stays until the data is released.

        Parameters
        ----------
        name : str

        Raises
        ------
        OptionError
            There is no such group, or it is the default group.
        ClusterError
            The cluster has failed, or was closed.
        """
        self._check_usable()
        group = self._group(name)
        if name == DEFAULT:
            raise OptionError("the default group stays: scale(jobs=0) gives up its jobs")

        def act() -> None:
            self._deleted.append(group)
            del self._groups[name]
            self._set(group, Limits(maximum=0, fixed=True), None)
            self._save_groups()

        self._in_loop(act)

    def _save_groups(self) -> None:
        groups = {name: group.options for name, group in self._groups.items() if name != DEFAULT}
        saved.write(self.directory, self.options, groups)

    def _group(self, name: str) -> WorkerGroup:
        if not isinstance(name, str) or name not in self._groups:
            raise OptionError(f"no worker group named {name!r}: there are {', '.join(self._groups)}; add_worker_group adds one")
        return self._groups[name]

    def _threads_per_worker(self) -> int:
        return units.threads_per_worker(self.options.worker)

    def _memory_per_worker(self) -> int:
        return units.memory_per_worker(self.options.worker)

    def _resize(self, group: WorkerGroup, limits: Limits, adaptive: GPUAdaptive | None) -> None:
        self._check_usable()
        try:
            self._dispatcher.check_manager()
        except Superseded as error:
            why = str(error)
            self._in_loop(lambda: self._step_down(why))
            raise ClusterError(why) from error
        self._in_loop(lambda: self._set(group, limits, adaptive))

    # Telling the user

    @property
    def fabric(self) -> Fabric:
        """What the workers really talk over, asked of UCX on the workers themselves: protocol, transports, RDMA, NVLink.

        An awaitable where the cluster is asynchronous.

        Raises
        ------
        ClusterError
            The scheduler is not there.
        """
        self._check_usable()
        if self.status != Status.running:
            raise ClusterError(f"cluster {self.name} is {self.status.name}: its fabric is known while its scheduler runs")
        return self.sync(self._fabric)  # type: ignore[no-any-return]

    async def _fabric(self) -> Fabric:
        self._raise_problem()
        contact = self.scheduler.contact
        workers = (await self.scheduler_comm.identity(n_workers=-1))["workers"]
        links, _ = await report.look(self.scheduler_comm, workers)
        return Fabric(contact.workers.split("://", 1)[0], contact.fabric, contact.interface, links)

    @property
    def dashboard_link(self) -> str:
        """Where the dashboard is; empty while there is none. The dashboard asks for a token, see `dashboard_link_with_token`."""
        return dashboard.link(getattr(self.scheduler, "contact", None))

    def dashboard_link_with_token(self) -> str:
        """Return the link that opens the dashboard in a browser; empty while there is none.

        Whoever has it can read the dashboard: do not keep it in a notebook that others get.
        """
        return dashboard.link_with_token(self.directory, getattr(self.scheduler, "contact", None))

    def wait_for_workers(self, n_workers: int | None = None, timeout: float | str | None = None) -> None:
        """Wait until so many workers are connected; say what is waited for, and fail when that cannot succeed any more.

        Parameters
        ----------
        n_workers : int, optional
            Default: all that the cluster asks for.
        timeout : number or str, optional
            Seconds, or a text with a unit. Default: none; the queue may take days.

        Raises
        ------
        OptionError
            `timeout` is not a time.
        ClusterError
            Jobs were refused or died too often, the scheduler is gone, or the cluster does not ask for so many workers.
        WorkerStartTimeoutError
            The time is over.
        """
        if n_workers is not None and (isinstance(n_workers, bool) or not isinstance(n_workers, int) or n_workers < 1):
            raise ValueError(f"`n_workers` must be a positive integer. Instead got {n_workers}.")
        if timeout:
            timeout = values.duration("wait_for_workers: timeout", timeout)
        self._check_usable()
        return self.sync(self._wait_for_workers, n_workers, timeout=timeout)  # type: ignore[no-any-return]

    async def _wait_for_workers(self, n_workers: int | None = None, timeout: float | str | None = None) -> None:
        deadline = time.monotonic() + parse_timedelta(timeout) if timeout is not None else math.inf
        if self._starting is not None and not self._starting.done():
            try:
                await asyncio.wait_for(self._start(), None if timeout is None else parse_timedelta(timeout))
            except TimeoutError as error:
                raise WorkerStartTimeoutError(0, n_workers or self._wanted_workers(), timeout) from error
        with Progress(self.options.cluster.quiet) as progress:
            while True:
                self._changed.clear()
                self._raise_problem()
                if self.status not in (Status.running, Status.starting):
                    raise ClusterError(f"cluster {self.name} is {self.status.name}")
                wanted = self._wanted_workers() if n_workers is None else n_workers
                there = len(self.scheduler_info["workers"])
                if there >= wanted and await self._running_workers() >= wanted:
                    return
                missing = [job for job in self.workers.values() if len(job.workers) < job.group.options.workers_per_job]
                self._raise_unreachable(wanted, missing)
                if time.monotonic() > deadline:
                    raise WorkerStartTimeoutError(there, wanted, timeout)
                progress.update(f"cluster {self.name}: waiting for {wanted} workers", f"{there} there; {self._why_not_there(missing)}")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.5)

    def _why_not_there(self, missing: Collection[WorkerJob]) -> str:
        """Return what the workers wait for: their jobs, and what keeps jobs out that there should be."""
        kept_out = [group.reason for group in self._groups.values() if group.held or not missing]
        return "; ".join([self._waiting(missing), *kept_out] if missing else kept_out)

    async def _running_workers(self) -> int:
        """Ask the scheduler: a worker that has just connected is not ready yet."""
        try:
            info = await asyncio.wait_for(self.scheduler_comm.identity(), 5)
        except (OSError, TimeoutError):
            self._poll_now.set()
            return -1
        return sum(worker["status"] == Status.running.name for worker in info["workers"].values())

    def _raise_unreachable(self, wanted: int, missing: Iterable[WorkerJob]) -> None:
        """Raise if so many workers can never be there: the plan has fewer, or its jobs cannot start, and nothing will change it."""
        own = {address for job in self.workers.values() for address in job.workers}
        foreign = len(set(self.scheduler_info["workers"]) - own)
        within_reach = foreign + sum(group.within_reach * group.options.workers_per_job for group in self._groups.values())
        within_reach -= sum(len(job.absence.since) for job in self.workers.values() if job.judged and job.group.failures.paused)
        hopeless = [job for job in missing if self._troubles.hopeless([job.name])]
        if within_reach - sum(job.group.options.workers_per_job for job in hopeless) < wanted:
            self._raise_hopeless(hopeless)
        if within_reach < wanted:
            jobs = sum(group.within_reach for group in self._groups.values())
            paused = next((group.failures.paused for group in self._groups.values() if group.failures.paused), "")
            why = paused or f"call scale({wanted})"
            raise ClusterError(
                f"cluster {self.name} asks for {within_reach} workers in {jobs} jobs, so {wanted} will never be there: {why}"
            )

    def _wanted_workers(self) -> int:
        """Workers that there shall be: of a fixed size all, of adaptive scaling those of its minimum or of the jobs that it asked for."""
        return sum(
            group.options.workers_per_job
            * (
                group.limits.maximum
                if group.limits.fixed
                else max(group.limits.minimum, sum(j.alive and not j.leaving for j in group.jobs))
            )
            for group in self._groups.values()
        )

    @property
    def jobs(self) -> JobTable:
        """Every job of the cluster, also those that have ended: id, kind, name, state, reason in words, seconds waited, node, workers."""
        return JobTable(job.info(now=time.time()) for job in list(self._all_jobs.values()))

    def scheduler_script(self) -> str:
        """Return the script of the scheduler job, as it is in the cluster directory."""
        if self.options.scheduler is None:
            raise ClusterError("scheduler='local': the scheduler runs in this process, there is no scheduler job")
        return (self.directory.path / render.script_name(self.system, "scheduler")).read_text()

    def job_script(self) -> str:
        """Return the script of the worker jobs, as it is in the cluster directory."""
        return (self.directory.path / render.script_name(self.system, "worker")).read_text()

    def get_client(self) -> Client:
        """Return a client of the cluster: the current one if it is, else a new one; an awaitable where the cluster is asynchronous.

        Raises
        ------
        ClusterError
            The cluster has failed, or was closed.
        """
        self._check_usable()
        return super().get_client()

    async def _get_logs(self, cluster: bool, scheduler: bool, workers: bool | Iterable[str]) -> Logs:
        return await in_thread(self._read_logs, cluster, scheduler, workers)

    def _read_logs(self, cluster: bool, scheduler: bool, workers: bool | Iterable[str]) -> Logs:
        logs = Logs()
        if cluster:
            lines = [f"{time.strftime('%F %T', time.localtime(at))} {text}" for at, text in self._cluster_manager_logs]
            logs["Cluster"] = Log("\n".join(lines))
        chosen = None if isinstance(workers, bool) else {units.job_of(w, self._all_jobs) or str(w) for w in workers}
        for job in list(self._all_jobs.values()):
            wanted = scheduler if job.kind == "scheduler" else (workers if chosen is None else job.name in chosen)
            if wanted and job.job_id is not None:
                logs[f"{job.name} (job {job.job_id})"] = Log(_read(job.log))
        return logs

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True) -> Logs:
        """Return the logs of all jobs, also of those that have ended, and when the cluster is closed.

        Parameters
        ----------
        cluster : bool, default True
            What this manager did and met.
        scheduler : bool, default True
        workers : bool or iterable of str, default True
            Or the names of jobs, or of workers.

        Returns
        -------
        distributed.utils.Logs
            Text by job.
        """
        if self.status == Status.closed and not self.asynchronous:  # its event loop has ended
            return self._read_logs(cluster, scheduler, workers)
        return self.sync(self._get_logs, cluster, scheduler, workers)

    def __repr__(self) -> str:
        if not hasattr(self, "_cluster_info"):
            return f"<{type(self).__name__}: not started>"
        if self.status == Status.failed:
            return f"{type(self).__name__}({self.name!r}, status=failed): {self._troubles.failure}"
        states: dict[str, int] = {}
        for job in self.jobs:
            if job.kind == "worker" and job.name in self.workers:
                states[job.state] = states.get(job.state, 0) + 1
        jobs = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        text = f"{type(self).__name__}({self.name!r}, {self.scheduler_address!r}, status={self.status.name}"
        text += f", workers={len(self.scheduler_info['workers'])}/{len(self.plan)}, worker jobs: {jobs})"
        paused = [group.failures.paused for group in self._groups.values() if group.failures.paused]
        missing = self._shortages(now=time.time())
        told = [trouble.split("\n", 1)[0] for trouble in (self._troubles.failure, *paused, *missing, *self._troubles.problems) if trouble]
        return "\n".join([text, *told])


class SlurmGPUCluster(GPUCluster):
    """A GPU Dask cluster on Slurm."""

    system = "slurm"

    if TYPE_CHECKING:  # what type checkers and editors see; `inspect.signature` shows the same, see `documentation.describe`

        def __init__(
            self,
            *,
            scheduler: typed.SlurmSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            **options: Unpack[typed.SlurmArguments],
        ) -> None: ...

        def add_worker_group(  # type: ignore[override]  # the options of one batch system, where the base class has those of any
            self, name: str, *, jobs: int = 0, **options: Unpack[typed.SlurmWorkerArguments]
        ) -> None: ...


class PBSGPUCluster(GPUCluster):
    """A GPU Dask cluster on OpenPBS or PBS Pro."""

    system = "pbs"

    if TYPE_CHECKING:  # what type checkers and editors see; `inspect.signature` shows the same, see `documentation.describe`

        def __init__(
            self,
            *,
            scheduler: typed.PBSSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            **options: Unpack[typed.PBSArguments],
        ) -> None: ...

        def add_worker_group(  # type: ignore[override]  # the options of one batch system, where the base class has those of any
            self, name: str, *, jobs: int = 0, **options: Unpack[typed.PBSWorkerArguments]
        ) -> None: ...


class LocalGPUCluster(GPUCluster):
    """A GPU Dask cluster on this machine, through hpcgpu's embedded queue. Queue, account and the like mean nothing to it."""

    system = "local"

    if TYPE_CHECKING:  # what type checkers and editors see; `inspect.signature` shows the same, see `documentation.describe`

        def __init__(
            self,
            *,
            scheduler: typed.LocalSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            **options: Unpack[typed.LocalArguments],
        ) -> None: ...

        def add_worker_group(  # type: ignore[override]  # the options of one batch system, where the base class has those of any
            self, name: str, *, jobs: int = 0, **options: Unpack[typed.LocalWorkerArguments]
        ) -> None: ...

    def _check(self) -> None:
        super()._check()
        if self.options.worker.nodes_per_job > 1:
            raise OptionError(f"nodes_per_job={self.options.worker.nodes_per_job}: the local queue has one node")
        for option, name in [("interface", self.options.worker.interface), ("client_interface", self.options.cluster.client_interface)]:
            if name is not None and (trouble := interfaces.missing(name, interfaces.addresses())):
                raise OptionError(f"{option}: {trouble}")


def _read(path: Path) -> str:
    try:
        return printable(path.read_text(errors="replace"), None, lines=True)
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"


for _cls in (SlurmGPUCluster, PBSGPUCluster, LocalGPUCluster):
    _options = option_classes(_cls.system)
    documentation.describe(_cls, _options.worker, _options.scheduler)
