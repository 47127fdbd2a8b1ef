"""How a cluster begins and ends: it is made, taken up by name, waited for, left, closed.

`hpcgpu.cluster.manager` keeps its jobs meanwhile, `hpcgpu.cluster.gpucluster` has what its user calls besides.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Awaitable, Generator, Iterable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.security import Security

from hpcgpu.batch import batch_system, registry
from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.reasons import explain
from hpcgpu.checks.login import of_all_nodes
from hpcgpu.cluster.exit import guard, unguard
from hpcgpu.cluster.groups import WorkerGroup
from hpcgpu.cluster.inprocess import LocalScheduler
from hpcgpu.cluster.jobs import Dispatcher, Job, SchedulerJob, WorkerJob
from hpcgpu.cluster.manager import CLOSE_TIMEOUT, Manager
from hpcgpu.configuration.resolve import resolve
from hpcgpu.display.progress import Progress, duration, ending, waiting_for
from hpcgpu.display.warn import warn
from hpcgpu.errors import BatchError, BatchUnavailable, ClusterError, ClusterExists, NameLost, NotTrusted, OptionError, Superseded
from hpcgpu.fabric import interfaces
from hpcgpu.fabric import settings as fabric_settings
from hpcgpu.options.common import DEFAULT, Options
from hpcgpu.posix import paths
from hpcgpu.posix.ownership import check_place, private_directory
from hpcgpu.posix.threads import in_thread
from hpcgpu.remote.lookup import batch_of, live_jobs, locate, submitted, system_of, unended
from hpcgpu.runtime import scratch
from hpcgpu.scaling import units
from hpcgpu.scripts import render
from hpcgpu.store import claims, credentials, saved
from hpcgpu.store.directory import ClusterDirectory, Submit

__all__ = ["Lifecycle"]

#: Seconds that the scheduler may take to tell its software.
_ENVIRONMENT_TIMEOUT = 30.0


class Lifecycle(Manager):
    """The part of `hpcgpu.cluster.gpucluster.GPUCluster` that begins and ends a cluster; the parameters are described there."""

    system: ClassVar[str]
    _adopted = False

    def __init__(
        self, *given: Any, scheduler: dict[str, Any] | str | None = None, asynchronous: bool = False, loop: Any = None, **options: Any
    ) -> None:
        if given:
            cls = type(self).__name__
            raise OptionError(f"{cls} takes options by their names: write {cls}(name={str(given[0])[:60]!r}, ...)")
        self.options: Options = resolve(self.system, {"scheduler": scheduler, **options})
        self.batch: BatchSystem = batch_system(self.system)
        self._check()
        settings = self.options.cluster
        if self._take_up_existing(asynchronous, loop):
            return
        rendered = {
            kind: render.render(self.system, kind, self.options, settings.cluster_directory / settings.name)
            for kind in ("scheduler", "worker")
            if kind == "worker" or self.options.scheduler is not None
        }
        if not settings.security:
            warn("security=False: whoever can reach the scheduler's or a worker's port can run code as you; compute networks are shared")
        for doubt in fabric_settings.doubts(self.options.worker):
            warn(doubt)
        try:
            self.directory, manager = self._claim_directory(rendered)
        except ClusterExists:  # since the look above
            if self._take_up_existing(asynchronous, loop):
                return
            raise
        try:
            ends = settings.shutdown_on_close
            self._begin(manager, asynchronous=asynchronous, loop=loop, ends_jobs=ends, guarded=ends)
        except BaseException:
            # Ctrl-C, SIGTERM's SystemExit and errors alike: the event loop's thread may still be submitting.
            with suppress(BatchError):
                self._dispatcher.cancel_all(CLOSE_TIMEOUT)
            with suppress(Exception):
                self.close(timeout=CLOSE_TIMEOUT)
            with suppress(BatchError, OSError):
                self._dispatcher.check_manager()
                if all(submit.refused for submit in self.directory.submits()):
                    claims.abandon(self.directory, self._dispatcher.token)
            raise

    @classmethod
    def from_name(
        cls, name: str | Path, *, shutdown_on_close: bool = True, wait: bool = True, asynchronous: bool = False, loop: Any = None
    ) -> Self:
        """Take over a cluster that another program started: one that was detached, whose program died, or on another login node.

        The program that managed it until now notices, and stops scaling it. When this program ends without `close`, a detached cluster
        goes on.

        Parameters
        ----------
        name : str or Path
            Name of the cluster, or the path of its directory, such as one that ``hpcgpu render`` has made.
        shutdown_on_close : bool, default True
            Whether `close` ends its jobs. `detach` leaves them in any case.
        wait : bool, default True
            Wait for the scheduler, if its job still waits.
        asynchronous : bool, default False
            Use from a running event loop: ``await`` it.

        Raises
        ------
        NoCluster
            There is no cluster of that name.
        OtherFormat
            Another version of hpcgpu made the cluster.
        NotTrusted
            Another user can write to its directory.
        Damaged
            A file of its directory does not hold what hpcgpu writes.
        BatchError
            The batch system does not answer, or the cluster is in another queue.
        ClusterError
            It was closed, or none of its jobs is left.
        """
        self = cls.__new__(cls)
        self._take_up(locate(name), shutdown_on_close, wait=wait, asynchronous=asynchronous, loop=loop)
        return self

    def _take_up_existing(self, asynchronous: bool, loop: Any) -> bool:
        """Take over the cluster of this name if there is one and the user wants that; return whether it was done."""
        settings, asked = self.options.cluster, self.options
        if settings.if_exists != "connect" or (there := self._existing()) is None:
            return False
        self._take_up(there, settings.shutdown_on_close, wait=settings.wait, asynchronous=asynchronous, loop=loop)
        self._tell_differences(asked)
        return True

    def _existing(self) -> ClusterDirectory | None:
        """Return the directory of a cluster of this name that has jobs in the queue."""
        settings = self.options.cluster
        path = settings.cluster_directory / settings.name
        if not (path / "cluster.json").exists() or (directory := ClusterDirectory.there(path, any_format=True)).closing:
            return None
        directory.check_format()
        return directory if live_jobs(directory, self.batch) else None

    def _tell_differences(self, asked: Options) -> None:
        """Say which options a cluster has that are not those asked for: it was there before."""
        pairs = [("", asked.worker, self.options.worker), ("scheduler: ", asked.scheduler, self.options.scheduler)]
        differ = [
            f"{where}{f.name}"
            for where, wanted, had in pairs
            if wanted is not None and had is not None
            for f in fields(wanted)
            if getattr(wanted, f.name) != getattr(had, f.name)
        ]
        if differ:
            message = f"cluster {self.options.cluster.name} was there: it keeps its own {', '.join(differ)}"
            self._log(message)
            warn(message)

    def _take_up(self, directory: ClusterDirectory, shutdown_on_close: bool, *, wait: bool, asynchronous: bool, loop: Any) -> None:
        """Become the manager of a cluster that is there."""
        name = directory.path.name
        if (system := system_of(directory)) != self.system:
            raise ClusterError(f"cluster {name} is not one of {type(self).__name__}: its batch system is {system!r}")
        if directory.closing:
            raise ClusterError(f"cluster {name} was closed; its logs are in {directory.logs}")
        kept = saved.read(directory)
        if kept.options.scheduler is None:
            raise ClusterError(f"cluster {name} cannot be taken over: its scheduler runs in the program that made it (scheduler='local')")
        settings = replace(kept.options.cluster, cluster_directory=directory.path.parent, name=name, jobs=0, wait=wait)
        self.directory, self.options = directory, replace(kept.options, cluster=settings)
        self.batch = batch_system(self.system)
        self.batch.check()
        self._adopted = True
        try:
            # 0: a cluster that is there is taken over once that is known to succeed, see `_adopt_jobs`
            self._begin(0, asynchronous=asynchronous, loop=loop, ends_jobs=shutdown_on_close, guarded=not directory.detached, kept=kept)
        except BaseException:
            if hasattr(self, "_ends_jobs"):
                self._ends_jobs = False
                with suppress(Exception):
                    self.close(timeout=CLOSE_TIMEOUT)
            raise

    def _begin(
        self, manager: int, *, asynchronous: bool, loop: Any, ends_jobs: bool, guarded: bool, kept: saved.Saved | None = None
    ) -> None:
        """Manage the cluster from now on; starts it, unless a loop runs here that will.

        Parameters
        ----------
        manager : int
            Number of this program among the cluster's managers.
        ends_jobs : bool
            Whether `close` cancels its jobs.
        guarded : bool
            Whether the end of this program does.
        """
        self._dispatcher = Dispatcher(self.batch, self.directory, manager)
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._submitted = asyncio.Event()
        self._ends_jobs = ends_jobs
        if guarded:
            guard(self._dispatcher)
        self._kept_groups = kept.groups if kept is not None else {}
        super().__init__(
            options=self.options,
            dispatcher=self._dispatcher,
            script=render.script_name(self.system, "worker"),
            asynchronous=asynchronous,
            loop=loop,
            security=self._credentials(),
            shutdown_on_close=guarded,
        )

    def _credentials(self) -> Security:
        if not self.options.cluster.security or (self._adopted and not self.directory.tls.is_dir()):  # it has ended: see `_adopt_jobs`
            return Security()
        return credentials.security(self.directory)

    # Before anything is submitted

    def _check(self) -> None:
        """Refuse what can be seen not to work on this machine."""
        self.batch.check()
        for job in (self.options.worker, self.options.scheduler):
            if job is not None and job.local_directory is not None and "$" not in job.local_directory:
                _check_local_directory(job.local_directory, everywhere=registry.system(self.system).one_machine)
        if self.options.scheduler is None and self.options.worker.interface:
            if trouble := interfaces.missing(self.options.worker.interface, interfaces.addresses()):
                raise OptionError(f"scheduler='local': {trouble}")

    def _claim_directory(self, rendered: dict[str, str]) -> tuple[ClusterDirectory, int]:
        """Make the directory, with all that belongs into it; return it and this program's number among its managers."""
        settings = self.options.cluster
        path = settings.cluster_directory / settings.name
        if settings.log_directory is not None:
            _check_writable("log_directory", settings.log_directory)
        manager = 0

        def complete(directory: ClusterDirectory) -> None:
            nonlocal manager
            if settings.security:
                scheduler = self.options.scheduler
                credentials.create(directory, scheduler.walltime if scheduler is not None else None)
            saved.write(directory, self.options)
            if not settings.shutdown_on_close:
                directory.detach()
            for kind, text in rendered.items():
                directory.write(render.script_name(self.system, kind), text)
            manager = directory.take_over(_program()).number

        try:
            queue = self.batch.identity()
            directory = claims.claim(path, _alive, system=self.system, queue=queue, encrypted=settings.security, complete=complete)
        except NotTrusted as error:
            raise OptionError(f"cluster_directory={str(settings.cluster_directory)!r}: {error}") from error
        except OSError as error:
            raise OptionError(
                f"cluster_directory={str(settings.cluster_directory)!r} cannot be written: {error.strerror}. It must be on a filesystem "
                f"that login and compute nodes share"
            ) from error
        return directory, manager

    # Starting

    async def _start(self) -> None:
        if self.status in (Status.closing, Status.closed):
            self._check_usable()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_once())
            if not self.options.cluster.wait:
                self._starting.add_done_callback(self._started_in_background)
                submitted = asyncio.ensure_future(self._submitted.wait())
                await asyncio.wait([submitted, self._starting], return_when=asyncio.FIRST_COMPLETED)
                submitted.cancel()
                if not self._starting.done():
                    return
        try:
            with Progress(self.options.cluster.quiet) as progress:
                what = f"cluster {self.options.cluster.name}"
                while not self._starting.done():
                    if isinstance(self.scheduler, SchedulerJob) and self.scheduler.job_id is not None:
                        progress.update(f"{what}: waiting for the scheduler", self._waiting([self.scheduler]))
                    else:
                        progress.update(f"{what}: {'looking at its jobs' if self._adopted else 'submitting the scheduler job'}")
                    await asyncio.wait([self._starting], timeout=0.5)
                await self._starting
        except Exception as error:
            failure = f"Cluster failed to start: {str(error) or repr(error)}"
            self._troubles.fail(failure)
            await self._close()
            told = isinstance(error, ClusterError | BatchError)  # all of it is in the message: it need not be shown twice
            raise ClusterError(failure) from (None if told else error)

    def _started_in_background(self, starting: asyncio.Task[None]) -> None:
        """Tell what kept a cluster from starting that nobody waits for."""
        if not starting.cancelled() and (error := starting.exception()) is not None and self._closing is None:
            failure = f"Cluster failed to start: {error}"
            self._troubles.fail(failure)
            warn(failure)
            self._closing = asyncio.ensure_future(self._close_once())

    async def _start_once(self) -> None:
        self.status = Status.starting
        if self._adopted:
            await self._adopt_jobs()
        if self.options.scheduler is None:
            self.scheduler = await LocalScheduler(self.options, self.security, self.directory)
            self._decide()
            self._spawn(self._watch_queue(), self._watching)
            await self._correct_state()
            self._raise_problem()
        else:
            await self._start_scheduler_job()
        address = self.scheduler.external_address or self.scheduler.address
        self._log(f"the scheduler is at {address}")
        self.scheduler_comm = rpc(address, connection_args=self.security.get_connection_args("client"))
        await Cluster._start(self)
        await self._compare_with_scheduler()
        self._take_workers()
        await self._take_load()
        self._go_on_giving_up()
        self._spawn(self._watch_stream(), self._watching)
        self._spawn(self._keep_deciding(), self._watching)
        if self.options.scheduler is not None:
            self._spawn(self._keep_in_contact(), self._watching)

    async def _compare_with_scheduler(self) -> None:
        """Raise or warn where this program and the scheduler do not fit together; a scheduler that is busy is not compared."""
        if self._environment_check.mode == "off":
            return
        try:
            self._environment_check.scheduler = await asyncio.wait_for(self.scheduler_comm.hpcgpu_environment(), _ENVIRONMENT_TIMEOUT)
        except (OSError, TimeoutError) as error:
            self._log(f"software was not compared, the scheduler did not answer: {error or type(error).__name__}")
            return
        fatal, doubtful = self._environment_check.check({})
        if fatal:
            raise ClusterError(fatal)
        if doubtful:
            self._log(doubtful)
            warn(doubtful)

    async def _adopt_jobs(self) -> None:
        """Take over the jobs that the cluster has, as its journal and the queue tell.

        Raises
        ------
        ClusterError
            Its scheduler job is not there any more.
        BatchUnavailable
            The queue does not answer.
        """
        for name, worker in self._kept_groups.items():
            path = self.directory.path / render.script_name(self.system, "worker", name)
            self._groups[name] = WorkerGroup(name, worker, path, self.options.cluster.worker_restarts)
        await in_thread(live_jobs, self.directory, self.batch)  # a queue that does not answer must not cost the cluster its manager
        self._dispatcher.manager = self.directory.take_over(_program()).number
        jobs: dict[str, Submit] = await in_thread(submitted, self.directory, self.batch)
        used = [units.sequence(submit.name, self.options.cluster.name) for submit in self.directory.submits()]
        self._sequence = max([-1, *(number for number in used if number is not None)]) + 1
        for job_id, submit in jobs.items():
            self._dispatcher.adopt(submit.name, job_id, submitted=submit.time)
        await self._dispatcher.poll()
        if self._dispatcher.monitor.trouble:
            raise BatchUnavailable(self._dispatcher.monitor.trouble)
        for job_id, submit in jobs.items():
            if submit.kind == "scheduler":
                self.scheduler = self._all_jobs[submit.name] = self._scheduler_job(submit.name)
                self.scheduler.job_id = job_id
            else:
                self._adopt(submit, job_id)
        self._restore_sizes()
        if self.scheduler is None and not any(submit.kind == "scheduler" for submit in self.directory.submits()):
            raise ClusterError(
                f"cluster {self.options.cluster.name} cannot be taken over: its journal in {self.directory.path} does not tell its "
                f"scheduler job. `hpcgpu stop {self.options.cluster.name}` ends it"
            )
        if self.scheduler is None or self.scheduler.queue_status.state.ended:
            await in_thread(self._dispatcher.cancel_all, CLOSE_TIMEOUT)
            what = self.scheduler.obituary() if self.scheduler is not None else "it has no scheduler job"
            raise ClusterError(f"nothing is left of cluster {self.options.cluster.name}: {what}")
        if self.options.cluster.security and not self.directory.tls.is_dir():
            raise ClusterError(f"cluster {self.options.cluster.name} is ending: its credentials were removed")
        self._log(f"took over {len(jobs)} jobs")
        self._go_on_giving_up()

    def _scheduler_job(self, name: str) -> SchedulerJob:
        script = self.directory.path / render.script_name(self.system, "scheduler")
        return SchedulerJob(self._dispatcher, script, name, self._logs, self.options.worker.death_timeout)

    async def _start_scheduler_job(self) -> None:
        """Submit the scheduler job, if there is none yet, the worker jobs right behind it, and wait for the scheduler."""
        name = f"{self.options.cluster.name}-scheduler"
        if self.scheduler is None:
            self._dispatcher.resize(DEFAULT, self.options.cluster.jobs)
            self.scheduler = self._all_jobs[name] = self._scheduler_job(name)
            await self.scheduler.submit()
            self._log(f"submitted scheduler job {self.scheduler.job_id}")
        job = self.scheduler
        self._decide()
        opening = self._correct_state()
        self._submitted.set()
        self._spawn(self._watch_queue(), self._watching)
        started = asyncio.ensure_future(job.reached())
        try:
            while not started.done():
                self._raise_problem()
                self._raise_hopeless([job])
                await asyncio.wait([started], timeout=0.5)
            await started
            await opening
            self._raise_problem()
        finally:
            started.cancel()

    def __await__(self) -> Generator[Any, Any, Self]:
        async def _() -> Self:
            try:
                await self._start()
                await self._correct_state()
            except asyncio.CancelledError:
                if self._starting is None or not self._submitted.is_set() or self.options.cluster.wait:
                    await self._close()
                raise
            return self

        return _().__await__()

    async def __aenter__(self) -> Self:
        if self._starting is None:
            await self
        return self

    def _raise_hopeless(self, jobs: Iterable[Job]) -> None:
        name = self._troubles.hopeless(job.name for job in jobs)
        if name is not None:
            job = self._all_jobs[name]
            raise ClusterError(f"{job.kind} job {job.job_id} ({name}) will never start: {explain(job.queue_status)}")

    def _raise_problem(self) -> None:
        if trouble := self._troubles.untold():
            raise ClusterError(trouble)

    def _waiting(self, jobs: Iterable[Job]) -> str:
        text = waiting_for(job.info(now=time.time()) for job in jobs)
        trouble = self._dispatcher.monitor.trouble
        return f"{text} (the queue does not answer: {trouble})" if trouble else text

    @property
    def managing(self) -> bool:
        """Whether this program keeps the cluster's jobs: it was not closed, is not lost, and no other program has taken it over."""
        return self.status in (Status.starting, Status.running) and not self._superseded

    # Closing

    def detach(self) -> Awaitable[None] | None:
        """Leave the cluster to itself: its jobs go on, without this program and after it; `from_name` takes it up again.

        Jobs that wait in the queue stay there. The cluster ends by ``idle_timeout`` if it has one, by its walltime, by
        ``hpcgpu stop NAME``, or when a program that took it up closes it.

        Raises
        ------
        ClusterError
            The scheduler runs in this program (``scheduler="local"``), or another program manages the cluster.
        """
        self._check_usable()
        detached: Awaitable[None] | None = self.sync(self._detach)
        if not self.asynchronous:
            self._loop_runner.stop()
        return detached

    async def _detach(self) -> None:
        if self.options.scheduler is None:
            raise ClusterError("scheduler='local': the scheduler runs in this program, and ends with it")
        if self._superseded or self.status in (Status.closing, Status.closed, Status.failed):
            raise ClusterError(self._superseded or self._troubles.failure or f"cluster {self.name} is {self.status.name}")
        openings = [job.opening for job in self._all_jobs.values() if isinstance(job, WorkerJob) and job.opening is not None]
        await asyncio.gather(*openings, return_exceptions=True)
        self.directory.detach()
        if self.scheduler_comm is not None:
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(self.scheduler_comm.hpcgpu_release(), 10)
        self._ends_jobs = self.shutdown_on_close = False
        unguard(self._dispatcher)
        await self._close()

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
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for task in [*self._watching, *self._changing, *([self._starting] if self._starting else [])]:
            task.cancel()
        if self._leaves_jobs(failed):
            await self._leave_jobs()
            return
        trouble = ""
        try:
            await asyncio.wait_for(in_thread(self._dispatcher.cancel_all, CLOSE_TIMEOUT / 2), CLOSE_TIMEOUT)
        except (BatchError, TimeoutError) as error:
            trouble = str(error) or "the queue did not answer"
        if isinstance(self.scheduler, LocalScheduler):
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(self.scheduler.close(), 5)
        with Progress(self.options.cluster.quiet) as progress:
            for pause in (1.0, 1.0, *[2.0] * 30):  # a job takes its second to end; each look is a command to the queue
                left = self._dispatcher.left()
                if not left or trouble or time.monotonic() + pause > deadline:
                    break
                what = f"cluster {self.options.cluster.name}: waiting for its jobs to end"
                progress.update(what, f"{ending(left)}, for {duration(deadline - time.monotonic())} at most")
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
        with suppress(OSError, Superseded, NameLost):
            self._dispatcher.check_manager()  # the name may be another cluster's by now
            if self._nothing_submitted():
                claims.abandon(self.directory, self._dispatcher.token)
            else:
                self.directory.remove_secrets()
                if not left and not trouble:
                    self.directory.close()
        if left or trouble:
            why = trouble or "they are ending"
            self._warn(f"these jobs of cluster {self.options.cluster.name} may still be in the queue: {' '.join(left)} ({why})")
        if untold := "" if failed else "\n".join(problem.split("\n", 1)[0] for problem in self._troubles.problems):
            self._warn(untold)
        self.workers.clear()
        self.worker_spec.clear()
        self.status = Status.closed
        self._changed.set()
        if not left and not trouble:
            unguard(self._dispatcher)

    def _nothing_submitted(self) -> bool:
        """Whether the cluster failed to start and no job of it ever was in the queue: its directory tells nothing then."""
        return bool(self._troubles.failure) and not self._adopted and all(submit.refused for submit in self.directory.submits())

    def _leaves_jobs(self, failed: bool) -> bool:
        """Whether closing leaves the jobs to themselves, or to another manager."""
        if self._superseded:
            return True
        if failed or self._dispatcher.closing:
            return False
        if self._troubles.failure:  # it could not start; what is another program's must not suffer from that
            return self._adopted
        return not self._ends_jobs

    async def _leave_jobs(self) -> None:
        """Close this end only: ``shutdown_on_close=False``."""
        unguard(self._dispatcher)
        for group in self._groups.values():
            group.adaptive = None
        with suppress(TimeoutError, OSError):
            if self.scheduler_comm is not None:
                await asyncio.wait_for(self.scheduler_comm.hpcgpu_goodbye(manager=self._dispatcher.manager), 5)
            await asyncio.wait_for(Cluster._close(self), 5)
        left = " ".join(self._dispatcher.left())
        name = self.options.cluster.name
        self._closed = self._superseded or f"cluster {name} was detached from this program: from_name({name!r}) attaches to it"
        self._log(f"closed; its jobs go on: {left}")
        self.status = Status.closed
        self._changed.set()


def _alive(directory: ClusterDirectory) -> list[str]:
    """Return the ids of an earlier cluster's jobs that are still in the queue: that of its own batch system."""
    return unended(directory, batch_of(directory))


def _program() -> str:
    """Return who this is, for people."""
    script = Path(sys.argv[0])
    called = script.parent.name if script.name == "__main__.py" else script.name or "python"
    return f"{called} (process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')})"


def _check_local_directory(given: str, *, everywhere: bool) -> None:
    """Refuse a place for temporary files that cannot be used, where this machine sees what nodes see; jobs look for themselves."""
    try:
        path = Path(paths.expand(given, os.environ))
        there = next(place for place in (path, *path.parents) if place.exists())
        if not everywhere and not of_all_nodes(there):
            return
        check_place(there)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if everywhere and not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except (NotTrusted, OSError) as error:
        raise OptionError(scratch.refusal(given, error)) from error
    except ValueError as error:
        raise OptionError(f"local_directory={given!r}: {error}") from error


def _check_writable(option: str, path: Path) -> None:
    try:
        private_directory(path)
    except OSError as error:
        raise OptionError(f"{option}={str(path)!r} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(f"{option}={str(path)!r} cannot be written")
