"""The answers of the scheduler's own calls, as they cross the network."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = ["Changes", "Load", "LoadChanges", "ManagerState", "WaitingWork", "WorkerChanges", "WorkerLoad"]


class WorkerLoad(TypedDict):
    """What one worker does and holds."""

    #: Tasks that it has.
    processing: int
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


class ManagerState(TypedDict):
    """Who manages the cluster: the answer of ``hpcgpu_state``."""

    #: The highest number of any manager; 0: none yet.
    number: int
    present: bool
    #: What it says of its scaling.
    about: str
    #: What went wrong with the manager in the scheduler job.
    problem: str
