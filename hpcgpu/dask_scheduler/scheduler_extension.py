"""Calls that the manager needs beyond distributed's own RPCs; our preload adds them to the Dask scheduler.

The extension reports the load, moves tasks that wait for resources, and lets running tasks finish on workers that are
drained.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import distributed.scheduler
from distributed.comm import Comm
from distributed.core import Status, error_message
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, WorkerState
from tornado.ioloop import PeriodicCallback

from hpcgpu.dask_scheduler import data_recipients, lost_results, place_in_few_jobs, tasks_waiting_for_resources
from hpcgpu.dask_scheduler.answer_changes import Sent
from hpcgpu.dask_scheduler.end_without_manager import ManagerLease
from hpcgpu.dask_scheduler.held_workers import Holds
from hpcgpu.dask_scheduler.keep_manager_running import ManagerProcess
from hpcgpu.dask_scheduler.lost_workers_as_failures import CHARGEABLE, LostWorkers
from hpcgpu.dask_scheduler.manager_requests import Requests
from hpcgpu.dask_scheduler.measure_usage import Usage
from hpcgpu.dask_scheduler.published_datasets import PublishedDatasets
from hpcgpu.dask_scheduler.rpc_types import (
    LoadChanges,
    RequestAnswer,
    SchedulerState,
    WaitingWork,
    WorkerChanges,
    WorkerLoad,
    WorkerRuns,
)
from hpcgpu.dask_scheduler.running_calls import Calls
from hpcgpu.dask_scheduler.time_limits import IdleTime, Silence
from hpcgpu.dask_scheduler.worker_stream import WorkerStream, describe
from hpcgpu.dask_worker import accept_tasks
from hpcgpu.fabric.authenticating_listener import HAS_GPU
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime import dashboard_access, results_in_host_memory
from hpcgpu.software import compare_environments

#: Most tasks without a worker that are examined; the others are assumed to be similar.
_SAMPLE = 2000
#: Most results and tasks on workers that are examined, all workers together: about 10 ms of the event loop.
_SAMPLE_HELD = 20_000
#: Seconds between two checks of tasks that wait for resources of their worker.
_MOVES = 0.2
#: Seconds after which a worker surely has its retirement: a later heartbeat reports the tasks that it will finish.
_NOTICED = 2.0
#: Seconds between two checks for workers whose job has ended.
_REMOVALS = 5.0
#: Seconds between two checks for work.
_WORK = 0.25
#: Seconds between two steps by which the silence of a manager and of workers is counted.
_STEP = 1.0


def install(
    scheduler: Scheduler, lease: float | None = None, released: Callable[[], bool] = lambda: False
) -> Extension:
    """Add the extension to a scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    lease : float, optional
        Seconds without a heartbeat of the manager after which the scheduler closes. Default: never.
    released : callable, optional
        Whether the cluster needs no manager after all; the call may block. A program may have left the cluster without
        reaching the scheduler.
    """
    results_in_host_memory.register()
    data_recipients.install()
    distributed.scheduler.error_message = _error_message
    extension = Extension(scheduler, lease, released)
    scheduler.add_plugin(extension)
    dashboard_access.serve_workers(scheduler)
    for repeated in extension.repeated:
        repeated.start()
    extension.usage.start()
    return extension


def _error_message(error: BaseException, *arguments: Any, **options: Any) -> Any:
    """Make an error message as distributed does, and add advice if the graph holds GPU objects.

    It replaces distributed's function with which the scheduler makes error messages.
    """
    return error_message(results_in_host_memory.with_advice(error), *arguments, **options)


class Extension(SchedulerPlugin):  # type: ignore[misc]
    """See the module."""

    name = "hpcgpu"

    def __init__(self, scheduler: Scheduler, lease: float | None, released: Callable[[], bool] = lambda: False) -> None:
        self.scheduler = scheduler
        self.lease = ManagerLease(scheduler, lease, released)
        self.manager_process: ManagerProcess | None = None
        self.setup: asyncio.Task[None] | None = None
        self.dashboard: asyncio.Task[None] | None = None
        self.datasets: PublishedDatasets | None = None
        self.requests = Requests()
        self._stream = WorkerStream()
        #: The workers by address, including those whose removal is not recorded yet.
        self._states = dict(scheduler.workers)
        self.silence = Silence(scheduler)
        self.lost_workers = LostWorkers(scheduler, self.silence)
        self._leaving_since: dict[str, float] = {}
        self._sent_workers, self._sent_loads = Sent(), Sent()
        self.holds = Holds(scheduler)
        self.calls = Calls(scheduler, self.silence, self.holds.is_held)
        self.holds.calls = self.calls.forwarded
        self.usage = Usage(scheduler, self.calls)
        self.idle_time = IdleTime(scheduler, self.works)
        self.repeated = (
            PeriodicCallback(lambda: tasks_waiting_for_resources.move_waiting(scheduler), _MOVES * 1000),
            PeriodicCallback(self.lost_workers.remove_silent, _REMOVALS * 1000),
            PeriodicCallback(lambda: self.idle_time.step(_WORK), _WORK * 1000),
            PeriodicCallback(self.holds.assign, _WORK * 1000),
            PeriodicCallback(lambda: self.count_silence(_STEP), _STEP * 1000),
            PeriodicCallback(lambda: self.requests.step(_STEP), _STEP * 1000),
            PeriodicCallback(lambda: self.silence.step(_STEP), _STEP * 1000),
            PeriodicCallback(self.silence.restart, _STEP * 1000),
            self.calls.silent,
        )
        scheduler.handlers |= self._handlers()
        data_recipients.save_where_results_are(scheduler)
        place_in_few_jobs.install(scheduler, self.lease.jobs_that_stay)

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        """Return the handlers of the scheduler's RPCs, by name."""
        return {
            "hpcgpu_load": self.load,
            "hpcgpu_workers": self.workers,
            "hpcgpu_listen": self.listen,
            "hpcgpu_gpus": self.usage.gpus,
            "hpcgpu_usage": self.usage.write,
            "hpcgpu_running": self.running,
            "hpcgpu_unfinished": self.unfinished,
            "hpcgpu_keep": self.keep,
            "hpcgpu_runs": self.runs,
            "hpcgpu_hold": self.holds.hold,
            "hpcgpu_workers_of_job": self.holds.workers_of_job,
            "hpcgpu_calls": self.calls.calls,
            "hpcgpu_will_leave": self.will_leave,
            "hpcgpu_refuse_tasks": self.refuse_tasks,
            "hpcgpu_resume": self.resume,
            "hpcgpu_ended": self.lost_workers.ended,
            "hpcgpu_disconnected": self.disconnected,
            "hpcgpu_lose": self.lose,
            "hpcgpu_heartbeat": self.lease.heartbeat,
            "hpcgpu_goodbye": self.lease.goodbye,
            "hpcgpu_release": self.release,
            "hpcgpu_end": self.lease.end,
            "hpcgpu_state": self.state,
            "hpcgpu_manage": self.manage,
            "hpcgpu_request": self.request,
            "hpcgpu_next_request": self.requests.next_request,
            "hpcgpu_answer_request": self.requests.answer_request,
            "hpcgpu_environment": self.environment,
            "gather": self.gather,
            "broadcast": self.broadcast,
        }

    # The cluster's manager

    async def state(self) -> SchedulerState:
        """Return workers, GPUs and manager of the cluster, all at the same moment."""
        workers = [str(ws.name) for ws in self.scheduler.workers.values()]
        problem = self.manager_process.problem if self.manager_process is not None else ""
        return SchedulerState(workers=workers, gpus=self.usage.gpus(), manager=self.lease.state(problem))

    async def request(self, command: dict[str, Any]) -> RequestAnswer:
        """Let the manager of the cluster scale it, if a manager accepts requests."""
        if not self.lease.present or not self.requests.accepted_by(self.lease.manager):
            return RequestAnswer(accepted=False, error="")
        try:
            error = await self.requests.request(command)
        except TimeoutError:
            error = "the program that manages the cluster does not answer. It may still do what was requested"
        return RequestAnswer(accepted=True, error=error)

    async def manage(self) -> str:
        """Start the manager that runs in the scheduler job.

        See `hpcgpu.orders.manager_in_scheduler_job`.

        Returns
        -------
        str
            Why the manager cannot start; empty if it can.
        """
        if self.manager_process is None:
            return "its scheduler does not run in a scheduler job"
        return await self.manager_process.start()

    async def release(self) -> None:
        """Continue without the manager that leaves; with the one in the scheduler job, if the cluster wants that."""
        await self.lease.release()
        if self.manager_process is not None:
            await self.manager_process.begin_if_wanted()

    async def count_silence(self, seconds: float) -> None:
        """Count so many seconds of the lease; at its end a detached cluster goes on as after `release`."""
        if await self.lease.step(seconds) and self.manager_process is not None:
            await self.manager_process.begin_if_wanted()

    async def environment(self) -> dict[str, str]:
        """Return what software and GPU the scheduler has, see `hpcgpu.software.compare_environments`."""
        return await in_thread(compare_environments.collect)

    async def close(self) -> None:
        """Stop moving tasks, and write the bill; distributed calls this when the scheduler closes."""
        for repeated in self.repeated:
            repeated.stop()
        if self.datasets is not None:
            self.datasets.stop()
        await self.usage.stop()

    # Workers and their load

    def listen(self, comm: Comm) -> dict[str, Any]:
        """Report to a manager which workers come and go, see `WorkerStream`."""
        return self._stream.listen(self.scheduler, comm)

    def remove_worker(self, scheduler: Scheduler, worker: str, **about: Any) -> None:
        """Report that a worker has left."""
        self._stream.report("remove", worker)
        self.holds.removed(worker)

    async def workers(self, version: str = "") -> WorkerChanges:
        """Return the workers: only the changes since the version that the manager has."""
        workers = {ws.address: describe(ws) for ws in self.scheduler.workers.values()}
        return WorkerChanges(
            scheduler=self.scheduler.identity(n_workers=0), workers=self._sent_workers.changed_since(workers, version)
        )

    def transition(self, key: Any, start: str, finish: str, *arguments: Any, **about: Any) -> None:
        """Count the finished tasks of workers. distributed calls this for each step of each task: it must be cheap."""
        if start == "processing" and finish == "memory":
            self.usage.done[about.get("worker", "")] += 1
        elif finish == "forgotten":
            self.lost_workers.forget_task(key)

    def works(self) -> bool:
        """Whether a call runs on a worker, a GPU works, or a program waits for workers: Dask counts only tasks."""
        workers = self.scheduler.workers.values()
        return self.holds.waiting() or any(self.calls.running(ws) or self.usage.computes(ws) for ws in workers)

    async def running(self) -> int:
        """Return how many workers accept tasks."""
        return len(self.scheduler.running)

    async def load(self, version: str = "") -> LoadChanges:
        """Return the load: only the changes since the version that the manager has."""
        sample = math.ceil(_SAMPLE_HELD / max(1, len(self.scheduler.workers)))
        fits = {ws: tasks_waiting_for_resources.at_once(ws, sample) for ws in self.scheduler.workers.values()}
        workers = {
            str(ws.name): WorkerLoad(
                processing=len(ws.processing),
                calls=self.calls.running(ws),
                held=self.holds.is_held(ws),
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
        return LoadChanges(
            workers=self._sent_loads.changed_since(workers, version),
            waiting=self._waiting(),
            holds=self.holds.requested(),
        )

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
                kind[1] += weight * tasks_waiting_for_resources.expected_duration(ts.prefix)
        return [
            WaitingWork(resources=dict(kind), tasks=math.ceil(tasks), seconds=seconds)
            for kind, (tasks, seconds) in kinds.items()
        ]

    # Results

    async def keep(self, client: str, keys: Collection[Any]) -> list[Any]:
        """Keep the results of tasks for a client, in one step: another client may release them at any time.

        Return the keys of those that are not here, and that nobody computes.
        """
        tasks = {key: self.scheduler.tasks.get(key) for key in keys}
        missing = [key for key, task in tasks.items() if task is None or task.state in ("released", "forgotten")]
        self.scheduler.client_desires_keys(keys=tasks.keys() - set(missing), client=client)
        return missing

    # Retiring workers

    async def will_leave(self, names: Iterable[str]) -> list[str]:
        """Let no other program hold workers whose job must end; return the names of those that a program holds.

        These workers still take tasks. The end of the job waits for the program.
        """
        return self.holds.mark_leaving(names)

    async def unfinished(self, names: Iterable[str]) -> dict[str, int]:
        """Return how many tasks and calls retiring workers still execute, by name.

        Tasks that have not begun go to other workers.
        """
        wanted, now, counts = set(names), time.time(), {}
        self._leaving_since = {
            name: since for name, since in self._leaving_since.items() if now - since < CHARGEABLE or name in wanted
        }
        for ws in list(self.scheduler.workers.values()):
            if str(ws.name) not in wanted:
                continue
            since = self._leaving_since.setdefault(str(ws.name), now)
            executing = set(ws.executing)
            # heartbeats are seconds apart in large clusters, and wait for Python's lock
            if ws.last_seen >= since + _NOTICED:
                waiting = {ts.key: "released" for ts in set(ws.processing) - executing}
                self.scheduler.transitions(waiting, f"hpcgpu-leaving-{time.time()}")
            counts[str(ws.name)] = len(ws.processing) + self.calls.running(ws)
        return counts

    async def runs(self, names: Iterable[str]) -> dict[str, WorkerRuns]:
        """Return what runs on workers, by name."""
        wanted = set(names)
        return {
            str(ws.name): WorkerRuns(
                calls=self.calls.names(ws),
                tasks=[str(ts.key) for ts in itertools.islice(ws.processing, _SAMPLE)],
                held=self.holds.is_held(ws),
            )
            for ws in self.scheduler.workers.values()
            if str(ws.name) in wanted
        }

    async def refuse_tasks(self, names: Iterable[str]) -> None:
        """Let workers accept no new tasks, even while no other worker can hold their data.

        In that case, `Scheduler.retire_workers` restores the earlier status of a worker.
        """
        wanted, stimulus = set(names), f"hpcgpu-refuse-{time.time()}"
        for ws in list(self.scheduler.workers.values()):
            if str(ws.name) in wanted and ws.status in (Status.running, Status.paused):
                self.scheduler.handle_worker_status_change(Status.closing_gracefully, ws, stimulus)
                accept_tasks.order(self.scheduler, ws, accepts=False)

    async def resume(self, names: Iterable[str]) -> None:
        """Let workers accept tasks again, and let programs hold them, because their job stays."""
        wanted = set(names)
        for ws in list(self.scheduler.workers.values()):
            if str(ws.name) in wanted and ws.status == Status.closing_gracefully:
                self._leaving_since.pop(str(ws.name), None)
                accept_tasks.order(self.scheduler, ws, accepts=True)
        self.holds.unmark_leaving(wanted)

    async def lose(self, names: Iterable[str], why: str) -> None:
        """Remove workers; futures of results that only they had do not wait, but raise an error with the reason."""
        wanted = set(names)
        workers = {ws for ws in self.scheduler.workers.values() if str(ws.name) in wanted}
        await lost_results.lose(self.scheduler, workers, why)

    # Results for clients without a GPU

    async def gather(self, comm: Comm, keys: Collection[Any], serializers: list[str] | None = None) -> Any:
        """Collect results as `Scheduler.gather` does.

        The results are in host memory if the client has no GPU and does not choose the format itself.
        """
        return await self.scheduler.gather(keys=keys, serializers=self._serializers(comm, serializers))

    async def broadcast(self, comm: Comm, serializers: list[str] | None = None, **arguments: Any) -> Any:
        """Run a function on workers as `Scheduler.broadcast` does, with results as in `gather`; it counts as work."""
        return await self.calls.broadcast(serializers=self._serializers(comm, serializers), **arguments)

    def _serializers(self, comm: Comm, chosen: list[str] | None) -> list[str] | None:
        if chosen is not None or comm.local_address.startswith("ucx"):
            return chosen
        # Device memory received over UCX cannot be sent over TCP. So a client with a GPU gets host frames, and rebuilds
        # the objects.
        ours = all("hpcgpu" in ws.extra for ws in self.scheduler.workers.values())
        to_host = ours and not comm.remote_info.get(HAS_GPU)
        return results_in_host_memory.SERIALIZERS if to_host else ["dask", "pickle", "error"]

    # Workers that come and go

    def log_event(self, topic: str, msg: Any) -> None:
        """Record a lost worker, with its results and its tasks.

        distributed calls this when it removes a worker, before the tasks go to other workers.
        """
        if topic != "all" or not isinstance(msg, dict) or msg.get("action") != "remove-worker":
            return
        ws = self._states.pop(msg["worker"], None)
        if ws is None or msg["expected"]:
            return
        results = msg["lost-computed-tasks"] | msg["lost-scattered-tasks"]
        self.usage.lost(ws, [*ws.actors, *(self.scheduler.tasks[key] for key in results)])
        self.lost_workers.record(ws, msg["processing-tasks"])

    async def disconnected(self, address: str, name: str) -> None:
        """Record that a worker starts again which has not crashed: it has only lost its connection."""
        if address in self.scheduler.workers:  # only the worker has noticed
            stimulus = f"hpcgpu-disconnected-{time.time()}"
            await self.scheduler.remove_worker(address, stimulus_id=stimulus, expected=True, close=False)
        self.lost_workers.forget(name)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Record a worker."""
        ws = self._states[worker] = scheduler.workers[worker]
        self.lost_workers.count(str(ws.name))  # a worker that comes back has crashed, and its nanny has restarted it
        self._stream.report("add", {"workers": {worker: describe(ws)}})


def _wanted(worker: WorkerState, at_most: int) -> int:
    """Return the bytes of wanted data that a worker holds, in memory or spilled.

    If several workers hold the same data, each counts a share of it.

    Clients want futures and persisted collections. Published datasets, variables and queues have clients of their own
    in the scheduler. Tasks that are not computed yet want their dependencies. `at_most` results are examined.
    """
    sample = list(itertools.islice(worker.has_what, at_most))
    wanted: float = sum(
        max(1, ts.get_nbytes()) / max(1, len(ts.who_has or ())) for ts in sample if ts.who_wants or ts.waiters
    )
    if len(sample) < len(worker.has_what):
        wanted *= worker.nbytes / sum(max(1, ts.get_nbytes()) for ts in sample)
    return math.ceil(wanted)
