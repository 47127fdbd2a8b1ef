"""What the user holds: a Dask cluster whose scheduler and workers are jobs of a batch queue.

SpecCluster's handling of grouped workers, of dead jobs, of a dead scheduler and of closing is broken upstream (distributed #4069, #9102);
scaling, retirement, status and closing are therefore overridden here. All state is changed by the event loop's thread alone.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import dask
from dask.utils import parse_timedelta
from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import NoOpAwaitable, SpecCluster
from distributed.exceptions import WorkerStartTimeoutError
from distributed.objects import SchedulerInfo
from distributed.security import Security
from distributed.utils import Log, Logs

from hpcgpu import credentials, documentation, scaling, scripts, values
from hpcgpu.adaptive import GPUAdaptive
from hpcgpu.batch import batch_system
from hpcgpu.batch.base import AmbiguousSubmit, BatchError, BatchSystem, SubmitLimited, SubmitRefused
from hpcgpu.batch.reasons import explain
from hpcgpu.directory import ClusterDirectory, Submit
from hpcgpu.display.progress import Progress, waiting_for
from hpcgpu.display.table import JobTable
from hpcgpu.exit import guard, unguard
from hpcgpu.fabric import interfaces
from hpcgpu.groups import DEFAULT, WorkerGroup, demands
from hpcgpu.jobs import ClusterError, Dispatcher, Job, SchedulerJob, WorkerJob, in_thread
from hpcgpu.localscheduler import LocalScheduler
from hpcgpu.options import OptionError, Options, resolve, resolve_group
from hpcgpu.policy import Limits
from hpcgpu.retire import retire
from hpcgpu.troubles import STABLE, Troubles

__all__ = ["ClusterError", "ClusterWarning", "GPUCluster", "LocalGPUCluster", "SlurmGPUCluster"]

_CLOSE_TIMEOUT = 30.0
#: Seconds between two decisions on the size.
_DECISION_INTERVAL = 1.0
#: Seconds without an answer of the scheduler after which the user is told.
_SILENCE = 60.0
#: Seconds after which it is tried again to retire a job whose data fitted nowhere else.
_RETRY_LEAVING = 30.0


class ClusterWarning(UserWarning):
    """Something went wrong with a job of the cluster; the cluster goes on."""


class GPUCluster(SpecCluster):  # type: ignore[misc]
    """A Dask cluster of batch jobs; use the subclass of your batch system.

    Parameters
    ----------
    scheduler : dict or "local", optional
        Options of the scheduler job, or "local" to run the scheduler in this process.
    asynchronous : bool, default False
        Use from a running event loop, with ``await`` and ``async with``.
    **options
        See `hpcgpu.options`.

    Raises
    ------
    OptionError
        An option that cannot be, before anything is submitted.
    ClusterError
        The batch system refused a job, or the scheduler job ended before the scheduler could be reached. No job is left then.
    """

    system: ClassVar[str]

    def __init__(
        self, *, scheduler: dict[str, Any] | str | None = None, asynchronous: bool = False, loop: Any = None, **options: Any
    ) -> None:
        self.options: Options = resolve(self.system, {"scheduler": scheduler, **options})
        self.batch: BatchSystem = batch_system(self.system)
        self._check()
        settings = self.options.cluster
        rendered = {
            kind: scripts.render(self.system, kind, self.options, settings.cluster_directory / settings.name)
            for kind in ("scheduler", "worker")
            if kind == "worker" or self.options.scheduler is not None
        }
        if not settings.security:
            warnings.warn(
                "security=False: whoever can reach the scheduler's or a worker's port can run code as you; compute networks are shared",
                ClusterWarning,
                stacklevel=2,
            )
        self.directory = self._claim_directory(rendered)
        self._dispatcher = Dispatcher(self.batch, self.directory)
        self._all_jobs: dict[str, Job] = {}
        self._sequence = 0
        script = self.directory.path / scripts.script_name(self.system, "worker")
        group = WorkerGroup(DEFAULT, self.options.worker, script, settings.worker_restarts)
        group.resize(Limits(maximum=settings.jobs, fixed=True))
        self._groups = {DEFAULT: group}
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._decide_now = asyncio.Event()
        self._watching: set[asyncio.Task[None]] = set()
        self._changing: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._watch_worker_status_task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._troubles = Troubles()
        if settings.shutdown_on_close:
            guard(self._dispatcher)
        try:
            super().__init__(
                worker={"cls": WorkerJob, "options": {}},
                asynchronous=asynchronous,
                loop=loop,
                name=settings.name,
                security=credentials.security(self.directory) if settings.security else Security(),
                shutdown_on_close=settings.shutdown_on_close,
            )
        except BaseException:
            # Ctrl-C, SIGTERM's SystemExit and errors alike: the event loop's thread may still be submitting.
            with suppress(BatchError):
                self._dispatcher.cancel_all(_CLOSE_TIMEOUT)
            with suppress(Exception):
                self.close(timeout=_CLOSE_TIMEOUT)
            if not self.directory.submits():
                with suppress(OSError):
                    self.directory.abandon()
            raise

    # Before anything is submitted

    def _check(self) -> None:
        """Refuse what can be seen not to work on this machine."""
        self.batch.check()
        if self.options.scheduler is None and self.options.worker.interface:
            if trouble := interfaces.missing(self.options.worker.interface, interfaces.addresses()):
                raise OptionError(f"scheduler='local': {trouble}")

    def _claim_directory(self, rendered: dict[str, str]) -> ClusterDirectory:
        settings = self.options.cluster
        path = settings.cluster_directory / settings.name
        if settings.log_directory is not None:
            _check_writable("log_directory", settings.log_directory)
        try:
            directory = ClusterDirectory.claim(path, self._alive, encrypted=settings.security)
            try:
                if settings.security:
                    credentials.create(directory)
                for kind, text in rendered.items():
                    directory.write(scripts.script_name(self.system, kind), text)
            except BaseException:
                directory.abandon()
                raise
        except OSError as error:
            raise OptionError(
                f"cluster_directory={str(settings.cluster_directory)!r} cannot be written: {error.strerror}. It must be on a filesystem "
                f"that login and compute nodes share"
            ) from error
        return directory

    def _alive(self, submits: list[Submit]) -> list[str]:
        """Return the ids of an earlier cluster's jobs that are still in the queue."""
        known = {s.job_id for s in submits if s.job_id is not None}
        found = {i for s in submits if s.job_id is None and not s.refused for i in self.batch.find(s.name)}
        return sorted(i for i, status in self.batch.poll(known).items() if not status.state.ended) + sorted(found - known)

    # Starting

    async def _start(self) -> None:
        if self.status == Status.closed:
            raise ValueError("Cluster is closed")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_once())
        try:
            await asyncio.shield(self._starting)
        except Exception as error:
            self._troubles.failure = self._troubles.failure or str(error)
            await self._close()
            raise ClusterError(f"Cluster failed to start: {error}") from error

    async def _start_once(self) -> None:
        self.status = Status.starting
        if self.options.scheduler is None:
            self.scheduler = await LocalScheduler(self.options, self.security, self.directory)
            self._decide()
            self._spawn(self._watch_queue(), self._watching)
            await self._correct_state()
            self._raise_problem()
        else:
            with Progress(self.options.cluster.quiet) as progress:
                await self._start_scheduler_job(progress)
        address = self.scheduler.external_address or self.scheduler.address
        self._log(f"the scheduler is at {address}")
        self.scheduler_comm = rpc(address, connection_args=self.security.get_connection_args("client"))
        await Cluster._start(self)
        self._take_workers()
        self._spawn(self._watch_stream(), self._watching)
        self._spawn(self._keep_deciding(), self._watching)
        if self.options.cluster.lease and self.options.scheduler is not None:
            self._spawn(self._keep_lease(self.options.cluster.lease / 5), self._watching)
        if self.options.cluster.security and self.scheduler.address.startswith("ucx"):
            self._warn("the UCX ports of scheduler and workers are open: UCX knows no authentication, anyone on the fabric can use them")

    async def _start_scheduler_job(self, progress: Progress) -> None:
        """Submit the scheduler job, the worker jobs right behind it, and wait for the scheduler."""
        what = f"cluster {self.options.cluster.name}"
        script = self.directory.path / scripts.script_name(self.system, "scheduler")
        name = f"{self.options.cluster.name}-scheduler"
        job = SchedulerJob(self._dispatcher, script, name, self._logs, self.options.worker.death_timeout)
        self.scheduler = self._all_jobs[name] = job
        progress.update(f"{what}: submitting the scheduler job")
        await job.submit()
        self._log(f"submitted scheduler job {job.job_id}")
        self._decide()
        opening = self._correct_state()
        self._spawn(self._watch_queue(), self._watching)
        started = asyncio.ensure_future(job.reached())
        try:
            while not started.done():
                progress.update(f"{what}: waiting for the scheduler", self._waiting([job]))
                self._raise_problem()
                self._raise_hopeless([job])
                await asyncio.wait([started], timeout=0.5)
            await started
            await opening
            self._raise_problem()
        finally:
            started.cancel()

    def __await__(self) -> Generator[Any, Any, GPUCluster]:
        async def _() -> GPUCluster:
            try:
                await self._start()
                await self._correct_state()
            except asyncio.CancelledError:
                await self._close()
                raise
            return self

        return _().__await__()

    # Scaling

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
        target = scaling.jobs_for(group.options, n=n, memory=memory, cores=cores, jobs=jobs, gpus=gpus)
        self._resize(group, Limits(maximum=target, fixed=True), None)
        return NoOpAwaitable() if self.asynchronous else None

    scale_up = scale

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
        """Let the work decide the size of a group of workers, in whole jobs; see `hpcgpu.policy`.

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
            queue; 15 s at least, 5 min at most.
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
            Numbers that cannot be, or no such group.
        ClusterError
            The cluster has failed.
        """
        group = self._group(worker_group)
        limits = scaling.limits(
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

    @property
    def adaptive(self) -> GPUAdaptive | None:
        """Adaptive scaling of the default group, or of the first group that has it."""
        return next((group.adaptive for group in self._groups.values() if group.adaptive is not None), None)

    def add_worker_group(self, name: str, *, jobs: int = 0, **options: Any) -> None:
        """Add a family of worker jobs that ask for other things: GPUs of another type, much memory, another queue.

        Tasks reach it by Dask's own ``resources`` annotations.

        Parameters
        ----------
        name : str
        jobs : int, default 0
            Worker jobs to begin with.
        **options
            Of a worker job, see `hpcgpu.options.WorkerOptions`. Account, walltime, environment and whatever else the scheduler job inherits
            are those of the default group where not given.

        Raises
        ------
        OptionError
            An option that cannot be, or a group of that name exists.
        ClusterError
            The cluster has failed.
        """
        if name in self._groups:
            raise OptionError(f"a worker group named {name!r} exists: its size is set by scale(worker_group={name!r})")
        worker = resolve_group(name, options, self.options)
        script = scripts.script_name(self.system, "worker", name)
        text = scripts.render(self.system, "worker", replace(self.options, worker=worker), self.directory.path, name)
        target = scaling.jobs_for(worker, jobs=jobs)
        path = self.directory.write(script, text)
        group = self._groups[name] = WorkerGroup(name, worker, path, self.options.cluster.worker_restarts)
        self._resize(group, Limits(maximum=target, fixed=True), None)

    def delete_worker_group(self, name: str) -> None:
        """Give up all jobs of a group, and the group.

        Parameters
        ----------
        name : str

        Raises
        ------
        OptionError
            No such group, or it is the default group.
        """
        group = self._group(name)
        if name == DEFAULT:
            raise OptionError("the default group stays: scale(jobs=0) gives up its jobs")

        def act() -> None:
            self._set(group, Limits(maximum=0, fixed=True), None)
            del self._groups[name]

        self._in_loop(act)

    def _group(self, name: str) -> WorkerGroup:
        if name not in self._groups:
            raise OptionError(f"no worker group named {name!r}: there are {', '.join(self._groups)}; add_worker_group adds one")
        return self._groups[name]

    def _threads_per_worker(self) -> int:
        return scaling.threads_per_worker(self.options.worker)

    def _memory_per_worker(self) -> int:
        return scaling.memory_per_worker(self.options.worker)

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Do something where all state is changed, and see it done where that does not block the caller's own loop."""

        async def acted() -> None:
            act()

        if self.called_from_running_loop:
            act()
        elif self.asynchronous:
            self.loop.add_callback(act)
        else:
            self.sync(acted)

    def _resize(self, group: WorkerGroup, limits: Limits, adaptive: GPUAdaptive | None) -> None:
        if self._troubles.failure:
            raise ClusterError(self._troubles.failure)
        self._in_loop(lambda: self._set(group, limits, adaptive))

    def _set(self, group: WorkerGroup, limits: Limits, adaptive: GPUAdaptive | None) -> None:
        if self.status in (Status.closing, Status.closed, Status.failed):
            return
        group.failures.start_anew()
        group.adaptive = self._adaptive = adaptive
        group.resize(limits)
        for job in group.jobs:
            job.idle_since = None  # counted from now
        self._decide()
        self._decide_now.set()

    def _decide(self) -> None:
        """Bring each group to the size that it should have: the one place where jobs are asked for and given up."""
        if self.status not in (Status.starting, Status.running) or self.scheduler is None:
            return
        if isinstance(self.scheduler, SchedulerJob) and self.scheduler.job_id is None:
            return  # worker jobs go right behind it
        now = time.time()
        for group in list(self._groups.values()):
            for job in [job for job in self.workers.values() if job.group is group]:
                leaves = group.leaves(job)
                if leaves is not None and now >= max(leaves, job.retry_at):
                    self._log(f"the walltime of job {job.name} ends soon: its workers retire")
                    self._give_up([job.name], deadline=job.queue_status.end, at_all_costs=False)
            decision = group.decide(now=now)
            if group.adaptive is not None:
                group.adaptive.decided(decision, now=now)
            for _ in range(decision.submit):
                self._plan_job(group)
            over = (
                decision.target == 0 and group.limits.gpu_seconds is not None and group.gpu_seconds(now=now) > 0 and group.demand.jobs > 0
            )
            self._give_up([*decision.cancel, *decision.retire], deadline=now + 20 if over else None, at_all_costs=over)
        self._correct_state()

    def _plan_job(self, group: WorkerGroup) -> None:
        """Add a job to the plan; `_correct_state` submits it."""
        name = next(iter(self.new_worker_spec()))
        job = WorkerJob(self._dispatcher, group.script, name, self._logs, group=group, after=self._dependency)
        self.worker_spec[name] = self.new_spec
        self.workers[name] = self._all_jobs[name] = job
        group.jobs.append(job)

    def new_worker_spec(self) -> dict[str, Any]:
        """Return name and specification of the next worker job; names are never used twice."""
        name = f"{self.options.cluster.name}-{self._sequence}"
        self._sequence += 1
        return {name: self.new_spec}

    def _give_up(self, names: Iterable[str], *, deadline: float | None, at_all_costs: bool) -> None:
        """Take jobs out of the plan, and end them in the background."""
        jobs = [self._forget(self.workers[name]) for name in names if name in self.workers]
        for job in jobs:
            job.leaving = True
        if jobs:
            self._spawn(self._retire(jobs, deadline, at_all_costs), self._changing)

    def _stay(self, jobs: Iterable[WorkerJob]) -> None:
        """Take jobs back into the plan that could not be given up."""
        for job in jobs:
            job.leaving = False
            self.workers[job.name] = job
            self.worker_spec[job.name] = self.new_spec

    def _correct_state(self) -> asyncio.Future[Any]:
        """Submit the jobs that were planned; returns what waits for all that is under way."""
        for job in self.workers.values():
            if job.opening is None:
                job.opening = self._spawn(self._open(job), self._changing)
        self._changed.set()
        return asyncio.gather(*self._changing, return_exceptions=True)

    def _dependency(self) -> str | None:
        """Return the id of the scheduler job while workers must wait for it."""
        waits = isinstance(self.scheduler, SchedulerJob) and self.scheduler.contact is None
        return self.scheduler.job_id if waits else None

    async def _open(self, job: WorkerJob) -> None:
        """Submit a job; what goes wrong is told, and reaches the user at the next call too."""
        group = job.group
        try:
            await job
            group.failures.submitted()
        except Exception as error:
            job.status = Status.failed
            self._forget(job)
            del self._all_jobs[job.name]
            group.jobs.remove(job)
            if not self._dispatcher.closing:
                self._not_submitted(job, error)

    def _not_submitted(self, job: WorkerJob, error: Exception) -> None:
        group, now = job.group, time.time()
        message = f"worker job {job.name} was not submitted: {error}"
        if isinstance(error, SubmitLimited) and any(other.alive for other in group.jobs):
            group.failures.site_is_full(str(error), now=now)
            self._log(f"{message}. There are as many jobs as the site allows")
            return
        for_good = isinstance(error, SubmitRefused | SubmitLimited) and group.adaptive is None
        group.failures.submit_refused(str(error), for_good=for_good, now=now)
        if group.adaptive is not None:
            group.adaptive.note(message, now=now)
        if group.failures.paused or isinstance(error, AmbiguousSubmit) or not isinstance(error, BatchError):
            self._problem(message if for_good else f"{message}\n{group.failures.paused}".rstrip())
        else:
            self._warn(f"{message}\nIt is tried again in {max(0.0, group.failures.next_try - now):.0f} s.")

    async def _retire(self, jobs: list[WorkerJob], deadline: float | None, at_all_costs: bool) -> None:
        """Give up jobs: those that wait at once, the others when their workers have finished and their data has moved."""
        await asyncio.gather(*(job.opening for job in jobs if job.opening is not None), return_exceptions=True)
        jobs = [job for job in jobs if job.job_id is not None]
        try:
            waiting = [job for job in jobs if job.pending]
            if waiting:
                ids = [job.job_id for job in waiting if job.job_id]
                await self._dispatcher.cancel(ids, only_pending=not at_all_costs)
                await self._dispatcher.poll(ids)
                if self._dispatcher.monitor.trouble:
                    raise BatchError(self._dispatcher.monitor.trouble)
            begun = [job for job in waiting if job.alive and not job.pending]
            running = [job for job in jobs if job not in waiting]
            kept = await retire(self.scheduler_comm, running, deadline=deadline) if self.scheduler_comm is not None else []
            if at_all_costs or not set(self.scheduler_info["workers"]) - {address for job in running for address in job.workers}:
                kept = []
            self._keep(kept)
            self._stay(begun)  # they started just before they would have been cancelled: to be decided on anew
            gone = [job for job in jobs if job not in kept and job not in begun]
            await self._dispatcher.cancel([job.job_id for job in gone if job.job_id])
            await asyncio.gather(*(job.close() for job in gone))
        except BatchError as error:
            self._stay(job for job in jobs if job.alive)
            self._problem(f"jobs {', '.join(job.name for job in jobs)} could not be cancelled: {error}")
        self._changed.set()

    def _keep(self, jobs: list[WorkerJob]) -> None:
        """Keep jobs whose data fits nowhere else."""
        if not jobs:
            return
        names = ", ".join(job.name for job in jobs)
        self._warn(f"jobs {names} stay: their data fits nowhere else. Free some of it, and scale again")
        self._stay(jobs)
        now = time.time()
        for job in jobs:
            job.retry_at, job.idle_since = now + _RETRY_LEAVING, None
            if job.group.limits.fixed:
                job.group.resize(replace(job.group.limits, maximum=job.group.limits.maximum + 1))

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Give up the jobs all of whose workers are named. Names of jobs count too.

        Parameters
        ----------
        workers : iterable of str
            Names of workers or of jobs.
        """
        given = {str(w) for w in workers}
        for name, job in list(self.workers.items()):
            if name in given or (given.intersection(scaling.workers_of(name, job.group.options)) and set(job.workers.values()) <= given):
                if job.group.limits.fixed:
                    job.group.resize(replace(job.group.limits, maximum=job.group.limits.maximum - 1))
                self._give_up([name], deadline=None, at_all_costs=False)
        await self._correct_state()

    @property
    def plan(self) -> set[str]:
        """Names of the workers that the cluster is to have."""
        return {worker for name in self.worker_spec for worker in self._workers_of(name)}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs have been submitted."""
        return {worker for name in self.workers if name in self.worker_spec for worker in self._workers_of(name)}

    def _workers_of(self, name: str) -> list[str]:
        return scaling.workers_of(name, self.workers[name].group.options)

    # What the scheduler says

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op == "add":
            for address, worker in msg["workers"].items():
                self._worker_joined(address, worker["name"])
        elif op == "remove":
            for job in self._all_jobs.values():
                if job.workers.pop(msg, None) is not None and not job.workers:
                    self._poll_now.set()  # the job may have ended
            if msg not in self.scheduler_info["workers"]:
                return
        Cluster._update_worker_status(self, op, msg)
        self._changed.set()

    def _take_workers(self) -> None:
        """Take over the scheduler's full list of workers."""
        workers = self.scheduler_info["workers"]
        for job in self._all_jobs.values():
            for gone in job.workers.keys() - workers.keys():
                del job.workers[gone]
        for address, worker in workers.items():
            self._worker_joined(address, worker["name"])
        self._changed.set()

    def _worker_joined(self, address: str, name: object) -> None:
        job = self._all_jobs.get(scaling.job_of(name, self._all_jobs) or "")
        if isinstance(job, WorkerJob):
            job.joined(address, str(name), now=time.time())

    async def _watch_stream(self) -> None:
        """Notice when the scheduler's stream of news ends, and take it up again if the scheduler is still there."""
        silent_since = 0.0
        while True:
            if silent_since and time.monotonic() - silent_since > _SILENCE:
                silent_since = math.inf
                self._problem(
                    f"the scheduler at {self.scheduler_address} has not answered for {_SILENCE:g} s, though its job runs; it is tried on. "
                    f"Log: {getattr(self.scheduler, 'log', '')}"
                )
            if self._watch_worker_status_task is not None:
                await asyncio.wait([self._watch_worker_status_task])
            self._poll_now.set()
            await asyncio.sleep(1)
            if self.status != Status.running:
                return
            silent_since = silent_since or time.monotonic()
            with suppress(OSError, TimeoutError):
                comm = await asyncio.wait_for(self.scheduler_comm.live_comm(), 10)
                silent_since = 0.0
                comm.name = "Cluster worker status"
                await comm.write({"op": "subscribe_worker_status"})
                self.scheduler_info = SchedulerInfo(await comm.read())
                self._watch_worker_status_comm = comm
                self._watch_worker_status_task = asyncio.ensure_future(self._watch_worker_status(comm))
                self._take_workers()

    # What the queue says

    async def _watch_queue(self) -> None:
        """Poll for all jobs, and take note of those that have started and ended."""
        while True:
            interval = self.options.cluster.poll_interval
            if self._in_touch and not any(job.pending for job in self._all_jobs.values()):
                interval *= 4
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), interval)
                await asyncio.sleep(min(1.0, self.options.cluster.poll_interval))  # let the queue learn of what just happened
            self._poll_now.clear()
            await self._dispatcher.poll()
            if self._dispatcher.trouble:
                self._warn(self._dispatcher.trouble)
                self._dispatcher.trouble = ""
            self._troubles.take({name: job.queue_status for name, job in self._all_jobs.items()})
            self._take_note(now=time.time())
            self._changed.set()
            if not self._in_touch:  # starting, or lost: workers that end now may only have lost their scheduler
                scheduler = self.scheduler
                if self.status == Status.running and isinstance(scheduler, SchedulerJob) and scheduler.queue_status.state.ended:
                    await self._scheduler_ended(scheduler)
                    return
                continue
            await self._refresh()
            for job in list(self.workers.values()):
                if job.queue_status.state.ended and job.job_id not in self._dispatcher.cancelled:
                    await self._worker_job_ended(job)
            self._decide()

    def _take_note(self, *, now: float) -> None:
        """Learn from what the queue said: waits, ends, what runs well, how long the scheduler job has left."""
        for job in self._all_jobs.values():
            if not isinstance(job, WorkerJob):
                continue
            job.group.started(job)
            if not job.alive and job.ended_at is None:
                end = job.queue_status.end
                job.ended_at = end if end is not None and end <= now else now
            if job.workers and not job.stable and job.joined_at is not None and now - job.joined_at > STABLE:
                job.stable = True
                job.group.failures.jobs_run_well()
        self._give_up_hopeless()
        if isinstance(self.scheduler, SchedulerJob) and (warning := self.scheduler.end_is_near(now=now)):
            self._warn(warning)

    def _give_up_hopeless(self) -> None:
        """Cancel what adaptive scaling asked for and can never start: nobody may be there to read why."""
        for job in list(self.workers.values()):
            if job.group.adaptive is not None and self._troubles.hopeless([job.name]):
                message = f"worker job {job.job_id} ({job.name}) will never start: {explain(job.queue_status)}"
                job.group.failures.submit_refused(message, for_good=True, now=time.time())
                self._give_up([job.name], deadline=None, at_all_costs=False)
                self._problem(f"{message}. Adaptive scaling is paused; `cluster.adaptive.resume()` goes on")

    async def _refresh(self) -> None:
        """Take the scheduler's list of workers, for its stream falls silent when another manager subscribes, and their load."""
        with suppress(OSError, TimeoutError):
            self.scheduler_info = SchedulerInfo(await asyncio.wait_for(self.scheduler_comm.identity(), 10))
            self._take_workers()
        await self._take_load()

    async def _take_load(self) -> None:
        """Ask the scheduler what there is to do. Without an answer the last one counts."""
        with suppress(OSError, TimeoutError):
            load = await asyncio.wait_for(self.scheduler_comm.hpcgpu_load(), 10)
            groups = sorted(self._groups.values(), key=lambda group: group.adaptive is None)
            now = time.time()
            for group in groups:
                group.take_load(load["workers"], now=now)
            for name, demand in demands(load, groups).items():
                self._groups[name].demand = demand

    async def _keep_deciding(self) -> None:
        """Decide once a second: whether a walltime ends, a pause is over, there is work for more jobs or for fewer."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._decide_now.wait(), _DECISION_INTERVAL)
            self._decide_now.clear()
            if self.adaptive is not None:
                await self._take_load()
            self._decide()

    async def _keep_lease(self, interval: float) -> None:
        """Let the scheduler know that this program is alive."""
        while True:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self.scheduler_comm.hpcgpu_heartbeat(), 10)
            await asyncio.sleep(interval)

    @property
    def _in_touch(self) -> bool:
        """Whether the scheduler's stream of news is open."""
        stream = self._watch_worker_status_task
        return stream is not None and not stream.done()

    async def _scheduler_ended(self, scheduler: SchedulerJob) -> None:
        """Take note that the cluster is lost, and cancel its worker jobs."""
        self.status = Status.failed
        failure = f"the scheduler of cluster {self.options.cluster.name} is gone, its worker jobs are cancelled: {scheduler.obituary()}"
        self.worker_spec.clear()
        self.workers.clear()
        try:
            await in_thread(self._dispatcher.cancel_all, _CLOSE_TIMEOUT)
        except BatchError as error:
            failure += f"\nThe worker jobs {' '.join(self._dispatcher.left())} could not be cancelled: {error}"
        self._troubles.failure = failure
        self._warn(failure)
        self._changed.set()

    async def _worker_job_ended(self, job: WorkerJob) -> None:
        """Tell of a job that ended without being asked to; the next decision replaces it, unless too many have failed in a row."""
        self._forget(job)
        job.status = Status.closed
        group, now = job.group, time.time()
        outcome = job.outcome
        group.failures.job_ended(outcome, job.queue_status.node, now=now)
        if outcome.crashed and job.joined_at is not None:
            with suppress(OSError, TimeoutError):
                names = scaling.workers_of(job.name, group.options)
                await asyncio.wait_for(self.scheduler_comm.hpcgpu_crashed(names=names), 10)
        message = job.obituary()
        if group.adaptive is not None:
            group.adaptive.note(message.splitlines()[0], now=now)
        if group.failures.paused:
            self._problem(f"{group.failures.paused}. The last one: {message}")
            return
        wait = group.failures.next_try - now
        self._warn(f"{message}\nIt is replaced{f' in {wait:.0f} s' if wait > 1 else ''}{' if there is work' if group.adaptive else ''}.")

    def _forget(self, job: WorkerJob) -> WorkerJob:
        self.workers.pop(job.name, None)
        self.worker_spec.pop(job.name, None)
        return job

    def _raise_hopeless(self, jobs: Iterable[Job]) -> None:
        name = self._troubles.hopeless(job.name for job in jobs)
        if name is not None:
            job = self._all_jobs[name]
            raise ClusterError(f"{job.kind} job {job.job_id} ({name}) will never start: {explain(job.queue_status)}")

    # Telling the user

    def _problem(self, message: str) -> None:
        """Warn at once, and again at the next `wait_for_workers`, `repr` or `close`."""
        self._troubles.problems.append(message)
        self._warn(message)
        self._changed.set()

    def _warn(self, message: str) -> None:
        self._log(message)
        if self.status != Status.starting:  # the constructor raises it
            with suppress(ClusterWarning):  # `-W error` must not stop what looks after the jobs
                warnings.warn(message, ClusterWarning, stacklevel=2)

    def _log(self, log: str) -> None:
        self._cluster_manager_logs.append((time.time(), log))

    def _raise_problem(self) -> None:
        if trouble := self._troubles.untold():
            raise ClusterError(trouble)

    def _waiting(self, jobs: Iterable[Job]) -> str:
        text = waiting_for(job.info(now=time.time()) for job in jobs)
        trouble = self._dispatcher.monitor.trouble
        return f"{text} (the queue does not answer: {trouble})" if trouble else text

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
        ClusterError
            Jobs were refused or died too often, the scheduler is gone, or the cluster does not ask for so many workers.
        WorkerStartTimeoutError
            The time is over.
        """
        if n_workers is not None and (isinstance(n_workers, bool) or not isinstance(n_workers, int) or n_workers < 1):
            raise ValueError(f"`n_workers` must be a positive integer. Instead got {n_workers}.")
        return self.sync(self._wait_for_workers, n_workers, timeout=timeout)  # type: ignore[no-any-return]

    async def _wait_for_workers(self, n_workers: int | None = None, timeout: float | str | None = None) -> None:
        deadline = time.monotonic() + parse_timedelta(timeout) if timeout is not None else math.inf
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
                self._raise_unreachable(wanted)
                self._raise_hopeless(missing)
                if time.monotonic() > deadline:
                    raise WorkerStartTimeoutError(there, wanted, timeout)
                progress.update(f"cluster {self.name}: waiting for {wanted} workers", f"{there} there; {self._waiting(missing)}")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.5)

    async def _running_workers(self) -> int:
        """Ask the scheduler: a worker that has just connected is not ready yet."""
        try:
            info = await asyncio.wait_for(self.scheduler_comm.identity(), 5)
        except (OSError, TimeoutError):
            self._poll_now.set()
            return -1
        return sum(worker["status"] == Status.running.name for worker in info["workers"].values())

    def _raise_unreachable(self, wanted: int) -> None:
        """Raise if so many workers can never be there: the plan has fewer, and nothing will change it."""
        own = {address for job in self.workers.values() for address in job.workers}
        foreign = len(set(self.scheduler_info["workers"]) - own)
        within_reach = sum(group.within_reach * group.options.workers_per_job for group in self._groups.values())
        if within_reach + foreign < wanted:
            jobs = sum(group.within_reach for group in self._groups.values())
            paused = next((group.failures.paused for group in self._groups.values() if group.failures.paused), "")
            why = paused or f"call scale({wanted})"
            raise ClusterError(
                f"cluster {self.name} asks for {within_reach + foreign} workers in {jobs} jobs, so {wanted} will never be there: {why}"
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
        return (self.directory.path / scripts.script_name(self.system, "scheduler")).read_text()

    def job_script(self) -> str:
        """Return the script of the worker jobs, as it is in the cluster directory."""
        return (self.directory.path / scripts.script_name(self.system, "worker")).read_text()

    @property
    def _logs(self) -> Path:
        return self.options.cluster.log_directory or self.directory.logs

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True) -> Logs:
        logs = Logs()
        if cluster:
            lines = [f"{time.strftime('%F %T', time.localtime(at))} {text}" for at, text in self._cluster_manager_logs]
            logs["Cluster"] = Log("\n".join(lines))
        chosen = None if isinstance(workers, bool) else {scaling.job_of(w, self._all_jobs) or str(w) for w in workers}
        for job in list(self._all_jobs.values()):
            wanted = scheduler if job.kind == "scheduler" else (workers if chosen is None else job.name in chosen)
            if wanted and job.job_id is not None:
                logs[f"{job.name} (job {job.job_id})"] = Log(await in_thread(_read, job.log))
        return logs

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True) -> Logs:
        """Return the logs of all jobs, also of those that have ended.

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
        return self.sync(self._get_logs, cluster=cluster, scheduler=scheduler, workers=workers)

    def __repr__(self) -> str:
        if not hasattr(self, "_cluster_info"):
            return f"<{type(self).__name__}: not started>"
        states: dict[str, int] = {}
        for job in self.jobs:
            if job.kind == "worker" and job.name in self.workers:
                states[job.state] = states.get(job.state, 0) + 1
        jobs = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        text = f"{type(self).__name__}({self.name!r}, {self.scheduler_address!r}, status={self.status.name}"
        text += f", workers={len(self.scheduler_info['workers'])}/{len(self.plan)}, worker jobs: {jobs})"
        paused = [group.failures.paused for group in self._groups.values() if group.failures.paused]
        return "\n".join([text, *filter(None, [self._troubles.failure, *paused, *self._troubles.problems])])

    # Closing

    async def _close(self) -> None:
        if self.status == Status.closed:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close_once())
        await asyncio.shield(self._closing)

    async def _close_once(self) -> None:
        """Cancel by job id first, then take leave of the scheduler if it answers, then see the queue empty."""
        failed = self.status == Status.failed
        self.status = Status.closing
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for task in [*self._watching, *self._changing, *([self._starting] if self._starting else [])]:
            task.cancel()
        if not failed and not self.options.cluster.shutdown_on_close and self.scheduler_comm is not None:
            await self._leave_jobs()
            return
        trouble = ""
        try:
            await asyncio.wait_for(in_thread(self._dispatcher.cancel_all, _CLOSE_TIMEOUT / 2), _CLOSE_TIMEOUT)
        except (BatchError, TimeoutError) as error:
            trouble = str(error) or "the queue did not answer"
        if isinstance(self.scheduler, LocalScheduler):
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(self.scheduler.close(), 5)
        for pause in (1.0, 1.0, *[2.0] * 30):  # a job takes its second to end; each look is a command to the queue
            left = self._dispatcher.left()
            if not left or trouble or time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._dispatcher.poll(left), max(1.0, deadline - time.monotonic()))
        left = self._dispatcher.left()
        if self._adaptive is not None:
            self._adaptive.stop()
        with suppress(TimeoutError, OSError):
            await asyncio.wait_for(Cluster._close(self), 5)
        for job in self._all_jobs.values():
            if job.status != Status.failed:
                job.status = Status.closed
                job._event_finished.set()
        with suppress(OSError):
            self.directory.remove_secrets()
            if not left and not trouble:
                self.directory.close()
        if left or trouble:
            why = trouble or "they are ending"
            self._warn(f"these jobs of cluster {self.options.cluster.name} may still be in the queue: {' '.join(left)} ({why})")
        if untold := "" if failed else "\n".join(self._troubles.problems):
            self._warn(untold)
        self.workers.clear()
        self.worker_spec.clear()
        self.status = Status.closed
        self._changed.set()
        if not left and not trouble:
            unguard(self._dispatcher)

    async def _leave_jobs(self) -> None:
        """Close this end only: ``shutdown_on_close=False``."""
        for group in self._groups.values():
            group.adaptive = None
        with suppress(TimeoutError, OSError):
            await asyncio.wait_for(Cluster._close(self), 5)
        left = " ".join(self._dispatcher.left())
        self._log(f"closed; its jobs go on (shutdown_on_close=False): {left}")
        self.status = Status.closed
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        """Run something in the background; what it raises is told, not lost."""
        task = asyncio.ensure_future(work)
        tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._problem(f"internal error: {error!r}")

        task.add_done_callback(done)
        return task


class SlurmGPUCluster(GPUCluster):
    """A GPU Dask cluster on Slurm."""

    system = "slurm"


class LocalGPUCluster(GPUCluster):
    """A GPU Dask cluster on this machine, through hpcgpu's embedded queue. Queue, account and the like mean nothing to it."""

    system = "local"

    def _check(self) -> None:
        super()._check()
        if self.options.worker.nodes_per_job > 1:
            raise OptionError(f"nodes_per_job={self.options.worker.nodes_per_job}: the local queue has one node")
        for option, name in [("interface", self.options.worker.interface), ("client_interface", self.options.cluster.client_interface)]:
            if name is not None and (trouble := interfaces.missing(name, interfaces.addresses())):
                raise OptionError(f"{option}: {trouble}")


def _check_writable(option: str, path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{option}={str(path)!r} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(f"{option}={str(path)!r} cannot be written")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"


for _cls in (SlurmGPUCluster, LocalGPUCluster):
    documentation.describe(_cls)
