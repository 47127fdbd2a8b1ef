"""The periodic tasks while this program manages a cluster: polls, decisions, heartbeats."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from hpcgpu.cluster.groups import group_states
from hpcgpu.cluster.reconciler import Reconciler
from hpcgpu.cluster.scheduler_client import RpcClient
from hpcgpu.errors import HpcgpuError, NameLost, Superseded
from hpcgpu.options.common import ClusterOptions
from hpcgpu.runtime.wire import ScalingRequest
from hpcgpu.scaling.wanted import from_json

__all__ = ["Periodic", "decision_interval"]

#: Seconds between two decisions on the size, and the number of jobs from which on they are further apart: a decision
#: looks at each job, and must not take more of the login node in a large cluster than in a small one.
_DECISION_INTERVAL, _MANY_JOBS = 1.0, 200
#: Seconds between two heartbeats to the scheduler, which also answers whether another program manages the cluster.
_HEARTBEAT = 10.0
#: Seconds until the stream of events is opened again: at first, and at most after errors that nobody expected.
_REOPEN, _REOPEN_LAST = 1.0, 60.0


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
        #: Is called after each poll and each decision.
        self.look: Callable[[], None] = lambda: None
        self._errors: dict[str, str] = {}

    def watch_queue(self) -> None:
        """Begin to poll."""
        self.reconciler.state.spawn(self._watch_queue(), self.tasks)

    def watch_scheduler(self, client: RpcClient) -> None:
        """Begin to decide, to listen to the scheduler, to send it heartbeats, and to serve other programs' requests."""
        state = self.reconciler.state
        state.spawn(self._watch_stream(client), self.tasks)
        state.spawn(self._keep_deciding(), self.tasks)
        state.spawn(self._keep_in_contact(client), self.tasks)
        state.spawn(self._serve_requests(client), self.tasks)

    async def _watch_queue(self) -> None:
        """Poll for all jobs, and record those that have started and ended. Of a lost cluster, cancel them."""
        reconciler, state = self.reconciler, self.reconciler.state
        # a task that is cancelled just when it wakes may go on
        while not state.phase.closing and (not state.phase.lost or state.phase.cancelling):
            cadence = state.dispatcher.monitor.cadence
            interval = self.options.poll_interval  # as long as the cluster starts, or its scheduler is lost
            if state.listening or cadence.failures:
                interval = max(0.0, cadence.next_poll - state.now)
            if await _woken(state.poll_now, interval):
                cadence.soon(now=state.now)
                await asyncio.sleep(min(1.0, self.options.poll_interval))  # let the queue learn of what just happened
            state.poll_now.clear()
            try:
                if state.phase.cancelling:
                    await reconciler.cancel_lost()
                    continue
                state.dispatcher.check_manager()
                await reconciler.observe_queue()
                self.look()
                self._record_error("polling the queue", None)
            except Superseded as error:
                state.supersede(str(error))
                return
            except NameLost as error:
                await reconciler.fail(f"{error}. The jobs of this one are cancelled")
            except Exception as error:
                cadence.failed(now=state.now)
                self._record_error("polling the queue", error)

    async def _watch_stream(self, client: RpcClient) -> None:
        """Notice when the scheduler's stream of events ends, and open it again if the scheduler still answers."""
        state = self.reconciler.state
        pause = _REOPEN
        while True:
            await client.stream_ended()
            self.reconciler.observe_silence()
            state.poll_now.set()
            await asyncio.sleep(pause)
            if not state.managed:
                return
            try:
                self.reconciler.observe_workers(await client.listen())
                pause = _REOPEN
                self._record_error("opening the scheduler's stream of events", None)
            except (OSError, TimeoutError):
                pause = _REOPEN
            except Exception as error:
                pause = min(2 * pause, _REOPEN_LAST)
                self._record_error("opening the scheduler's stream of events", error)
            self.reconciler.observe_silence()

    async def _keep_deciding(self) -> None:
        """Decide each `decision_interval`.

        Whether a walltime ends, a pause is over, there is work for more jobs or for fewer.
        """
        state = self.reconciler.state
        while state.phase.owned:
            await _woken(state.decide_now, decision_interval(len(state.registry.active)))
            state.decide_now.clear()
            try:
                registry = state.registry
                if registry.former or any(group.adaptive is not None for group in registry.groups.values()):
                    await self.reconciler.observe_load()
                self.reconciler.decide()
                self.look()
                self._record_error("scaling", None)
            except NameLost:
                state.poll_now.set()  # what watches the queue tells of it, and cancels the jobs
            except Exception as error:
                self._record_error("scaling", error)

    async def _keep_in_contact(self, client: RpcClient) -> None:
        """Send heartbeats to the scheduler, until it knows of another manager."""
        state = self.reconciler.state
        interval = min(_HEARTBEAT, (self.options.lease or math.inf) / 5)
        while state.phase.owned:
            try:
                manager = state.dispatcher.manager
                groups = group_states(state.registry.all_groups(), now=state.now)
                about, warnings = self.reconciler.about(), self.reconciler.warnings()
                if await client.heartbeat(manager, about, groups, warnings) > manager:
                    state.poll_now.set()
                else:  # again and again, as upstream does: `Client.restart` clears it
                    await client.describe(state.name, state.dispatcher.batch.name)
                self._record_error("sending a heartbeat", None)
            except (OSError, TimeoutError):
                pass
            except Exception as error:
                self._record_error("sending a heartbeat", error)
            await _woken(state.heartbeat_now, interval)
            state.heartbeat_now.clear()

    async def _serve_requests(self, client: RpcClient) -> None:
        """Do what other programs request through the scheduler, and answer them."""
        state = self.reconciler.state
        while state.phase.owned:
            try:
                request = await client.next_request(state.dispatcher.manager)
                if request is not None:
                    error = self._serve(request)
                    await client.answer_request(request["number"], error)
                self._record_error("serving requests", None)
            except (OSError, TimeoutError):
                await asyncio.sleep(_REOPEN)
            except Exception as error:
                self._record_error("serving requests", error)
                await asyncio.sleep(_REOPEN_LAST)

    def _serve(self, request: ScalingRequest) -> str:
        """Do what another program requests; return what is wrong with it, or nothing."""
        state = self.reconciler.state
        try:
            command = from_json(request["command"])
            if not state.managed:
                return state.phase.lost or f"cluster {state.name} is closed"
            self.reconciler.order(command)
        except (HpcgpuError, ValueError) as error:
            state.messages.log(f"a request of another program is refused: {error}")
            return str(error)
        state.messages.log(f"another program requests {command}: done")
        return ""

    def _record_error(self, doing: str, error: Exception | None) -> None:
        """Tell of an error once, however often it comes. No error ends a task: the jobs need one to look after them."""
        text = f"internal error while {doing}, hpcgpu tries again: {error!r}" if error is not None else ""
        if text and text != self._errors.get(doing):
            self.reconciler.state.messages.warn(text)
        self._errors[doing] = text


def decision_interval(jobs: int) -> float:
    """Return the seconds until the next decision: one, and more with more than 200 jobs; for 1,000 these are five."""
    return _DECISION_INTERVAL * max(1.0, jobs / _MANY_JOBS)


async def _woken(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event; return whether it came in time."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout)
        return True
    return False
