"""Starts and ends the manager that runs in the scheduler job.

It is for adaptive scaling without a live client.

It is a process of its own, ``python -m hpcgpu.cluster.unattended``: what it does must not hold up the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

from hpcgpu.batch import batch_system
from hpcgpu.errors import BatchError
from hpcgpu.runtime import stage
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["LOG", "Unattended"]

logger = logging.getLogger("distributed.hpcgpu")

#: Its log, in the cluster's `logs`.
LOG = "manager.log"


class Unattended:
    """The one such process of a scheduler.

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
        #: Why it does not run though it should; empty otherwise.
        self.problem = ""

    async def start(self) -> str:
        """Start it, or start it anew; return why that cannot be, empty if it can.

        Whether jobs may be submitted from this node is only known of the commands: a site that refuses them from
        compute nodes says so at the first submit.
        """
        if problem := await asyncio.to_thread(self._queue_answers):
            return problem
        await self.stop(replaced=True)
        with open(self.directory.logs / LOG, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no module of whoever can write to the working directory
                "-m",
                "hpcgpu.cluster.unattended",
                str(self.directory.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=stage.lock(),  # it cancels jobs after the scheduler was killed, from the same environment
            )
        self.problem = ""
        self._watch = asyncio.ensure_future(self._watch_over(self._process))
        return ""

    async def _watch_over(self, process: asyncio.subprocess.Process) -> None:
        """Record that the manager has ended by itself.

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
            Another one follows: the cluster does not end.
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
