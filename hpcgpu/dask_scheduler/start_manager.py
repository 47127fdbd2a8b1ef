"""Starts and ends the manager that runs in the scheduler job.

This manager is for adaptive scaling without a live client.

The manager is a separate process, ``python -m hpcgpu.orders.manager_in_scheduler_job``, so that it cannot delay the
scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

from hpcgpu.batch import batch_system
from hpcgpu.errors import BatchError
from hpcgpu.posix import variables_of_this_process
from hpcgpu.runtime import stage
from hpcgpu.store.directory import ClusterDirectory

logger = logging.getLogger("distributed.hpcgpu")

#: The log of the manager, in the cluster's `logs`.
LOG = "manager.log"


class ManagerProcess:
    """The only manager process of a scheduler.

    Parameters
    ----------
    directory : ClusterDirectory
    job_id : str
        The scheduler job.
    """

    def __init__(self, directory: ClusterDirectory, job_id: str) -> None:
        self.directory = directory
        self.job_id = job_id
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        #: Why the process does not run although it should; empty otherwise.
        self.problem = ""

    async def start(self) -> str:
        """Start or restart the process; return why this is impossible, empty if it has started.

        This checks only that the queue's commands work here. If a site refuses submits from compute nodes, the first
        submit reports it.
        """
        if problem := await asyncio.to_thread(self._queue_answers):
            return problem
        await self.stop(replaced=True)
        with open(self.directory.logs / LOG, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no module from others who can write to the working directory
                "-m",
                "hpcgpu.orders.manager_in_scheduler_job",
                str(self.directory.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables_of_this_process.without(os.environ),  # its jobs run elsewhere
                pass_fds=stage.lock(),  # the same environment: it cancels jobs after the scheduler was killed
            )
        self.problem = ""
        self._watch = asyncio.ensure_future(self._watch_over(self._process))
        return ""

    async def _watch_over(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of the manager, and record it.

        It exits with 0 if it was superseded, or if its cluster has ended.
        """
        code = await process.wait()
        if code and process is self._process:
            self.problem = (
                f"adaptive scaling stopped: the manager in the scheduler job ended with exit code {code}. Log: "
                f"{self.directory.logs / LOG}"
            )
            logger.error("hpcgpu: %s", self.problem)

    def _queue_answers(self) -> str:
        batch = batch_system(self.directory.system)
        try:
            batch.check()
            batch.poll([self.job_id])
        except BatchError as error:
            return f"compute nodes of this site cannot submit jobs: {error}"
        return ""

    async def stop(self, *, replaced: bool = False) -> None:
        """End it.

        Parameters
        ----------
        replaced : bool, default False
            Another manager follows: the cluster does not end.
        """
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGHUP if replaced else signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
