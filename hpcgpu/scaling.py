"""How many jobs, which jobs, and what their workers are called. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from hpcgpu.options import OptionError, WorkerOptions
from hpcgpu.values import memory as parse_memory

__all__ = ["job_key", "job_of", "jobs_for", "memory_per_worker", "suffixes", "threads_per_worker", "victims", "workers_of"]


class Candidate(Protocol):
    """What `victims` must know of a job."""

    @property
    def pending(self) -> bool:
        """Whether it waits in the queue."""

    @property
    def workers(self) -> Mapping[str, str]:
        """Its connected workers."""


def threads_per_worker(worker: WorkerOptions) -> int:
    """Return the threads of one Dask worker."""
    return worker.nthreads or (1 if worker.gpus_per_node else worker.cores or 1)


def memory_per_worker(worker: WorkerOptions) -> int:
    """Return the bytes of memory of one Dask worker: its share of the node's."""
    if worker.memory is None:
        raise OptionError("memory= needs the option memory, the memory of one node")
    return worker.memory // max(1, worker.gpus_per_node)


def jobs_for(
    worker: WorkerOptions,
    *,
    n: int | None = None,
    memory: str | int | None = None,
    cores: int | None = None,
    jobs: int | None = None,
    gpus: int | None = None,
) -> int:
    """Return the number of jobs that bring so many workers, so much memory, ...; the largest of what is given, rounded up.

    Raises
    ------
    OptionError
        A negative or broken number, no number at all, or a unit that these workers do not have.
    """
    for unit, value in {"n": n, "cores": cores, "jobs": jobs, "gpus": gpus}.items():
        if value is not None and (isinstance(value, bool) or value < 0 or value != int(value)):
            raise OptionError(f"scale: {unit} must be a whole number, 0 or more, not {value!r}")
    wanted: list[float] = []
    if n is not None:
        wanted.append(n / worker.workers_per_job)
    if jobs is not None:
        wanted.append(jobs)
    if gpus is not None:
        if worker.gpus_per_node == 0:
            raise OptionError("scale: gpus= needs workers with GPUs, but gpus_per_node is 0")
        wanted.append(gpus / worker.workers_per_job)
    if cores is not None:
        wanted.append(cores / (threads_per_worker(worker) * worker.workers_per_job))
    if memory is not None:
        wanted.append((parse_memory("scale: memory", memory) if memory else 0) / (memory_per_worker(worker) * worker.workers_per_job))
    if not wanted:
        raise OptionError("scale: give a number of workers, or jobs=, gpus=, cores= or memory=")
    return math.ceil(max(wanted))


def victims(jobs: Mapping[str, Candidate], count: int) -> list[str]:
    """Choose the jobs to give up: those that wait before those that run, then those with fewest workers, then the youngest.

    Parameters
    ----------
    jobs : mapping
        The jobs by name, oldest first.
    count : int
        How many to choose; none if it is not positive.
    """

    def cost(item: tuple[int, str]) -> tuple[bool, int, int]:
        index, name = item
        return (not jobs[name].pending, len(jobs[name].workers), -index)

    return [name for _, name in sorted(enumerate(jobs), key=cost)[: max(0, count)]]


def suffixes(worker: WorkerOptions) -> int:
    """Return how many suffixes follow the job's name in a worker's name: one for the node, one for the GPU, where there are several."""
    return (worker.nodes_per_job > 1) + (worker.gpus_per_node > 1)


def workers_of(job: str, worker: WorkerOptions) -> list[str]:
    """Return the names of a job's workers: ours the node's suffix, dask-cuda's the GPU's (dask_cuda/cuda_worker.py)."""
    names = [f"{job}-{i}" for i in range(worker.nodes_per_job)] if worker.nodes_per_job > 1 else [job]
    if worker.gpus_per_node > 1:
        names = [f"{name}-{i}" for name in names for i in range(worker.gpus_per_node)]
    return names


def job_of(worker: object, jobs: Mapping[str, Any]) -> str | None:
    """Return the name of the job that a worker belongs to; None for a worker of none of them.

    Parameters
    ----------
    worker : str
        The worker's name.
    jobs : mapping
        The jobs by name.
    """
    name = str(worker)
    for _ in range(3):
        if name in jobs:
            return name
        head, _, tail = name.rpartition("-")
        if not tail.isdigit():
            return None
        name = head
    return None


def job_key(worker: Any, suffixes: int) -> str:
    """Return the name of a worker's job, for the scheduler's ``workers_to_close``: it is pickled to there.

    Parameters
    ----------
    worker : distributed.scheduler.WorkerState
    suffixes : int
        How many suffixes follow the job's name.
    """
    return "-".join(str(worker.name).split("-")[: -suffixes or None])
