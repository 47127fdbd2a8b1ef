"""What the event loop calls again and again while this program keeps a cluster: polls, decisions, signs of life."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from hpcgpu.cluster.reconciler import Reconciler
from hpcgpu.cluster.scheduler_client import RpcClient
from hpcgpu.errors import NameLost, Superseded
from hpcgpu.options.common import ClusterOptions

__all__ = ["Periodic"]

#: Seconds between two decisions on the size.
_DECISION_INTERVAL = 1.0
#: Seconds between two signs of life to the scheduler; it also says whether another program manages the cluster.
_HEARTBEAT = 10.0


class Periodic:
    """The periodic tasks of one cluster.

    Parameters
    ----------
    reconciler : Reconciler
    options : ClusterOptions
    """

    def __init__(self, reconciler: Reconciler, options: ClusterOptions) -> None:
        self.reconciler = reconciler
        self.options = options
        reconciler.state.dispatcher.monitor.cadence.poll_interval = options.poll_interval
        self.tasks: set[asyncio.Task[None]] = set()

    def watch_queue(self) -> None:
        """Begin to poll."""
        self.reconciler.state.spawn(self._watch_queue(), self.tasks)

    def watch_scheduler(self, client: RpcClient, *, heartbeat: bool) -> None:
        """Begin to decide, to listen to the scheduler, and to tell it that this program lives."""
        state = self.reconciler.state
        state.spawn(self._watch_stream(client), self.tasks)
        state.spawn(self._keep_deciding(), self.tasks)
        if heartbeat:
            state.spawn(self._keep_in_contact(client), self.tasks)

    async def _watch_queue(self) -> None:
        """Poll for all jobs, and take note of those that have started and ended."""
        state = self.reconciler.state
        while not state.failures.lost:
            cadence = state.dispatcher.monitor.cadence
            interval = self.options.poll_interval  # as long as the cluster starts, or its scheduler is lost
            if state.listening or cadence.failures:
                interval = max(0.0, cadence.next_poll - state.now)
            if await _woken(state.poll_now, interval):
                await asyncio.sleep(min(1.0, self.options.poll_interval))  # let the queue learn of what just happened
            state.poll_now.clear()
            try:
                state.dispatcher.check_manager()
                await self.reconciler.observe_queue()
            except Superseded as error:
                state.supersede(str(error))
                return
            except NameLost as error:
                await self.reconciler.fail(f"{error}: its jobs are cancelled")
            except Exception as error:  # whatever it was, the jobs need somebody to look after them
                cadence.failed(now=state.now)
                state.messages.warn(f"internal error while polling the queue, hpcgpu tries again: {error!r}")

    async def _watch_stream(self, client: RpcClient) -> None:
        """Notice when the scheduler's stream of news ends, and open it again if the scheduler is still there."""
        state = self.reconciler.state
        while True:
            await client.stream_ended()
            self.reconciler.observe_silence()
            state.poll_now.set()
            await asyncio.sleep(1)
            if state.closing or state.failures.lost:
                return
            with suppress(OSError, TimeoutError):
                self.reconciler.observe_workers(await client.listen())
            self.reconciler.observe_silence()

    async def _keep_deciding(self) -> None:
        """Decide once a second: whether a walltime ends, a pause is over, there is work for more jobs or for fewer."""
        state, told = self.reconciler.state, ""
        while True:
            await _woken(state.decide_now, _DECISION_INTERVAL)
            state.decide_now.clear()
            try:
                if any(group.adaptive is not None for group in state.registry.groups.values()):
                    await self.reconciler.observe_load()
                self.reconciler.decide()
            except Exception as error:  # as above; one that comes each second is told once
                if repr(error) != told:
                    state.messages.warn(f"internal error while scaling, hpcgpu tries again: {error!r}")
                told = repr(error)
            else:
                told = ""

    async def _keep_in_contact(self, client: RpcClient) -> None:
        """Let the scheduler know that this program is alive, until it knows of another manager."""
        state = self.reconciler.state
        interval = min(_HEARTBEAT, (self.options.lease or math.inf) / 5)
        while state.ownership.owner:
            with suppress(OSError, TimeoutError):
                manager = state.dispatcher.manager
                if await client.heartbeat(manager, self.reconciler.about()) > manager:
                    state.poll_now.set()
            await _woken(state.heartbeat_now, interval)
            state.heartbeat_now.clear()


async def _woken(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event; return whether it came in time."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout)
        return True
    return False
