"""The periodic tasks while this program manages a cluster: polls, decisions, heartbeats."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from hpcgpu.dask_scheduler.rpc_types import ScalingRequest
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.errors import HpcgpuError, NameLost, Superseded
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.manager.worker_groups import WorkerGroups
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling.wanted_state import from_json

#: Seconds between two decisions on the size, and the number of jobs above which the interval grows: a decision examines
#: each job, and a large cluster must not use more of the login node than a small one.
_DECISION_INTERVAL, _MANY_JOBS = 1.0, 200
#: Seconds between two heartbeats to the scheduler. Its answer also reports whether another program manages the cluster.
_HEARTBEAT = 10.0
#: Seconds until the stream of events is opened again: the first time, and at most after unexpected errors.
_REOPEN, _REOPEN_LAST = 1.0, 60.0


class Periodic:
    """The periodic tasks of one cluster.

    Parameters
    ----------
    reconciler : Reconciler
    options : Options
    """

    def __init__(self, reconciler: Reconciler, options: Options) -> None:
        self.reconciler = reconciler
        self.groups = WorkerGroups(reconciler, options)
        self.options = options.cluster
        reconciler.state.dispatcher.monitor.cadence.poll_interval = options.cluster.poll_interval
        self.tasks: set[asyncio.Task[None]] = set()
        #: Is called after each poll and each decision.
        self.check_notices: Callable[[], None] = lambda: None
        self._errors: dict[str, str] = {}
        self._decides = False

    def watch_queue(self) -> None:
        """Begin to poll."""
        self.reconciler.state.spawn(self._watch_queue(), self.tasks)

    def watch_scheduler(self, client: SchedulerClient) -> None:
        """Start the tasks that decide, watch the scheduler, send heartbeats, and serve other programs' requests."""
        state = self.reconciler.state
        state.spawn(self._watch_stream(client), self.tasks)
        if not self._decides:  # also with a scheduler that was restarted
            self._decides = True
            state.spawn(self._keep_deciding(), self.tasks)
        state.spawn(self._keep_in_contact(client), self.tasks)
        state.spawn(self._serve_requests(client), self.tasks)

    async def _watch_queue(self) -> None:
        """Poll for all jobs, and record those that have started and ended. If the cluster is lost, cancel its jobs."""
        reconciler, state = self.reconciler, self.reconciler.state
        cadence, interval = state.dispatcher.monitor.cadence, self.options.poll_interval
        cadence.next_poll = max(cadence.next_poll, state.now + interval)  # or soon after the first submits
        due = self._next_poll()
        # a task that is cancelled at the moment when it wakes may continue
        while not state.phase.closing and (not state.phase.lost or state.cancelling):
            if event := await _woken(state.poll_now, max(0.0, due - state.now)):
                cadence.soon(now=state.now)
                due = min(due, cadence.next_poll)  # an event never puts a poll off
                await asyncio.sleep(min(1.0, interval))  # the queue lists a change after a moment
            state.poll_now.clear()
            try:
                if state.cancelling:
                    await reconciler.end_all()
                else:
                    await in_thread(state.dispatcher.check_manager)  # the user's client is in this event loop
                    if not event:
                        await reconciler.observe_queue()
                        self.check_notices()
                        self._record_error("polling the queue", None)
            except Superseded as error:
                state.supersede(str(error))
                return
            except NameLost as error:
                await reconciler.fail(f"{error}. The jobs of this one are cancelled")
            except Exception as error:
                cadence.failed(now=state.now)
                self._record_error("polling the queue", error)
            if not event:  # never at once: after a refused cancel the time of the next poll may have passed
                due = max(self._next_poll(), state.now + min(1.0, interval))

    def _next_poll(self) -> float:
        """Return when the next poll is due if nothing happens."""
        state, cadence = self.reconciler.state, self.reconciler.state.dispatcher.monitor.cadence
        if state.listening or cadence.failures:
            return cadence.next_poll
        return state.now + self.options.poll_interval  # the cluster starts, or its scheduler is lost

    async def _watch_stream(self, client: SchedulerClient) -> None:
        """Notice when the scheduler's stream of events ends, and open it again if the scheduler still answers."""
        state = self.reconciler.state
        pause = _REOPEN
        while state.client is client:
            await client.stream_ended()
            self.reconciler.observe_answer(False)
            state.poll_now.set()
            await asyncio.sleep(pause)
            if not state.managed or state.client is not client:
                return
            try:
                self.reconciler.observe_workers(await client.listen())
                self.reconciler.observe_answer(True)
                pause = _REOPEN
                self._record_error("opening the scheduler's stream of events", None)
            except (OSError, TimeoutError):
                self.reconciler.observe_answer(False)
                pause = _REOPEN
            except Exception as error:
                pause = min(2 * pause, _REOPEN_LAST)
                self._record_error("opening the scheduler's stream of events", error)

    async def _keep_deciding(self) -> None:
        """Decide each `decision_interval`.

        A walltime may end, a pause may be over, and there may be work for more jobs or for fewer.
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
                self.check_notices()
                self._record_error("scaling", None)
            except NameLost:
                state.poll_now.set()  # the task that watches the queue reports it, and cancels the jobs
            except Exception as error:
                self._record_error("scaling", error)

    async def _keep_in_contact(self, client: SchedulerClient) -> None:
        """Send heartbeats to the scheduler, until its answer names another manager."""
        state = self.reconciler.state
        interval = min(_HEARTBEAT, (self.options.lease or math.inf) / 5)
        while state.phase.owned and state.client is client:
            try:
                manager = state.dispatcher.manager
                groups = [group.state(now=state.now) for group in state.registry.all_groups()]
                about, warnings = self.reconciler.about(), self.reconciler.warnings()
                latest = await client.heartbeat(manager, about, groups, warnings)
                self.reconciler.observe_answer(True)
                if latest > manager:
                    state.poll_now.set()
                else:  # repeatedly, as upstream does: `Client.restart` clears the metadata
                    await client.describe(state.name, state.dispatcher.batch.name)
                self._record_error("sending a heartbeat", None)
            except (OSError, TimeoutError):
                self.reconciler.observe_answer(False)
            except Exception as error:
                self._record_error("sending a heartbeat", error)
            await _woken(state.heartbeat_now, interval)
            state.heartbeat_now.clear()

    async def _serve_requests(self, client: SchedulerClient) -> None:
        """Carry out requests that other programs send through the scheduler, and answer them."""
        state = self.reconciler.state
        while state.phase.owned and state.client is client:
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
        """Carry out a request of another program; return an error message, or an empty string."""
        state = self.reconciler.state
        try:
            command = from_json(request["command"])
            self.groups.carry_out(command)
        except (HpcgpuError, ValueError) as error:
            state.messages.log(f"a request of another program is refused: {error}")
            return str(error)
        state.messages.log(f"another program requests {command}: done")
        return ""

    def _record_error(self, doing: str, error: Exception | None) -> None:
        """Report an error once, also if it occurs often. No error ends a task: the jobs need their manager."""
        text = f"internal error while {doing}, hpcgpu tries again: {error!r}" if error is not None else ""
        if text and text != self._errors.get(doing):
            self.reconciler.state.messages.warn(text)
        self._errors[doing] = text


def decision_interval(jobs: int) -> float:
    """Return the seconds until the next decision: 1 for up to 200 jobs, and more for more jobs: 5 for 1,000."""
    return _DECISION_INTERVAL * max(1.0, jobs / _MANY_JOBS)


async def _woken(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event; return whether it came in time."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout)
        return True
    return False
