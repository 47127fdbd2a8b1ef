"""The types of the answers to our RPCs of the scheduler, as they cross the network."""

from __future__ import annotations

from typing import Any, TypedDict


class WorkerLoad(TypedDict):
    """The work and the data of one worker."""

    #: Tasks that it has.
    processing: int
    #: Calls that run on it and are no tasks.
    calls: int
    #: Whether a program holds it.
    held: bool
    #: Whether its GPU works, or has worked a few seconds ago.
    computes: bool
    #: Seconds that its tasks will take.
    occupancy: float
    #: Bytes that it holds, and how many of them are still wanted.
    nbytes: int
    wanted: int
    actors: int
    #: How many tasks like its own it can run at once: its threads, or fewer if the tasks need much of its resources.
    at_once: int
    #: The same while it accepts tasks; a paused worker only finishes the tasks that it has begun.
    nthreads: int
    #: Whether it accepts no tasks because its memory is full.
    paused: bool
    #: 0: none.
    memory_limit: int


class WaitingWork(TypedDict):
    """Tasks that have no worker yet and need the same resources."""

    resources: dict[str, float]
    tasks: int
    seconds: float


class HoldSize(TypedDict):
    """A set of workers that a program requests."""

    workers: int
    #: What each of them must have; empty: a GPU.
    resources: dict[str, float]


class HeldWorkerInfo(TypedDict):
    """A worker that a program holds, and its place among the workers of the set."""

    address: str
    name: str
    #: The names of earlier calls that still run on it.
    calls: list[str]
    #: As `hpcgpu.runtime.job_identity.JobIdentity`; empty if a person started the worker.
    job: dict[str, Any]
    node: str
    #: The address of its node in the network of the workers.
    host: str
    #: Its number among all workers of the set, and among those on its node.
    rank: int
    local_rank: int
    world_size: int


class Load(TypedDict):
    """The load of the cluster."""

    #: By the worker's name.
    workers: dict[str, WorkerLoad]
    waiting: list[WaitingWork]
    #: The sets that programs wait for.
    holds: list[HoldSize]


class WorkerRuns(TypedDict):
    """Tasks and calls that run on a worker: the answer of ``hpcgpu_runs`` has one entry for each worker."""

    #: Names of functions; empty if the name is not known.
    calls: list[str]
    #: Keys of the tasks.
    tasks: list[str]
    #: Whether a program holds the worker.
    held: bool


class Changes(TypedDict):
    """The changes since an earlier answer; the caller sends its version, see `hpcgpu.dask_scheduler.answer_changes`."""

    #: The version of this answer.
    version: str
    #: Whether this contains all present values, because the scheduler does not have the earlier answer.
    whole: bool
    #: The values that are new or changed, and the keys that are gone.
    changed: dict[str, Any]
    gone: list[str]


class LoadChanges(TypedDict):
    """The answer of ``hpcgpu_load``: the loads of workers by name, and all work and programs that wait."""

    workers: Changes
    waiting: list[WaitingWork]
    holds: list[HoldSize]


class WorkerChanges(TypedDict):
    """The answer of ``hpcgpu_workers``: distributed's ``identity`` of the scheduler and of the workers."""

    scheduler: dict[str, Any]
    #: By address; without values that change all the time, such as metrics.
    workers: Changes


class GPUState(TypedDict):
    """One GPU, as its worker's last heartbeat reported it: the answer of ``hpcgpu_gpus`` is a list of these."""

    #: The name of its Dask worker.
    worker: str
    node: str
    #: The driver's name of this GPU, such as ``NVIDIA A100-SXM4-40GB``; empty if it does not report one.
    model: str
    #: Per cent of the time in which it computes; None if the driver does not report it.
    utilization: float | None
    #: Bytes; None if the driver does not report it.
    memory_used: int | None
    memory_total: int | None
    #: Watts; None if the driver does not report it.
    power: float | None
    #: Seconds since 1970 since when it computes nothing; None while it computes.
    idle_since: float | None


class GroupState(TypedDict):
    """A worker group, as the manager reports it with its heartbeats."""

    name: str
    #: Worker jobs that the manager wants; null if it has not decided yet.
    target: int | None
    #: Limits of adaptive scaling; both null if the user sets the number of jobs.
    minimum: int | None
    maximum: int | None
    #: Why it has this number of jobs.
    reason: str
    #: Why no more jobs are submitted; empty if they can be.
    paused: str
    #: GPU hours used so far, and the budget; null if there is none.
    gpu_hours: float
    maximum_gpu_hours: float | None
    #: Seconds that its jobs usually wait; null if none has started yet.
    usual_wait: float | None
    gpus_per_node: int
    #: Of each of its workers.
    resources: dict[str, float]


class RequestAnswer(TypedDict):
    """The answer to a request to the manager."""

    #: Whether a manager accepts requests.
    accepted: bool
    #: What is wrong with the request; empty if it was carried out.
    error: str


class ScalingRequest(TypedDict):
    """A request of another program to the manager."""

    number: int
    #: As `hpcgpu.scaling.wanted_state.to_json` writes it.
    command: dict[str, Any]


class ManagerState(TypedDict):
    """Who manages the cluster."""

    #: The highest number of any manager; 0 if there was none yet.
    number: int
    present: bool
    #: The manager's description of its scaling.
    about: str
    #: What went wrong with the manager in the scheduler job.
    problem: str
    #: The manager's report on each worker group; empty before its first report.
    groups: list[GroupState]
    #: Failures and warnings that the user has not seen yet.
    warnings: list[str]


class SchedulerState(TypedDict):
    """The scheduler's state of the cluster at one moment: the answer of ``hpcgpu_state``."""

    #: The names of the connected workers.
    workers: list[str]
    gpus: list[GPUState]
    manager: ManagerState
