"""Retires the workers of a job before its walltime ends, also where no manager does.

Slurm has the end of the walltime in the environment since 23.02; PBS and older releases have not. There the job queries
the queue, but not at its start, when a thousand others may do the same.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from hpcgpu.batch.base import BatchSystem, JobState, OwnJob
from hpcgpu.errors import BatchError, BatchUnavailable
from hpcgpu.runtime.own import told
from hpcgpu.runtime.reach import scheduler_of
from hpcgpu.scaling.walltime import LAST, lifetime, query_after
from hpcgpu.store.directory import ClusterDirectory, Contact

if TYPE_CHECKING:
    from distributed.core import rpc

__all__ = ["Leaving"]

#: Seconds between two attempts to retire workers: the scheduler does not answer, or their data fits nowhere else.
_AGAIN, _AGAIN_SELDOM = 5.0, 30.0
#: Seconds between two looks at what still runs on workers that retire.
_FINISHING_INTERVAL = 1.0
#: Seconds over which the nodes of a job that is warned spread their queries of the queue.
_SPREAD = 1.0
#: Seconds between two queries of a queue that has not answered for long.
_QUERY_SELDOM = 1800.0


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The workers of one node of a job, and when they leave.

    Attributes
    ----------
    own : OwnJob
    batch : BatchSystem
    directory : ClusterDirectory
    contact : Contact
    names : sequence of str
        What the workers of this node may be named.
    walltime : float or None
        Seconds that the script requests.
    margin : float or None
        The option `walltime_margin`.
    """

    own: OwnJob
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
        end = self.own.end if self.own.end is not None else self.query()
        if end is None:
            return
        leaves = began + lifetime(end - began, self.margin)
        _sleep_until(leaves)
        _say("the walltime of this job ends soon: its workers retire")
        asyncio.run(self.retire(end - LAST * (end - leaves)))

    def warned(self) -> float | None:
        """Return the end of this job, epoch seconds, if it goes on after a signal; None if it ends now."""
        time.sleep(random.random() * _SPREAD)
        try:
            status = self.batch.poll([self.own.job_id]).get(self.own.job_id)
        except BatchError:
            return None
        if status is None or status.state is not JobState.RUNNING:
            return None
        return inf if status.end is None else status.end

    def begin_at_once(self, end: float) -> None:
        """Retire in a thread of this process, as this job will end."""
        left = end - time.time()
        when = f"within {left:.0f} s" if left < inf else "soon"
        _say(f"the batch system warns that this job will end {when}, such as at preemption: its workers retire")
        latest = end - LAST * left if left < inf else inf
        threading.Thread(target=lambda: asyncio.run(self.retire(latest)), name="hpcgpu-warned", daemon=True).start()

    def query(self) -> float | None:
        """Return the end of this job, epoch seconds; None if it has no end.

        That is what the queue says. As long as it does not answer, it is asked less and less often. If it still has not
        answered when the workers would have to leave by the walltime that the script requests, that counts.
        """
        pause, problem = query_after(self.walltime, random.random()), ""
        job = told()
        began = job["began"] if job is not None else time.time()  # it may have waited long for its scheduler
        requested = None if self.walltime is None else began + self.walltime
        latest = inf if self.walltime is None else began + lifetime(self.walltime, self.margin)
        while time.time() + pause < latest:
            time.sleep(pause)
            known = problem
            try:
                status = self.batch.poll([self.own.job_id]).get(self.own.job_id)
                if status is not None:
                    return status.end
                problem = "the queue does not know the job"
            except BatchUnavailable as error:  # it may answer later
                problem = str(error)
            except BatchError as error:
                problem = str(error)
                break
            if problem != known:
                _say(f"the end of this job's walltime is not known yet: {problem}")
            pause = min(2 * pause, _QUERY_SELDOM)
        instead = "only the manager of the cluster" if requested is None else "the walltime of its script"
        _say(f"the end of this job's walltime is not known here, so {instead} says when its workers retire: {problem}")
        return requested

    async def retire(self, latest: float) -> None:
        """Let the scheduler move the data of the workers and close them; this process ends with the last of them.

        Parameters
        ----------
        latest : float
            Epoch seconds until which tasks and calls that run are waited for.
        """
        pause, told = _AGAIN, ""
        while True:
            try:
                async with scheduler_of(self.directory, self.contact) as scheduler:
                    await self._finish(scheduler, latest)
                    await scheduler.retire_workers(names=list(self.names), close_workers=True, remove=True)
            except Exception as error:  # also what fails in the scheduler: the next attempt may succeed
                if repr(error) != told:
                    told = repr(error)
                    _say(f"the workers of this job did not retire yet: {told}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_SELDOM)

    async def _finish(self, scheduler: rpc, latest: float) -> None:
        """Let the workers take no new tasks, and wait until what runs on them has ended and its results have moved."""
        names, waits = list(self.names), False
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, latest - time.time())):
                while True:
                    await scheduler.retire_workers(names=names, close_workers=False, remove=False)
                    if not any((await scheduler.hpcgpu_unfinished(names=names)).values()):
                        return
                    if not waits:
                        waits = True
                        _say("its workers retire once what runs on them has ended, or shortly before it ends")
                    await asyncio.sleep(_FINISHING_INTERVAL)


def _sleep_until(moment: float) -> None:
    while (left := moment - time.time()) > 0:
        time.sleep(left)


def _say(text: str) -> None:
    print(f"hpcgpu: {text}", file=sys.stderr, flush=True)
