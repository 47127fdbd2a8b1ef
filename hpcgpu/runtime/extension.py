"""What the manager needs of the Dask scheduler beyond distributed's own RPCs; added to it by our preload.

It reports the load, moves tasks that wait for resources, lets running tasks finish on workers that are drained, and
ends a scheduler whose manager is gone. If the end of a job kills a worker, this is no failure of the tasks that it ran.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import distributed.scheduler
import distributed.versions
from distributed.comm import Comm
from distributed.core import Status, error_message
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import KilledWorker
from tornado.ioloop import PeriodicCallback

from hpcgpu.fabric.security import HAS_GPU
from hpcgpu.runtime import hostcopy, losing, recipients, resources
from hpcgpu.runtime.calls import Calls
from hpcgpu.runtime.changes import Told
from hpcgpu.runtime.manager_process import Unattended
from hpcgpu.runtime.requests import Requests
from hpcgpu.runtime.usage import Usage
from hpcgpu.runtime.wire import (
    GroupState,
    LoadChanges,
    ManagerState,
    RequestAnswer,
    SchedulerState,
    WaitingWork,
    WorkerChanges,
    WorkerLoad,
    WorkerRuns,
)
from hpcgpu.software import versions

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

__all__ = ["Extension", "install"]

logger = logging.getLogger("distributed.hpcgpu")

#: This number of tasks that no worker can run is examined; the others are assumed to be like them.
_SAMPLE = 2000
#: The same of results and tasks that workers hold, all workers together: about 10 ms of the event loop.
_SAMPLE_HELD = 20_000
#: Seconds between two looks at tasks that wait for resources of their worker.
_MOVES = 0.2
#: Seconds for which the tasks of a lost worker may still be charged with its loss.
_CHARGEABLE = 600.0
#: Seconds until the first heartbeat of a manager is due, before its lease begins.
_FIRST_HEARTBEAT = 60.0
#: Seconds of silence after which a manager counts as gone.
_SILENT = 60.0
#: Seconds after which a worker knows for sure that it leaves:
#: a heartbeat from then on tells what it executes to its end.
_NOTICED = 2.0
#: Seconds without a heartbeat after which a worker whose job has ended is removed.
#: The queue may say so while the job's processes still run.
_SILENT_WORKER = 30.0
#: Seconds between two looks for such workers.
_REMOVALS = 5.0


def install(
    scheduler: Scheduler, lease: float | None = None, released: Callable[[], bool] = lambda: False
) -> Extension:
    """Add the extension to a scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    lease : float, optional
        Seconds after which the scheduler closes when its manager has not been heard. Default: never.
    released : callable, optional
        Whether the cluster needs no manager after all; it may block. A program may have left the cluster before the
        scheduler could hear of it.
    """
    hostcopy.register()
    recipients.install()
    distributed.scheduler.error_message = _error_message
    distributed.versions.error_message = _version_differences
    extension = Extension(scheduler, lease, released)
    scheduler.add_plugin(extension)
    extension.moves.start()
    extension.removals.start()
    extension.usage.start()
    return extension


def _error_message(error: BaseException, *arguments: Any, **options: Any) -> Any:
    """Make an error message as distributed does, with advice for a graph with GPU objects.

    It replaces distributed's function where the scheduler makes messages of errors.
    """
    return error_message(hostcopy.with_advice(error), *arguments, **options)


#: Of distributed. It visits all workers for each package, and the scheduler calls it for each worker that joins.
_all_version_differences = distributed.versions.error_message


def _version_differences(scheduler: Any, workers: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    """Compare versions as distributed does, with one worker for all that have the same ones.

    `Extension.add_worker` makes equal ones the same object.
    """
    one_of_each = {id(versions): name for name, versions in workers.items()}
    return _all_version_differences(
        scheduler, {name: workers[name] for name in one_of_each.values()}, *arguments, **options
    )


class Extension(SchedulerPlugin):  # type: ignore[misc]
    """See the module."""

    name = "hpcgpu"

    def __init__(self, scheduler: Scheduler, lease: float | None, released: Callable[[], bool] = lambda: False) -> None:
        self.scheduler = scheduler
        self.lease = lease
        self._released = released
        self._heard = time.monotonic() + _FIRST_HEARTBEAT
        self._manager = 0
        self._about = ""
        self._groups: list[GroupState] = []
        self._warnings: list[str] = []
        self._present = False
        self._left = -1
        self.unattended: Unattended | None = None
        self.requests = Requests()
        self._lost: dict[str, tuple[float, Any, set[Any]]] = {}
        self._leaving_since: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._crashed: set[str] = set()
        self._told_workers, self._told_loads = Told(), Told()
        self._shared: dict[str, Any] = {}
        self.calls = Calls(scheduler)
        self.usage = Usage(scheduler, self.calls)
        self.moves = PeriodicCallback(lambda: resources.move_waiting(scheduler), _MOVES * 1000)
        self.removals = PeriodicCallback(self.remove_silent, _REMOVALS * 1000)
        scheduler.handlers |= self._handlers()
        self._replace_methods(scheduler)
        if lease:
            self._guard = asyncio.ensure_future(self._watch_lease(lease))

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        """Return what the scheduler does by which name, when it is asked over a connection."""
        return {
            "unregister": self.remove_uncharged,
            "hpcgpu_load": self.load,
            "hpcgpu_workers": self.workers,
            "hpcgpu_gpus": self.usage.gpus,
            "hpcgpu_usage": self.usage.write,
            "hpcgpu_running": self.running,
            "hpcgpu_unfinished": self.unfinished,
            "hpcgpu_runs": self.runs,
            "hpcgpu_refuse_tasks": self.refuse_tasks,
            "hpcgpu_resume": self.resume,
            "hpcgpu_ended": self.ended,
            "hpcgpu_lose": self.lose,
            "hpcgpu_heartbeat": self.heartbeat,
            "hpcgpu_goodbye": self.goodbye,
            "hpcgpu_release": self.release,
            "hpcgpu_end": self.end,
            "hpcgpu_state": self.state,
            "hpcgpu_manage": self.manage,
            "hpcgpu_request": self.request,
            "hpcgpu_next_request": self.requests.next_request,
            "hpcgpu_answer_request": self.requests.answer_request,
            "hpcgpu_environment": self.environment,
            "gather": self.gather,
            "broadcast": self.broadcast,
        }

    def _replace_methods(self, scheduler: Scheduler) -> None:
        """Put methods of this extension into the place of distributed's."""
        self._check_idle, self._remove_worker = scheduler.check_idle, scheduler.remove_worker
        scheduler.check_idle = scheduler.handlers["check_idle"] = self.check_idle
        scheduler.periodic_callbacks["idle-timeout"].callback = self.check_idle
        if "worker-ttl" in scheduler.periodic_callbacks:  # the user may have switched it off
            scheduler.periodic_callbacks["worker-ttl"].callback = self.check_worker_ttl
        scheduler.remove_worker = self.remove_uncharged

    # The manager's lease

    async def heartbeat(
        self, manager: int = 0, about: str = "", groups: Sequence[GroupState] = (), warnings: Sequence[str] = ()
    ) -> int:
        """Record a manager's heartbeat and the state of its scaling; return the highest manager number.

        Heartbeats of earlier managers do not count.
        """
        if manager >= self._manager and manager != self._left:
            self._manager, self._heard, self._about, self._present = manager, time.monotonic(), about, True
            self._groups, self._warnings = list(groups), list(warnings)
        return self._manager

    async def goodbye(self, manager: int) -> None:
        """Record that a manager left; one of its heartbeats may still be under way."""
        self._left = manager
        if manager == self._manager:
            self._present = False

    async def state(self) -> SchedulerState:
        """Return workers, GPUs and manager of the cluster, all of the same moment."""
        workers = [str(ws.name) for ws in self.scheduler.workers.values()]
        return SchedulerState(workers=workers, gpus=self.usage.now(), manager=self._manager_state())

    def _manager_state(self) -> ManagerState:
        present = self._present and time.monotonic() - self._heard < _SILENT
        problem = self.unattended.problem if self.unattended is not None else ""
        return ManagerState(
            number=self._manager,
            present=present,
            about=self._about,
            problem=problem,
            groups=self._groups,
            warnings=self._warnings,
        )

    async def request(self, command: dict[str, Any]) -> RequestAnswer:
        """Let the manager of the cluster scale it, if there is one that takes requests."""
        now = time.monotonic()
        present = self._present and now - self._heard < _SILENT
        if not present or not self.requests.taken_by(self._manager, now=now):
            return RequestAnswer(taken=False, error="")
        try:
            error = await self.requests.request(command)
        except TimeoutError:
            error = "the program that manages the cluster does not answer. It may still do what was requested"
        return RequestAnswer(taken=True, error=error)

    async def manage(self) -> str:
        """Start the manager that runs in the scheduler job.

        See `hpcgpu.cluster.unattended`.

        Returns
        -------
        str
            Why that cannot be; empty if it can.
        """
        return (
            await self.unattended.start()
            if self.unattended is not None
            else "its scheduler does not run in a scheduler job"
        )

    async def environment(self) -> dict[str, str]:
        """Return what software and GPU the scheduler has, see `hpcgpu.software.versions`."""
        return await asyncio.to_thread(versions.collect)

    async def release(self) -> None:
        """Continue without a manager from now on."""
        self.lease = None

    async def end(self, manager: int) -> None:
        """Close the scheduler soon, and its workers with it, unless a later manager has the cluster."""
        if manager < self._manager:
            return
        self._ending = asyncio.ensure_future(self.scheduler.close(reason="hpcgpu-closed"))

    async def _watch_lease(self, lease: float) -> None:
        while True:
            while (left := self._heard + lease - time.monotonic()) > 0:
                await asyncio.sleep(min(left, lease))
            if self.lease is None:
                return
            if not await asyncio.to_thread(self._released):
                break
            self._heard = time.monotonic()
        logger.error(
            "hpcgpu: no heartbeat from the cluster's manager for %g s (option lease): this scheduler ends", lease
        )
        await self.scheduler.close(reason="hpcgpu-lease")

    async def close(self) -> None:
        """Move no more tasks, and write the bill; distributed calls this when the scheduler closes."""
        self.moves.stop()
        self.removals.stop()
        await self.usage.stop()

    # Workers and their load

    async def workers(self, known: str = "") -> WorkerChanges:
        """Return which workers there are: what has changed since the version that the manager knows."""
        workers = {ws.address: ws.identity() for ws in self.scheduler.workers.values()}
        for facts in workers.values():
            del facts["metrics"], facts["last_seen"]
            facts["resources"] = dict(facts["resources"])  # distributed changes its own in place
        return WorkerChanges(
            scheduler=self.scheduler.identity(n_workers=0), workers=self._told_workers.changes(workers, known)
        )

    def transition(self, key: Any, start: str, finish: str, *arguments: Any, **about: Any) -> None:
        """Count what workers have done. distributed calls this for each step of each task: it must cost little."""
        if start == "processing" and finish == "memory":
            self.usage.done[about.get("worker", "")] += 1

    def check_idle(self) -> float | None:
        """Return since when there is no work, as `Scheduler.check_idle` does; it ends the cluster by `idle_timeout`.

        Dask counts tasks alone. A call that runs on a worker, and a GPU that works, are work too.
        """
        if any(self.calls.running(ws) or self.usage.computes(ws) for ws in self.scheduler.workers.values()):
            self.scheduler.idle_since = None
            return None
        since: float | None = self._check_idle()
        return since

    async def check_worker_ttl(self) -> None:
        """Restart workers that are silent, as `Scheduler.check_worker_ttl` does, but none that runs a call."""
        await self.calls.see_silent()
        await self.scheduler.check_worker_ttl()

    async def running(self) -> int:
        """Return how many workers take tasks."""
        return len(self.scheduler.running)

    async def load(self, known: str = "") -> LoadChanges:
        """Return the load: what has changed since the version that the manager knows."""
        sample = math.ceil(_SAMPLE_HELD / max(1, len(self.scheduler.workers)))
        fits = {ws: resources.at_once(ws, sample) for ws in self.scheduler.workers.values()}
        workers = {
            str(ws.name): WorkerLoad(
                processing=len(ws.processing),
                calls=self.calls.running(ws),
                computes=self.usage.computes(ws),
                occupancy=ws.occupancy,
                nbytes=ws.nbytes,
                wanted=_wanted(ws, sample),
                actors=len(ws.actors),
                at_once=fits[ws],
                nthreads=len(ws.executing) if ws.status == Status.paused else fits[ws],
                paused=ws.status == Status.paused,
                memory_limit=ws.memory_limit,
            )
            for ws in fits
        }
        return LoadChanges(workers=self._told_loads.changes(workers, known), waiting=self._waiting())

    def _waiting(self) -> list[WaitingWork]:
        kinds: dict[tuple[tuple[str, float], ...], list[float]] = {}
        for tasks in (self.scheduler.queued, self.scheduler.unrunnable):
            if not tasks:
                continue
            sample = list(itertools.islice(tasks, _SAMPLE))
            weight = len(tasks) / len(sample)
            for ts in sample:
                kind = kinds.setdefault(tuple(sorted((ts.resource_restrictions or {}).items())), [0.0, 0.0])
                kind[0] += weight
                kind[1] += weight * self.scheduler._get_prefix_duration(ts.prefix)
        return [
            WaitingWork(resources=dict(kind), tasks=math.ceil(tasks), seconds=seconds)
            for kind, (tasks, seconds) in kinds.items()
        ]

    # Workers that leave

    async def unfinished(self, names: Iterable[str]) -> dict[str, int]:
        """Return how many tasks and calls retiring workers still execute, by name.

        Tasks that they have not begun go to other workers.
        """
        wanted, now, counts = set(names), time.time(), {}
        self._leaving_since = {
            name: since for name, since in self._leaving_since.items() if now - since < _CHARGEABLE or name in wanted
        }
        for ws in list(self.scheduler.workers.values()):
            if str(ws.name) not in wanted:
                continue
            since = self._leaving_since.setdefault(str(ws.name), now)
            executing = set(ws.executing)
            # heartbeats are seconds apart in large clusters, and wait for Python's lock
            if ws.last_seen >= since + _NOTICED:
                for ts in set(ws.processing) - executing:
                    self.scheduler._reschedule(ts.key, ws.address, stimulus_id=f"hpcgpu-leaving-{time.time()}")
            counts[str(ws.name)] = len(ws.processing) + self.calls.running(ws)
        return counts

    async def runs(self, names: Iterable[str]) -> dict[str, WorkerRuns]:
        """Return what runs on workers, by name."""
        wanted = set(names)
        return {
            str(ws.name): WorkerRuns(
                calls=self.calls.names(ws), tasks=[str(ts.key) for ts in itertools.islice(ws.processing, _SAMPLE)]
            )
            for ws in self.scheduler.workers.values()
            if str(ws.name) in wanted
        }

    async def refuse_tasks(self, names: Iterable[str]) -> None:
        """Let workers take no new tasks: also while their data fits nowhere else, unlike `Scheduler.retire_workers`.

        That gives a worker back the status that it had before.
        """
        wanted, stimulus = set(names), f"hpcgpu-refuse-{time.time()}"
        for ws in list(self.scheduler.workers.values()):
            if str(ws.name) in wanted and ws.status in (Status.running, Status.paused):
                self.scheduler.handle_worker_status_change(Status.closing_gracefully, ws, stimulus)
                self._change_status(ws, Status.closing_gracefully, stimulus)

    async def resume(self, names: Iterable[str]) -> None:
        """Let workers take tasks again whose data could not move after all."""
        wanted, stimulus = set(names), f"hpcgpu-resume-{time.time()}"
        for ws in list(self.scheduler.workers.values()):
            if str(ws.name) in wanted and ws.status == Status.closing_gracefully:
                self._leaving_since.pop(str(ws.name), None)
                self._change_status(ws, Status.running, stimulus)

    def _change_status(self, ws: Any, status: Status, stimulus: str) -> None:
        self.scheduler.stream_comms[ws.address].send(
            {"op": "worker-status-change", "status": status.name, "stimulus_id": stimulus}
        )

    async def lose(self, names: Iterable[str], why: str) -> None:
        """Remove workers; futures of results that only these had raise an error that says why, instead of waiting."""
        wanted = set(names)
        leaving = {ws for ws in self.scheduler.workers.values() if str(ws.name) in wanted}
        await losing.lose(self.scheduler, leaving, why)

    # Results for clients without a GPU

    async def gather(self, comm: Comm, keys: Collection[Any], serializers: list[str] | None = None) -> Any:
        """Collect results as `Scheduler.gather` does.

        They are in host memory for a client that has no GPU and does not choose the format itself.
        """
        return await self.scheduler.gather(keys=keys, serializers=self._serializers(comm, serializers))

    async def broadcast(self, comm: Comm, serializers: list[str] | None = None, **arguments: Any) -> Any:
        """Run something on workers as `Scheduler.broadcast` does, with results likewise; it counts as work."""
        return await self.scheduler.broadcast(serializers=self._serializers(comm, serializers), **arguments)

    def _serializers(self, comm: Comm, chosen: list[str] | None) -> list[str] | None:
        ours = all("hpcgpu" in ws.extra for ws in self.scheduler.workers.values())
        if chosen is not None or comm.local_address.startswith("ucx"):
            return chosen
        # Device memory that came over UCX cannot go on over TCP, so that
        # a client with a GPU gets frames of the host, and rebuilds.
        return hostcopy.SERIALIZERS if ours and not comm.remote_info.get(HAS_GPU) else ["dask", "pickle", "error"]

    # Whom a worker's loss is charged to

    async def remove_uncharged(
        self, address: str, *, stimulus_id: str, expected: bool = False, close: bool = True
    ) -> Any:
        """Remove a worker without charging its tasks: whether it crashed or its job ended is only known later.

        Distributed would count each loss against ``allowed-failures`` at once, so that four preempted jobs fail a task
        (KilledWorker).
        """
        ws = self.scheduler.workers.get(self.scheduler.coerce_address(address))
        tasks = {ts.key for ts in ws.processing} if ws is not None and not expected else set()
        if ws is not None and not expected:
            self.usage.lost(ws)
        removed = await self._remove_worker(address, stimulus_id=stimulus_id, expected=True, close=close)
        if ws is not None and tasks:
            now = time.monotonic()
            self._lost = {name: loss for name, loss in self._lost.items() if now - loss[0] < _CHARGEABLE}
            self._lost[str(ws.name)] = (now, ws.clean(), tasks)
        return removed

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Charge the loss of a worker that comes back: its nanny restarts what crashed.

        Keep what most workers say of their software once for all of them.
        """
        ws = scheduler.workers[worker]
        ws.versions = self._once(ws.versions)
        ws.extra = {name: self._once(value) for name, value in ws.extra.items()}
        self._charge(str(ws.name))

    def _once(self, value: Any) -> Any:
        """Return the first object that was equal to this one."""
        return self._shared.setdefault(repr(value), value)

    async def ended(self, names: Iterable[str], crashed: Iterable[str]) -> None:
        """Take note of workers whose job has ended, and charge the loss of those whose job failed."""
        now = time.time()
        self._ended = {name: at for name, at in self._ended.items() if now - at < _CHARGEABLE}
        self._ended |= dict.fromkeys(names, now)
        self._crashed = {name for name in self._crashed if name in self._ended} | set(crashed)
        for name in crashed:
            self._charge(name)

    async def remove_silent(self) -> None:
        """Remove workers whose job has ended and that send no heartbeats.

        The connection to a node that stands still does not break: its worker would keep its tasks until
        ``distributed.scheduler.worker-ttl``, which is 5 minutes.
        """
        now = time.time()
        for ws in list(self.scheduler.workers.values()):
            name = str(ws.name)
            if name in self._ended and now - ws.last_seen > _SILENT_WORKER:
                logger.warning("hpcgpu: no heartbeat from worker %s, and its job has ended: it is removed", ws.address)
                await self.remove_uncharged(ws.address, stimulus_id=f"hpcgpu-ended-{now}")
                if name in self._crashed:
                    self._charge(name)

    def _charge(self, name: str) -> None:
        """Count the loss of a worker against the tasks that it ran, as `Scheduler.remove_worker` would have done."""
        if name not in self._lost:
            return
        _, worker, keys = self._lost.pop(name)
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state in ("memory", "erred", "forgotten"):
                continue
            ts.suspicious += 1
            ts.prefix.suspicious += 1
            if ts.suspicious > self.scheduler.allowed_failures and ts.state in ("processing", "queued", "no-worker"):
                self._fail(ts, worker)

    def _fail(self, ts: Any, worker: Any) -> None:
        stimulus = f"hpcgpu-killed-worker-{time.time()}"
        error = KilledWorker(task=ts.key, last_worker=worker, allowed_failures=self.scheduler.allowed_failures)
        logger.error("Task %s marked as failed because %d workers died while trying to run it", ts.key, ts.suspicious)
        recommendations = self.scheduler.transition(
            ts.key, "erred", exception=pickle.dumps(error), cause=ts.key, stimulus_id=stimulus
        )
        self.scheduler.transitions(recommendations, stimulus)


def _wanted(worker: WorkerState, at_most: int) -> int:
    """Return the bytes of wanted data that a worker holds, in memory or spilled.

    Data that several workers hold counts in shares.

    Clients want futures and persisted collections. Published datasets, variables and queues have clients of their own
    in the scheduler. Tasks that are not computed yet want what they depend on. `at_most` results are looked at.
    """
    sample = list(itertools.islice(worker.has_what, at_most))
    wanted: float = sum(
        max(1, ts.get_nbytes()) / max(1, len(ts.who_has or ())) for ts in sample if ts.who_wants or ts.waiters
    )
    if len(sample) < len(worker.has_what):
        wanted *= worker.nbytes / sum(max(1, ts.get_nbytes()) for ts in sample)
    return math.ceil(wanted)
