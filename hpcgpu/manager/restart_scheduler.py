"""Submits another scheduler job when the scheduler job of a running cluster has ended too early.

The worker jobs stay in the queue: the running ones wait for the next scheduler (`hpcgpu.runtime.next_scheduler`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hpcgpu.errors import AmbiguousSubmit, BatchError, ClusterError
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.manager.cluster_state import ClusterState
from hpcgpu.manager.scheduler_client import SchedulerClient
from hpcgpu.scaling.scheduler_restarts import ended_too_early, too_many
from hpcgpu.store.removed_directory import directory_exists

#: Seconds until a refused submit is tried again: the first time, and at most; and how often.
_PAUSE, _LAST_PAUSE, _REFUSALS = 5.0, 300.0, 10
#: Seconds between two looks at what the next scheduler job does.
_INTERVAL = 0.5


class SchedulerRestarts:
    """Restarts the scheduler of one cluster.

    Parameters
    ----------
    state : ClusterState
    new_job : callable
        Returns a job of the scheduler, of a given name.
    connect : callable
        Connects to the scheduler at an address.
    connected : callable
        Manages the cluster through this connection from now on.
    """

    def __init__(
        self,
        state: ClusterState,
        new_job: Callable[[str], SchedulerJob],
        connect: Callable[[str], Awaitable[SchedulerClient]],
        connected: Callable[[SchedulerClient], Awaitable[None]],
    ) -> None:
        self.state = state
        self._new_job, self._connect, self._connected = new_job, connect, connected
        #: The restart that is under way, if any.
        self.task: asyncio.Task[None] | None = None

    def why_not(self) -> str:
        """Return why no other scheduler follows the last one; empty if one does."""
        state, dispatcher = self.state, self.state.dispatcher
        [job] = state.scheduler.entries if state.scheduler is not None else []
        if directory_exists(dispatcher.directory, dispatcher.token) is False:
            return "its directory was removed"
        if dispatcher.directory.closing:
            return "another program has stopped the cluster"
        if job.queue_status.state.ended and not ended_too_early(job.queue_status.state):
            return "it has ended as intended, or was cancelled"
        return too_many(state.restarted, now=state.now)

    def begin(self, report: str, lost: Callable[[str], Awaitable[None]]) -> None:
        """Begin to restart the scheduler.

        Parameters
        ----------
        report : str
            How the scheduler has ended.
        lost : callable
            Is called with the reason if no scheduler can be started.
        """
        client = self.state.client
        assert client is not None
        self.state.lost_schedulers[client.address] = report.partition("\n")[0]
        self.state.restarts()
        self.task = self.state.spawn(self._restart(client, report, lost), set())

    async def _restart(self, ended: SchedulerClient, report: str, lost: Callable[[str], Awaitable[None]]) -> None:
        state, refused = self.state, 0
        await ended.close()
        while True:
            try:
                client = await self._next()
                break
            except (ClusterError, BatchError, OSError, TimeoutError) as error:
                if not state.managed:
                    return
                refused += isinstance(error, BatchError)
                why = self.why_not() or (
                    f"the queue has not accepted it {refused} times" if refused > _REFUSALS else ""
                )
                if why:
                    await lost(f"{report}\nNo other scheduler was started: {why}. The last failure: {error}")
                    return
                state.messages.warn(f"cluster {state.name} has no scheduler yet: {error}\nhpcgpu submits another job")
                if not isinstance(error, BatchError):
                    state.restarted.append(state.now)
            await asyncio.sleep(min(_LAST_PAUSE, _PAUSE * 2**refused) if refused else 0)
        if not state.managed:
            await client.close()
            return
        self._forgive()
        await self._connected(client)

    async def _next(self) -> SchedulerClient:
        """Submit a scheduler job, wait until its scheduler listens, and connect to it."""
        state = self.state
        job = self._new_job(next_name(state))
        state.registry.add(job)
        state.scheduler = job
        try:
            await job.submit()
            state.messages.log(f"submitted scheduler job {job.job_id}")
        except AmbiguousSubmit as error:
            state.messages.warn(str(error))
        except BaseException:
            state.registry.remove(job)
            raise
        state.poll_now.set()
        try:
            await self._reachable(job)
            return await self._connect(str(job.external_address or job.address))
        except Exception:
            if state.managed and job.job_id is not None and not job.ended:
                await state.dispatcher.cancel([job.job_id])
            raise

    async def _reachable(self, job: SchedulerJob) -> None:
        """Wait until the scheduler of a job listens; raise `ClusterError` if it cannot, or if the cluster ends."""
        state = self.state
        reached = asyncio.ensure_future(job.wait_until_reachable())
        try:
            while not reached.done():
                if not state.managed:
                    raise ClusterError(state.phase.not_ours or f"cluster {state.name} ends")
                if job.name not in state.registry.jobs:
                    raise ClusterError(f"the queue does not have scheduler job {job.name}, whose submit got no answer")
                if state.dispatcher.directory.closing:
                    raise ClusterError("it was stopped")
                state.check_schedulable([job])
                await asyncio.wait([reached], timeout=_INTERVAL)
            await reached
        finally:
            reached.cancel()

    def _forgive(self) -> None:
        """Let no worker job that has ended without a scheduler count as a failure: it may have waited too long."""
        for job in self.state.registry.worker_jobs:
            if isinstance(job.phase, Ended) and not job.phase.handled and not job.phase.drained:
                job.phase.handled = True
                self.state.messages.log(f"worker job {job.job_id} ({job.name}) ended while there was no scheduler")


def next_name(state: ClusterState) -> str:
    """Return a name for the next scheduler job. No worker job has such a name: they end with a hyphen and a number."""
    schedulers = [submit for submit in state.dispatcher.directory.submits() if submit.kind == "scheduler"]
    return f"{state.name}-scheduler{len(schedulers) + 1}"
