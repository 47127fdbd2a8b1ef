"""The work of the workers, from their heartbeats to the scheduler: the present use of GPUs, and the bill of each job.

It samples all workers every second, less often if there are many, and keeps ``usage.jsonl`` in the cluster directory
(`hpcgpu.store.usage_file`). The workers' side is `hpcgpu.dask_worker.gpu_metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

from hpcgpu.dask_scheduler.rpc_types import GPUState
from hpcgpu.dask_worker.gpu_metrics import GPUS, METRIC, SENT, GPUUse
from hpcgpu.fabric.connection_report import NODE
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.job_identity import JOB, JobIdentity
from hpcgpu.store import usage_file
from hpcgpu.store.usage_file import JobUsage

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from hpcgpu.dask_scheduler.running_calls import Calls
    from hpcgpu.store.directory import ClusterDirectory


logger = logging.getLogger("distributed.hpcgpu")

#: Seconds until the first write of the file, and between two later writes.
_FIRST, _AGAIN = 5.0, 60.0
#: Seconds for the last write: the batch system kills a job soon after its SIGTERM.
_LAST = 10.0
#: Most jobs that are kept. If there are more, the oldest ended ones are dropped.
_MOST_JOBS = 10_000
#: Seconds after which a loss counts: when a cluster closes, its lost tasks do not count.
_LOSS = 30.0
#: Seconds of readings of zero after which a GPU counts as idle: there are pauses between two kernels.
_QUIET = 3.0
_SILENT = GPUUse(utilization=None, memory_used=None, power=None)


def period(workers: int) -> float:
    """Return the seconds between two samples: 200 workers a second, as with distributed's heartbeats."""
    return max(1.0, workers / 200)


def works(reading: GPUUse, tasks: int) -> bool:
    """Whether a GPU computes; if its driver does not report that, whether its worker has tasks or calls."""
    return reading["utilization"] > 0 if reading["utilization"] is not None else tasks > 0


class _Seen:
    """A worker at the last sample."""

    __slots__ = ("at", "computed", "idle_since", "job", "sent")

    def __init__(self, job: JobUsage | None, now: float) -> None:
        self.job = job
        self.at = now
        self.idle_since = 0.0
        self.computed = 0.0
        self.sent = 0


def _usage_of(own: JobIdentity, **known: Any) -> JobUsage:
    return JobUsage(id=own["id"], name=own["name"], began=own["began"], **known)


