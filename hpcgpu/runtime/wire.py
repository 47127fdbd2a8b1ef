"""The answers of the scheduler's own calls, as they cross the network."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["Load", "ManagerState", "WaitingWork", "WorkerLoad"]


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
    """What there is to do: the answer of ``hpcgpu_load``."""

    workers: dict[str, WorkerLoad]
    waiting: list[WaitingWork]


class ManagerState(TypedDict):
    """Who manages the cluster: the answer of ``hpcgpu_state``."""

    #: The highest number of any manager; 0: none yet.
    number: int
    present: bool
    #: What it says of its scaling.
    about: str
    #: What went wrong with the manager in the scheduler job.
    problem: str
