"""Keeps a manager running in the scheduler job while no other program manages the cluster; ends it with the scheduler.

This manager is for adaptive scaling without a live client, and for ``on_scheduler_end="restart"``.

The manager is a separate process, ``python -m hpcgpu.orders.manager_in_scheduler_job``, so that it cannot delay the
scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time

from hpcgpu.batch import batch_system
from hpcgpu.dask_scheduler.end_without_manager import ManagerLease
from hpcgpu.errors import BatchError, BatchUnavailable
from hpcgpu.posix import variables_of_this_process
from hpcgpu.posix.full_disk import file_error
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime import stage
from hpcgpu.store.directory import ClusterDirectory

logger = logging.getLogger("distributed.hpcgpu")

#: The log of the manager, in the cluster's `logs`.
LOG = "manager.log"
_SILENT_QUEUE = "the queue does not answer on the node of the scheduler job"


#: Seconds that the queue has to answer. `hpcgpu.orders.manager_in_scheduler_job` waits longer for the scheduler.
_ANSWER = 90.0
#: Seconds between two checks whether the cluster has a manager, while none runs here.
_CHECK = 5.0
#: Seconds until a manager that failed is started again: the first time, and at most.
_PAUSE, _LONGEST_PAUSE = 60.0, 600.0
#: Seconds that the manager has to end, also if it must cancel a job before.
_STOP, _CANCEL = 5.0, 20.0
#: Seconds from the record of a new manager to its first heartbeat: the manager queries the queue first.
_TAKE_OVER = 300.0


class ManagerProcess:
    """The only manager process of a scheduler.

    Once it was started, it is started again whenever the cluster has no manager.

    Parameters
    ----------
    directory : ClusterDirectory
    job_id : str
        The scheduler job.
    lease : ManagerLease
        Records the managers that send heartbeats.
    """

    def __init__(self, directory: ClusterDirectory, job_id: str, lease: ManagerLease) -> None:
        self.directory = directory
        self.job_id = job_id
        self._lease = lease
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        #: Held while the process is started or replaced.
        self._changing = asyncio.Lock()
        self._problem, self._manager_then = "", 0
        #: A manager that has not sent a heartbeat yet, and the seconds in which one could have been received.
        self._silent, self._silence = 0, 0.0

    @property
    def problem(self) -> str:
        """Why the process does not run although it should; empty otherwise, or if another manager has come since."""
        return self._problem if self._lease.manager == self._manager_then else ""

    def begin(self) -> None:
        """Start the process when no other program manages the cluster; `problem` is why if that is impossible."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_running())

    async def begin_if_wanted(self) -> None:
        """Begin if the scheduler job must run a manager while no other program manages the cluster."""
        with contextlib.suppress(OSError):
            if (await in_thread(self.directory.wanted)).manager_in_scheduler_job:
                self.begin()

    async def start(self) -> str:
        """Start or restart the process; return why this is impossible, empty if it has started.

        This checks only that the queue's commands work here. If a site refuses submits from compute nodes, the first
        submit reports it.
        """
        async with self._changing:
            problem = await self._start()
        if not problem:
            self.begin()
        return problem

    async def _start(self) -> str:
        try:
            if problem := await asyncio.wait_for(in_thread(self._queue_answers), _ANSWER):
                return problem
        except TimeoutError:
            return f"{_SILENT_QUEUE}: no answer within {_ANSWER:g} s"
        await self.stop(replaced=True)
        try:
            self._process = self._begin_process()
        except OSError as error:
            return f"the manager cannot start: {file_error(error)}"
        self._problem = ""
        self._watch = asyncio.ensure_future(self._watch_over(self._process))
        return ""

    def _begin_process(self) -> subprocess.Popen[bytes]:
        # A signal that comes before the manager handles it waits until then: it inherits this. No other task runs
        # meanwhile: a thread or a process that it starts would inherit it too.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
        try:
            with open(self.directory.logs / LOG, "ab") as log:
                return subprocess.Popen(
                    [
                        sys.executable,
                        "-P",  # no module from others who can write to the working directory
                        "-m",
                        "hpcgpu.orders.manager_in_scheduler_job",
                        str(self.directory.path),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=variables_of_this_process.without(),  # its jobs run elsewhere
                    pass_fds=stage.lock(),  # the same environment: it cancels jobs after the scheduler was killed
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    async def _watch_over(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the manager, and record it.

        It exits with 0 if it was superseded, or if its cluster has ended.
        """
        code = await in_thread(process.wait)
        if code and process is self._process:
            self._fail(
                f"nothing is scaled or replaced: the manager in the scheduler job ended with exit code {code}. It is "
                f"started again. Log: {self.directory.logs / LOG}"
            )

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            logger.error("hpcgpu: %s", problem)
        self._problem, self._manager_then = problem, self._lease.manager

    async def _keep_running(self) -> None:
        """Start the process whenever the cluster has no manager; after each failure wait longer."""
        again, pause = 0.0, _PAUSE
        while True:
            tried, problem = False, ""
            try:
                async with self._changing:
                    if not self._runs:
                        tried = await self._needed() and time.monotonic() >= again
                        problem = await self._start() if tried else ""
            except Exception as error:  # no error ends this task
                problem, tried = repr(error), True
            if problem:
                self._fail(f"no program scales the cluster or replaces its jobs, and hpcgpu tries again: {problem}")
            if self._watch is not None and not self._watch.done():
                await asyncio.wait([self._watch])
                tried = True
            if not self.problem:
                again, pause = 0.0, _PAUSE
            elif tried:
                again, pause = time.monotonic() + pause, min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(_CHECK)

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _needed(self) -> bool:
        """Whether the scheduler job must run a manager: no other program manages the cluster."""
        try:
            wanted, latest = await in_thread(lambda: (self.directory.wanted(), self.directory.manager()))
        except OSError:  # not known now
            return False
        if not wanted.manager_in_scheduler_job or wanted.closing:
            return False
        if latest is None or latest.left or latest.in_scheduler_job:  # that of an earlier scheduler job has ended
            return True
        if latest.number <= self._lease.manager:
            return not self._lease.present
        if latest.number != self._silent:
            self._silent, self._silence = latest.number, 0.0
        # Count checks, not the clock: a scheduler that was suspended has received nothing.
        self._silence += _CHECK
        return self._silence > _TAKE_OVER

    def _queue_answers(self) -> str:
        batch = batch_system(self.directory.system)
        try:
            batch.check()
            batch.poll([self.job_id])
        except BatchUnavailable as error:
            return f"{_SILENT_QUEUE}: {error}"
        except BatchError as error:
            return f"compute nodes of this site cannot submit jobs: {error}"
        return ""

    async def stop(self, *, replaced: bool = False, cluster_ends: bool = False) -> None:
        """End it.

        Parameters
        ----------
        replaced : bool, default False
            Another manager follows: the cluster does not end.
        cluster_ends : bool, default False
            The cluster ends with this scheduler, so that no scheduler job follows.
        """
        if self._keeper is not None and not replaced:
            self._keeper.cancel()
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGHUP if replaced else signal.SIGINT if cluster_ends else signal.SIGTERM)
        try:
            await asyncio.wait_for(in_thread(process.wait), _CANCEL if cluster_ends else _STOP)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
