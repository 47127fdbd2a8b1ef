"""A cluster under one manager, with a queue, a scheduler and a clock that the test drives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hpcgpu.batch.base import After, BatchSystem, JobState, JobStatus, OwnJob
from hpcgpu.batch.slurm.reasons import REASONS
from hpcgpu.cluster.adaptive_state import GPUAdaptive
from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler.rpc_types import WorkerLoad
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable, SubmitRefused
from hpcgpu.jobs.job_registry import Registry
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.jobs.worker_job import WorkerJob
from hpcgpu.manager.closing import Closing
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.manager.restart_scheduler import SchedulerRestarts
from hpcgpu.manager.take_over import attach
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Close, Scale, Wanted, apply
from hpcgpu.software.compare_environments import EnvironmentCheck
from hpcgpu.state.cluster_phases import Ownership
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact

HOUR = 3600.0
#: The load of a worker without work.
IDLE: WorkerLoad = {
    "processing": 0,
    "calls": 0,
    "computes": False,
    "held": False,
    "occupancy": 0.0,
    "nbytes": 0,
    "wanted": 0,
    "actors": 0,
    "at_once": 1,
    "nthreads": 1,
    "paused": False,
    "memory_limit": 0,
}


class Queue(BatchSystem):
    """A batch queue in which things happen when the test requests them."""

    name = "slurm"

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.jobs: dict[str, JobStatus] = {}
        self.refusal: Exception | None = None
        self.silent = self.loses_answers = False
        self.excluded: list[str] = []
        self.refuses_exclude = False

    def check(self) -> None: ...

    def version(self) -> str:
        return "1"

    def submit(
        self,
        script: Path,
        *,
        job_name: str,
        logs: Path | None = None,
        after: After | None = None,
        exclude: Collection[str] = (),
        wanted: Callable[[], bool] = lambda: True,
    ) -> str:
        if self.refusal is not None:
            raise self.refusal
        if exclude and self.refuses_exclude:
            raise SubmitRefused("Requested node configuration is not available")
        job_id, self.excluded = str(next(self.ids)), list(exclude)  # several are submitted at a time, in threads
        self.jobs[job_id] = JobStatus(
            job_id=job_id,
            state=JobState.PENDING,
            name=job_name,
            reason="Dependency" if after is not None and after.ended else "Priority",
            words=REASONS,
        )
        if self.loses_answers:
            raise AmbiguousSubmit(f"it is not known whether job {job_name!r} exists")
        return job_id

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        if self.silent:
            raise BatchUnavailable("squeue does not answer")
        return {job_id: self.jobs[job_id] for job_id in job_ids if self.jobs[job_id].name}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        for job_id in job_ids:
            if not self.jobs[job_id].state.ended and (not only_pending or self.jobs[job_id].state is JobState.PENDING):
                self.jobs[job_id] = replace(self.jobs[job_id], state=JobState.CANCELLED)

    def find(self, job_name: str) -> list[str]:
        if self.silent:
            raise BatchUnavailable("squeue does not answer")
        return [job_id for job_id, status in self.jobs.items() if status.name == job_name and not status.state.ended]

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        return None


class Client:
    """A Dask scheduler as the reconciler sees it."""

    address = "tls://scheduler"

    def __init__(self) -> None:
        self.listening = True
        self.there: dict[str, dict[str, Any]] = {}
        self.over: list[str] = []
        self.blamed: list[str] = []
        self.full = False
        self.resumed: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.refusing: list[str] = []
        self.working: dict[str, dict[str, list[str]]] = {}
        self.held = set[str]()
        self.retired = set[str]()
        self.asked = 0

    async def close(self) -> None: ...

    async def workers(self) -> Mapping[str, Mapping[str, Any]]:
        if not self.listening:
            raise TimeoutError
        return self.there

    async def load(self) -> Mapping[str, Any]:
        return {"workers": {worker["name"]: IDLE for worker in self.there.values()}, "waiting": [], "holds": []}

    async def heartbeat(self, manager: int, about: str, groups: object, warnings: object) -> int:
        return manager

    async def describe(self, name: str, system: str) -> None: ...

    async def next_request(self, manager: int) -> None:
        await asyncio.Event().wait()

    async def ended(self, names: Iterable[str], crashed: Iterable[str]) -> None:
        self.over += names
        self.blamed += crashed

    async def retire(self, names: Iterable[str], *, close: bool) -> Collection[str]:
        listed = list(names)
        self.retired.update(listed)
        addresses = [] if self.full else [address for address, worker in self.there.items() if worker["name"] in listed]
        for address in addresses if close else ():
            del self.there[address]
        return addresses

    async def unfinished(self, names: Iterable[str]) -> Mapping[str, int]:
        self.asked += 1
        return {name: len(self.working[name]["calls"] + self.working[name]["tasks"]) for name in self.working}

    async def resume(self, names: Iterable[str]) -> None:
        self.resumed += names

    async def will_leave(self, names: Iterable[str]) -> Collection[str]:
        self.asked += 1
        return self.held.intersection(names)

    async def lose(self, names: Iterable[str], why: str) -> None:
        self.lost += [(name, why) for name in names]

    async def refuse_tasks(self, names: Iterable[str]) -> None:
        self.refusing += names

    async def end(self, manager: int) -> None:
        """The scheduler is asked to end; here only the queue ends jobs."""

    async def runs(self, names: Iterable[str]) -> Mapping[str, Any]:
        return {name: {"held": name in self.held, **each} for name, each in self.working.items()}


class Site:
    """A cluster under one reconciler."""

    def __init__(self, path: Path, gpus: int = 1) -> None:
        self.now = 1e9
        self.queue, self.client = Queue(), Client()
        self.logged, self.warned = list[str](), list[str]()
        self.options = resolve(
            "slurm", {"name": "demo", "gpus_per_node": gpus, "walltime": "48h", "poll_interval": "10ms"}
        )
        self.directory = create_directory.claim(path / "demo", lambda earlier: [], system="slurm")
        dispatcher = Dispatcher(self.queue, self.directory, self.directory.take_over("test").number, lambda: self.now)
        self.registry = Registry("demo", dispatcher, self.directory.logs, self.options.cluster.worker_restarts)
        self.group = self.registry.add_group(DEFAULT, self.options.worker, path / "worker")
        self.state = ClusterState("demo", dispatcher, self.registry, Ownership(True, True), self, lambda: self.now)
        self.state.wanted = apply(Wanted(), AddGroup(DEFAULT, 0))
        self.reconciler = Reconciler(self.state, EnvironmentCheck("off"))
        self.scheduler = SchedulerJob(dispatcher, path / "scheduler", "demo-scheduler", self.directory.logs, 60.0)

    def log(self, text: str) -> None:
        self.logged.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    async def begin(self, jobs: int) -> None:
        """Start the scheduler and so many running jobs."""
        self.registry.add(self.scheduler)
        self.state.scheduler = self.scheduler
        await self.scheduler.submit()
        assert self.scheduler.job_id is not None
        self.says("demo-scheduler", JobState.RUNNING)
        self.directory.publish(
            Contact(token=self.directory.token(), job_id=self.scheduler.job_id, workers="ucx://s", client="tls://s")
        )
        await self.scheduler.wait_until_reachable()
        self.state.client = self.client
        await self.scale(jobs)
        for name in list(self.registry.active):
            await self.starts(name)
        self.warned.clear()

    async def scale(self, jobs: int) -> None:
        self.reconciler.order(Scale(DEFAULT, jobs))
        await self.settled()

    def adapt(self, limits: Limits) -> GPUAdaptive:
        """What `GPUCluster.adapt` does and returns."""
        self.reconciler.order(Adapt(DEFAULT, limits, 5.0))
        assert self.group.adaptive is not None
        return GPUAdaptive(self.group, self.group.adaptive, self.reconciler.order)

    async def settled(self) -> None:
        """Let all that is under way come to its end."""
        restarts = self.reconciler.restarts
        while tasks := self.state.tasks | (
            restarts.tasks if restarts is not None and not self.state.phase.restarting else set()
        ):
            ended, others = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            for task in others if not ended else ():
                task.cancel()
            assert ended, f"within a minute none of these came to its end: {others}; the jobs: {self.shown}"

    async def passes(self, seconds: float, step: float = 1.0) -> None:
        """Let time pass: a decision each `step`, a poll each ten of them."""
        for i in range(int(seconds / step)):
            self.now += step
            if i % 10 == 9:
                await self.reconciler.observe_queue()
            else:
                self.reconciler.decide()
            await self.settled()

    async def loaded(self) -> None:
        """Query the scheduler for its load, and decide, as happens each second."""
        await self.reconciler.observe_load()
        self.reconciler.decide()
        await self.settled()

    async def polled(self) -> None:
        await self.reconciler.observe_queue()
        await self.settled()

    def job(self, name: str) -> WorkerJob:
        return next(job for job in self.registry.worker_jobs if job.name == name)

    def says(self, name: str, state: JobState, /, **status: Any) -> None:
        """Let the queue have a job in another state."""
        job_id = self.registry.jobs[name].job_id
        assert job_id is not None
        self.queue.jobs[job_id] = replace(self.queue.jobs[job_id], **{"state": state, "reason": "", **status})

    def forgets(self, name: str) -> None:
        """Let the queue not list a job any more."""
        self.says(name, JobState.RUNNING, name="")

    async def starts(self, name: str) -> None:
        """Let a job start, and all its workers connect."""
        self.says(name, JobState.RUNNING, start=self.now, end=self.now + 48 * HOUR, node=f"n-{name}")
        for worker in worker_names.workers_of(name, self.options.worker):
            self.client.there[f"tls://{worker}"] = {"name": worker}
            self.reconciler.worker_joined(f"tls://{worker}", worker)
        await self.polled()

    def loses(self, worker: str) -> None:
        """Let a worker's connection end, which the manager may not have received yet if the worker has retired."""
        self.client.there.pop(f"tls://{worker}", None)
        self.reconciler.worker_left(f"tls://{worker}")

    async def ends(self, name: str, state: JobState, **status: Any) -> None:
        """Let a job end, and its workers go with it."""
        self.says(name, state, end=self.now, **status)
        for address in list(self.job(name).workers):
            self.loses(address.removeprefix("tls://"))
        await self.polled()

    @property
    def shown(self) -> dict[str, tuple[str, str]]:
        """State and reason of all jobs, as the user sees them."""
        return {
            name: (info.state, info.reason)
            for name, job in self.registry.jobs.items()
            for info in [job.info(now=self.now)]
        }