class Usage:
    """The present work of all workers, and the past work of each job's workers.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    calls : Calls
    """

    def __init__(self, scheduler: Scheduler, calls: Calls) -> None:
        self.scheduler = scheduler
        self.calls = calls
        #: Tasks that each worker has done since the last sample, by its address.
        self.done: Counter[str] = Counter()
        self._seen: dict[WorkerState, _Seen] = {}
        self._sampled = 0.0
        #: Names of workers with GPUs, and of those that have had tasks, by the id of their job.
        self._names: dict[str, set[object]] = {}
        self._worked: dict[str, set[object]] = {}
        self._losses: list[tuple[float, JobUsage, int]] = []
        self._sampling = PeriodicCallback(self._sample_again, period(0) * 1000)
        self._file: _File | None = None

    def start(self) -> None:
        """Start sampling; an event loop must run."""
        self._sampling.start()

    def write_into(self, directory: ClusterDirectory, own: JobIdentity | None) -> None:
        """Write into a cluster directory from now on; `own` is the scheduler's job."""
        self._file = _File(directory, _usage_of(own, kind="scheduler", firsts=[time.time()]) if own else None)
        self._writing = asyncio.ensure_future(self._write_again(self._file))

    async def stop(self) -> None:
        """Stop sampling, and write for the last time."""
        self._sampling.stop()
        if self._file is not None:
            self._writing.cancel()
            now = time.time()
            self.sample(now)
            if not await self._file.closing():
                self._count_losses(now + _LOSS)
            await self._file.write(now, timeout=_LAST)

    async def write(self) -> None:
        """Write now, because a program wants to read the file."""
        self.sample(time.time())
        if self._file is not None:
            await self._file.write(time.time())

    def gpus(self) -> list[GPUState]:
        """Return the GPUs of the connected workers, as their last heartbeats reported them."""
        now = time.time()
        if now - self._sampled > period(len(self.scheduler.workers)):  # else each reader would sample all
            self.sample(now)
        return sorted(
            (self._state(ws, seen, now) for ws, seen in self._seen.items() if _gpus(ws)),
            key=lambda one: one["worker"],
        )

    def computes(self, ws: WorkerState) -> bool:
        """Whether the GPU of a worker works, or has worked in its last samples, for any user."""
        if _gpu_use(ws)["utilization"]:
            return True
        seen = self._seen.get(ws)
        return seen is not None and self._sampled - seen.computed <= max(_QUIET, 2 * period(len(self._seen)))

    def lost(self, ws: WorkerState, results: Iterable[TaskState]) -> None:
        """Record the unexpected loss of a worker, and of the results that only it had."""
        if (seen := self._seen.get(ws)) is not None and seen.job is not None:
            only = sum(1 for ts in results if ts.who_wants or ts.waiters)
            self._losses.append((time.time(), seen.job, len(ws.processing) + only))

    def sample(self, now: float) -> None:
        """Sample the work of all workers."""
        self._sampled = now
        known, self._seen, spilled = self._seen, {}, Counter[str]()
        for ws in self.scheduler.workers.values():
            seen = known.get(ws) or _Seen(self._job(ws), now)
            self._seen[ws] = seen
            reading = _gpu_use(ws)
            seen.idle_since = 0.0 if works(reading, self._tasks(ws)) else seen.idle_since or now
            seen.computed = now if reading["utilization"] else seen.computed
            if seen.job is not None:
                self._count(ws, seen, reading, now)
                spilled[seen.job.id] += _spilled(ws)
            seen.at = now
        for ws, seen in known.items():
            if ws not in self._seen and seen.job is not None:
                seen.job.done += self.done.pop(ws.address, 0)
        self.done.clear()
        self._count_losses(now)
        for job in {seen.job.id: seen.job for seen in self._seen.values() if seen.job is not None}.values():
            if job.spilled is not None:
                job.spilled = max(job.spilled, spilled[job.id])

    def _count(self, ws: WorkerState, seen: _Seen, reading: GPUUse, now: float) -> None:
        """Add the work of a worker since the last sample to its job."""
        job, seconds = seen.job, max(0.0, now - seen.at)
        assert job is not None
        job.last = now
        job.seconds += seconds
        done = self.done.pop(ws.address, 0)
        job.done += done
        if busy := bool(self._tasks(ws) or done or reading["utilization"]):
            job.busy += seconds
            worked = self._worked.setdefault(job.id, set())
            worked.add(ws.name)
            if len(worked) > len(job.firsts):  # not those that worked for an earlier scheduler already
                job.firsts.append(now)
        if reading["utilization"] is not None:
            job.utilization.add(reading["utilization"], seconds)
            if busy:
                job.working.add(reading["utilization"], seconds)
        if reading["memory_used"] is not None:
            job.memory.add(reading["memory_used"], seconds)
        if (sent := ws.metrics.get(SENT)) is not None:
            job.sent += sent - seen.sent
            seen.sent = sent

    def _count_losses(self, now: float) -> None:
        while self._losses and self._losses[0][0] + _LOSS <= now:
            _, job, number = self._losses.pop(0)
            job.lost += number

    def _job(self, ws: WorkerState) -> JobUsage | None:
        """Return the job of a new worker."""
        identity = ws.extra.get(JOB)
        if not identity:  # a person started this worker
            return None
        jobs = self._file.jobs if self._file is not None else {}
        job = jobs.setdefault(identity["id"], _usage_of(identity))
        job.began = min(filter(None, (job.began, identity["began"])), default=None)  # nodes of a job start one by one
        model = ws.extra.get(METRIC) or {}
        job.model, job.memory_total = model.get("model", ""), model.get("memory_total")
        if self._file is not None and job is self._file.scheduler_job and job.kind == "scheduler":  # both share one job
            job.kind, job.firsts = "worker", []
        if _gpus(ws):
            names = self._names.setdefault(job.id, set())
            names.add(ws.name)
            job.gpus = max(job.gpus, len(names))  # an earlier scheduler has counted the same workers
        if not _gpus(ws) and job.spilled is None:  # dask-cuda's workers do not report how much they spill
            job.spilled = 0
        return job

    def _state(self, ws: Any, seen: _Seen, now: float) -> GPUState:
        model, reading = ws.extra.get(METRIC) or {}, _gpu_use(ws)
        idle = not works(reading, self._tasks(ws))  # a heartbeat may have come since the last sample
        return GPUState(
            worker=str(ws.name),
            node=str(ws.extra.get(NODE) or ws.host),
            model=str(model.get("model", "")),
            utilization=reading["utilization"],
            memory_used=reading["memory_used"],
            memory_total=model.get("memory_total"),
            power=reading["power"],
            idle_since=(seen.idle_since or now) if idle else None,
        )

    def _tasks(self, ws: WorkerState) -> int:
        """Return how many tasks and calls a worker has."""
        return len(ws.processing) + self.calls.running(ws)

    def _sample_again(self) -> None:
        self.sample(time.time())
        self._sampling.callback_time = period(len(self.scheduler.workers)) * 1000

    async def _write_again(self, file: _File) -> None:
        with contextlib.suppress(OSError, ValueError):  # the next write tries it again
            await file.read()
        pause = _FIRST
        while True:
            await asyncio.sleep(pause)
            await file.write(time.time())
            pause = _AGAIN


