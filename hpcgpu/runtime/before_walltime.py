"""Retires the workers of a job before its walltime ends, even if no manager does.

Since 23.02, Slurm puts the end of the walltime into the environment. PBS and older Slurm releases do not. There the job
queries the queue, but not at its start, when a thousand other jobs may do the same. Each job queries the queue again
before its workers retire, because the walltime may have been extended.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from hpcgpu.batch.base import BatchSystem, JobState, OwnJob
from hpcgpu.errors import BatchError, BatchUnavailable
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime.job_identity import job_identity
from hpcgpu.runtime.scheduler_connection import scheduler_of
from hpcgpu.scaling.walltime_margin import LAST, lifetime, query_after
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from distributed.core import rpc


#: Seconds between two attempts to retire workers, if the scheduler does not answer or no other worker can hold their
#: data.
_AGAIN, _AGAIN_SELDOM = 5.0, 30.0
#: Seconds between two queries of the tasks and calls that still run on retiring workers.
_FINISHING_INTERVAL = 1.0
#: Seconds over which the nodes of a warned job spread their queries of the queue.
_SPREAD = 1.0
#: Seconds before the workers retire, over which jobs that began together spread their last query of the queue.
_LAST_QUERY = 120.0
#: Seconds between two queries of a queue that has not answered for a long time.
_QUERY_SELDOM = 1800.0


def end_of_walltime(own: OwnJob, batch: BatchSystem) -> float | None:
    """Return the end of this job's walltime, epoch seconds.

    The queue is queried if the environment does not contain it.
    """
    if own.end is not None:
        return own.end
    with suppress(BatchError):  # compute nodes may lack the queue's commands
        if status := batch.poll([own.job_id]).get(own.job_id):
            return status.end
    return None


@dataclass(frozen=True, kw_only=True)
class Retirement:
    """The workers of one node of a job, and the time at which they retire.

    Attributes
    ----------
    own_job : OwnJob
    batch : BatchSystem
    directory : ClusterDirectory
    contact : Contact
    names : sequence of str
        Possible names of this node's workers.
    walltime : float or None
        Seconds that the script requests.
    margin : float or None
        The option `walltime_margin`.
    """

    own_job: OwnJob
    batch: BatchSystem
    directory: ClusterDirectory
    contact: Contact
    names: Sequence[str]
    walltime: float | None = None
    margin: float | None = None

    def begin(self) -> None:
        """Watch the walltime in a thread of this process, which ends with it."""
        threading.Thread(target=self._watch, name="hpcgpu-walltime", daemon=True).start()

    def _watch(self) -> None:
        began = time.time()
        end = self.own_job.end if self.own_job.end is not None else self.query()
        if end is None:
            return
        while True:
            leaves = began + lifetime(end - began, self.margin)
            _sleep_until(leaves - random.random() * min(_LAST_QUERY, (leaves - began) / 2))
            later = self._end_now(until=leaves)
            if later is None or later < end + 1:
                break
            write_stderr(f"the walltime of this job was extended by {later - end:.0f} s")
            end = later
        _sleep_until(leaves)
        write_stderr("the walltime of this job ends soon: its workers retire")
        asyncio.run(self.retire(end - LAST * (end - leaves)))

    def _end_now(self, *, until: float) -> float | None:
        """Return the end of this job as the queue reports it now; None if it does not answer until then.

        An administrator may have extended the walltime, and Slurm extends it after a suspension.
        """
        answer: list[float | None] = [None]

        def query() -> None:
            with suppress(BatchError):
                status = self.batch.poll([self.own_job.job_id]).get(self.own_job.job_id)
                answer[0] = status.end if status is not None else None

        thread = threading.Thread(target=query, name="hpcgpu-walltime-query", daemon=True)
        thread.start()
        thread.join(max(1.0, until - time.time()))
        return answer[0]

    def warned(self) -> float | None:
        """Return the end of this job, epoch seconds, if the job continues after a signal; None if it ends now.

        If the queue does not report it, the workers may retire: Slurm kills processes that stay longer than its
        KillWait.
        """
        time.sleep(random.random() * _SPREAD)
        try:
            status = self.batch.poll([self.own_job.job_id]).get(self.own_job.job_id)
        except BatchError:
            return inf
        if status is None or status.state is not JobState.RUNNING:
            return None
        return inf if status.end is None else status.end

    def begin_at_once(self, end: float) -> None:
        """Retire in a thread of this process, because this job will end."""
        left = end - time.time()
        when = f"within {left:.0f} s" if left < inf else "soon"
        write_stderr(f"the batch system warns that this job will end {when}, such as at preemption: its workers retire")
        latest = end - LAST * left if left < inf else inf
        threading.Thread(target=lambda: asyncio.run(self.retire(latest)), name="hpcgpu-warned", daemon=True).start()

    def query(self) -> float | None:
        """Return the end of this job, epoch seconds; None if it has no end.

        The queue reports the end. While it does not answer, the job queries it less and less often. If it has not
        answered by the time at which the workers must retire for the walltime that the script requests, that walltime
        counts.
        """
        pause, problem = query_after(self.walltime, random.random()), ""
        job = job_identity()
        began = job["began"] if job is not None else time.time()  # the job may have waited long for its scheduler
        requested = None if self.walltime is None else began + self.walltime
        latest = inf if self.walltime is None else began + lifetime(self.walltime, self.margin)
        while time.time() + pause < latest:
            time.sleep(pause)
            known = problem
            try:
                status = self.batch.poll([self.own_job.job_id]).get(self.own_job.job_id)
                if status is not None and not status.suspended:
                    return status.end
                problem = "the queue does not know the job" if status is None else "the job is being suspended"
            except BatchUnavailable as error:  # the queue may answer later
                problem = str(error)
            except BatchError as error:
                problem = str(error)
                break
            if problem != known:
                write_stderr(f"the end of this job's walltime is not known yet: {problem}")
            pause = min(2 * pause, _QUERY_SELDOM)
        instead = "only the manager of the cluster" if requested is None else "the walltime of its script"
        write_stderr(
            f"the end of this job's walltime is not known here, so {instead} says when its workers retire: {problem}"
        )
        return requested

    async def retire(self, latest: float) -> None:
        """Let the scheduler move the data of the workers and close them; this process ends with the last of them.

        Parameters
        ----------
        latest : float
            Epoch seconds; running tasks and calls may finish until then.
        """
        pause, reported = _AGAIN, ""
        while True:
            try:
                async with scheduler_of(self.directory, self.contact) as scheduler:
                    await self._finish(scheduler, latest)
                    await scheduler.retire_workers(names=list(self.names), close_workers=True, remove=True)
            except Exception as error:  # also errors of the scheduler: the next attempt may succeed
                if repr(error) != reported:
                    reported = repr(error)
                    write_stderr(f"the workers of this job did not retire yet: {reported}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_SELDOM)

    async def _finish(self, scheduler: rpc, latest: float) -> None:
        """Let the workers take no new tasks; wait until their tasks and calls have ended and the results have moved."""
        names, waits = list(self.names), False
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, latest - time.time())):
                while True:
                    await scheduler.retire_workers(names=names, close_workers=False, remove=False)
                    if not any((await scheduler.hpcgpu_unfinished(names=names)).values()):
                        return
                    if not waits:
                        waits = True
                        write_stderr("its workers retire once what runs on them has ended, or shortly before it ends")
                    await asyncio.sleep(_FINISHING_INTERVAL)


def _sleep_until(moment: float) -> None:
    while (left := moment - time.time()) > 0:
        time.sleep(left)