def restarts(site: Site, path: Path) -> SchedulerRestarts:
    """Return what lets the scheduler of a site be restarted."""

    def new_job(name: str) -> SchedulerJob:
        job = SchedulerJob(site.state.dispatcher, path / "scheduler", name, site.directory.logs, 60.0)
        job.restarts = True
        return job

    async def connect(address: str) -> SchedulerClient:
        return cast(SchedulerClient, site.client)

    async def connected(client: SchedulerClient) -> None:
        site.state.runs()
        site.state.client = client
        site.reconciler.drainer.continue_drains()

    return SchedulerRestarts(site.state, new_job, connect, connected)


async def taken_over(site: Site, path: Path) -> Site:
    """Return the same cluster under another manager, whose scheduler and queue are the same."""
    other = Site.__new__(Site)
    other.__dict__.update(site.__dict__, logged=[], warned=[])
    number = site.directory.take_over("another program").number
    dispatcher = Dispatcher(site.queue, site.directory, number, lambda: other.now)
    other.registry = Registry("demo", dispatcher, site.directory.logs, site.options.cluster.worker_restarts)
    for name, group in site.registry.groups.items():
        other.registry.add_group(name, group.options, group.script)
    other.group = other.registry.groups[DEFAULT]
    other.state = ClusterState("demo", dispatcher, other.registry, Ownership(True, True), other, lambda: other.now)
    other.reconciler = Reconciler(other.state, EnvironmentCheck("off"))
    made = restarts(other, path)
    made.following = await attach(other.state, made._new_job)
    if site.reconciler.restarts is not None:
        other.reconciler.restarts = made
    assert isinstance(other.state.scheduler, SchedulerJob)
    other.scheduler = other.state.scheduler
    other.reconciler.restore(site.directory.wanted())
    await other.scheduler.wait_until_reachable()
    other.state.client = other.client
    other.reconciler.observe_workers(other.client.there)
    return other


async def closed(site: Site) -> Closing:
    """Close the cluster, as `GPUCluster.close` does."""
    site.reconciler.order(Close())
    site.state.closes()
    return await ended(site)


async def ended(site: Site) -> Closing:
    """End the jobs of a cluster that closes."""
    closing = Closing(site.reconciler, quiet=True)
    await closing.cancel()
    await closing.wait()
    closing.finish()
    return closing