class _File:
    """The usage file of one cluster. All access to the filesystem happens in threads.

    Parameters
    ----------
    directory : ClusterDirectory
    scheduler_job : JobUsage or None
        The scheduler's job.
    """

    def __init__(self, directory: ClusterDirectory, scheduler_job: JobUsage | None) -> None:
        self.directory = directory
        self.scheduler_job = scheduler_job
        self.jobs: dict[str, JobUsage] = {scheduler_job.id: scheduler_job} if scheduler_job is not None else {}
        self._token = ""
        self._whole = True
        self._under_way = False
        self._problem = ""

    async def read(self) -> None:
        """Read the file of an earlier scheduler of this cluster, once. Nothing is written before this has succeeded."""
        if self._token:
            return
        token = await in_thread(self.directory.token)
        kept = await in_thread(usage_file.read, self.directory.path)
        if not self._token:
            self._token, self.jobs = token, kept.jobs | self.jobs
            self._whole = kept.whole or not (kept.jobs or kept.problems)

    async def closing(self) -> bool:
        """Whether the jobs of the cluster were cancelled for good."""
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            return await asyncio.wait_for(in_thread(lambda: self.directory.closing), _LAST)
        return False

    async def write(self, now: float, *, timeout: float | None = None) -> None:
        """Write the file, unless the last write has not finished; a failure is only reported."""
        if self.scheduler_job is not None:
            self.scheduler_job.last = now
        if self._under_way:
            return
        self._under_way = True
        try:
            await asyncio.wait_for(self.read(), timeout)
            await asyncio.wait_for(in_thread(self._write), timeout)
            problem = ""
        except TimeoutError as error:  # also a timeout of the filesystem
            problem = error.strerror or f"not written within {timeout or 0:g} s"
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", "") or str(error)
        finally:
            self._under_way = False
        if problem and problem != self._problem:
            path = self.directory.path / usage_file.FILE
            logger.warning("hpcgpu: what the jobs did cannot be written to %s, for `hpcgpu report`: %s", path, problem)
        self._problem = problem

    def _write(self) -> None:
        if not self.directory.has_token(self._token):  # a later cluster has the name, or the directory was removed
            return
        job = self.scheduler_job
        if job is not None and self.directory.has_ended(job.id):  # the next scheduler writes it now
            return
        jobs = self.jobs.copy()
        while len(jobs) > _MOST_JOBS:  # the oldest first
            oldest = min(jobs, key=lambda one: jobs[one].last)
            del jobs[oldest]
            self.jobs.pop(oldest, None)
            self._whole = False
        lines = [usage_file.line(job) for job in jobs.values()]
        self.directory.write(
            usage_file.FILE, "".join(lines if self._whole else [*lines, usage_file.line(JobUsage(id=""))])
        )


def _gpus(ws: WorkerState) -> int:
    return int(ws.extra.get(GPUS) or 0)


def _gpu_use(ws: Any) -> GPUUse:
    reading = ws.metrics.get(METRIC)
    return reading if isinstance(reading, dict) else _SILENT  # type: ignore[return-value]


def _spilled(ws: Any) -> int:
    return int((ws.metrics.get("spilled_bytes") or {}).get("disk", 0))
