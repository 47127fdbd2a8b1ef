"""The answers of the scheduler's own calls, as they cross the network."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = [
    "Changes",
    "GPUState",
    "GroupState",
    "Load",
    "LoadChanges",
    "ManagerState",
    "RequestAnswer",
    "ScalingRequest",
    "SchedulerState",
    "WaitingWork",
    "WorkerChanges",
    "WorkerLoad",
    "WorkerRuns",
]


class WorkerLoad(TypedDict):
    """What one worker does and holds."""

    #: Tasks that it has.
    processing: int
    #: Calls that run on it and are no tasks.
    calls: int
    #: Its GPU works, or has worked a few seconds ago.
    computes: bool
    #: Seconds that they will take.
    occupancy: float
    #: Bytes that it holds, and those of them that somebody still wants.
    nbytes: int
    wanted: int
    actors: int
    #: Tasks such as it has that it can run at once: its threads, or fewer if these tasks need much of its resources.
    at_once: int
    #: The same while it takes tasks. One that is paused only runs those that it has begun.
    nthreads: int
    #: It takes no tasks, as its memory is full.
    paused: bool
    #: 0: none.
    memory_limit: int


class WaitingWork(TypedDict):
    """Tasks that no worker has yet, and that need the same resources."""

    resources: dict[str, float]
    tasks: int
    seconds: float


class Load(TypedDict):
    """What there is to do."""

    #: By the worker's name.
    workers: dict[str, WorkerLoad]
    waiting: list[WaitingWork]


class WorkerRuns(TypedDict):
    """What runs on a worker: the answer of ``hpcgpu_runs`` has one for each."""

    #: Names of functions; empty where the name is not known.
    calls: list[str]
    #: Keys.
    tasks: list[str]


class Changes(TypedDict):
    """What has changed since an earlier answer, which the caller names: `hpcgpu.runtime.changes` makes and reads it."""

    #: Names this answer.
    version: str
    #: Whether this is all that there is now, because the scheduler does not know the earlier answer.
    whole: bool
    #: What is new or different, and what is gone.
    changed: dict[str, Any]
    gone: list[str]


class LoadChanges(TypedDict):
    """The answer of ``hpcgpu_load``: the loads of workers by name, and all waiting work."""

    workers: Changes
    waiting: list[WaitingWork]


class WorkerChanges(TypedDict):
    """The answer of ``hpcgpu_workers``: what distributed's ``identity`` tells of the scheduler, and of workers."""

    scheduler: dict[str, Any]
    #: By address; without what changes all the time, such as metrics.
    workers: Changes


class GPUState(TypedDict):
    """One GPU, as its worker's last heartbeat reported it: the answer of ``hpcgpu_gpus`` is a list of these."""

    #: The name of its Dask worker.
    worker: str
    node: str
    #: What the driver calls this GPU, such as ``NVIDIA A100-SXM4-40GB``; empty if it does not say.
    model: str
    #: Per cent of the time in which it computes; None if the driver does not say.
    utilization: float | None
    #: Bytes; None if the driver does not say.
    memory_used: int | None
    memory_total: int | None
    #: Watts; None if the driver does not say.
    power: float | None
    #: Seconds since 1970 since when it computes nothing; None while it computes.
    idle_since: float | None


class GroupState(TypedDict):
    """A worker group, as the manager reports it with its heartbeats."""

    name: str
    #: Worker jobs that the manager wants; null where it has not decided yet.
    target: int | None
    #: Limits of adaptive scaling; both null where the user sets the number of jobs.
    minimum: int | None
    maximum: int | None
    #: Why it has as many jobs as it has.
    reason: str
    #: Why no more jobs are submitted; empty if they are.
    paused: str
    #: GPU hours used so far, and the budget; null if there is none.
    gpu_hours: float
    maximum_gpu_hours: float | None
    #: Seconds that its jobs usually wait; null if none has started yet.
    usual_wait: float | None


class RequestAnswer(TypedDict):
    """The answer to a request to the manager."""

    #: Whether there is a manager that takes requests.
    taken: bool
    #: What is wrong with the request; empty if it is done.
    error: str


class ScalingRequest(TypedDict):
    """What another program requests of the manager."""

    number: int
    #: As `hpcgpu.scaling.wanted.to_json` writes it.
    command: dict[str, Any]


class ManagerState(TypedDict):
    """Who manages the cluster."""

    #: The highest number of any manager; 0: none yet.
    number: int
    present: bool
    #: What it says of its scaling.
    about: str
    #: What went wrong with the manager in the scheduler job.
    problem: str
    #: What it reports of each worker group; empty before its first report.
    groups: list[GroupState]
    #: Failures and warnings that the user has not seen yet.
    warnings: list[str]


class SchedulerState(TypedDict):
    """What the scheduler knows of the cluster at one moment: the answer of ``hpcgpu_state``."""

    #: The names of the connected workers.
    workers: list[str]
    gpus: list[GPUState]
    manager: ManagerState
