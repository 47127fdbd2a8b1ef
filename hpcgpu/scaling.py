"""How many jobs, which jobs, and what their workers are called. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcgpu.options import OptionError, WorkerOptions
from hpcgpu.policy import Limits
from hpcgpu.values import duration, positive
from hpcgpu.values import memory as parse_memory

__all__ = ["job_of", "jobs_for", "limits", "memory_per_worker", "threads_per_worker", "workers_of"]


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
        if value is not None and (isinstance(value, bool) or not 0 <= value < math.inf or value != int(value)):
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


def limits(
    worker: WorkerOptions,
    *,
    minimum: Mapping[str, Any],
    maximum: Mapping[str, Any],
    backlog: int | None = None,
    idle_timeout: float | str | None = None,
    maximum_gpu_hours: float | None = None,
) -> Limits:
    """Return the limits of adaptive scaling in jobs: the minimum rounded up, the maximum down.

    Parameters
    ----------
    worker : WorkerOptions
    minimum, maximum : mapping
        Units of `jobs_for`, with None for those not given.
    backlog, idle_timeout, maximum_gpu_hours
        See `hpcgpu.cluster.GPUCluster.adapt`.

    Raises
    ------
    OptionError
        A number that cannot be, no maximum, or one that is below the minimum or below one job.
    """
    most = {unit: value for unit, value in maximum.items() if value is not None}
    if not most:
        raise OptionError("adapt: give a maximum, such as maximum_jobs=4")
    least = jobs_for(worker, **minimum) if any(value is not None for value in minimum.values()) else 0
    largest = min(_jobs_within(worker, unit, value) for unit, value in most.items())
    given = ", ".join(f"{_LIMIT_NAMES[unit].format('maximum')}={value!r}" for unit, value in most.items())
    if largest < 1:
        raise OptionError(f"adapt: {given} is less than one job, which brings {worker.workers_per_job} workers")
    if largest < least:
        raise OptionError(f"adapt: the minimum is {least} jobs, more than {given}, which is {largest} jobs")
    if backlog is not None:
        positive("adapt: backlog", backlog)
    if maximum_gpu_hours is not None:
        if isinstance(maximum_gpu_hours, bool) or not maximum_gpu_hours > 0:
            raise OptionError(f"adapt: maximum_gpu_hours must be more than 0, not {maximum_gpu_hours!r}")
        if not worker.gpus_per_node:
            raise OptionError("adapt: maximum_gpu_hours needs workers with GPUs, but gpus_per_node is 0")
    return Limits(
        minimum=least,
        maximum=largest,
        backlog=backlog,
        idle_timeout=duration("adapt: idle_timeout", idle_timeout) if idle_timeout is not None else None,
        gpu_seconds=maximum_gpu_hours * 3600 if maximum_gpu_hours is not None else None,
    )


_LIMIT_NAMES = {"n": "{}", "jobs": "{}_jobs", "gpus": "{}_gpus", "cores": "{}_cores", "memory": "{}_memory"}


def _jobs_within(worker: WorkerOptions, unit: str, value: Any) -> int:
    """Return how many whole jobs bring no more than this."""
    jobs = jobs_for(worker, **{unit: value})
    return jobs if jobs == 0 or _brings(worker, unit, jobs) <= _amount(unit, value) else jobs - 1


def _brings(worker: WorkerOptions, unit: str, jobs: int) -> int:
    workers = jobs * worker.workers_per_job
    amounts = {"jobs": jobs, "n": workers, "gpus": workers}
    if unit in amounts:
        return amounts[unit]
    return workers * (threads_per_worker(worker) if unit == "cores" else memory_per_worker(worker))


def _amount(unit: str, value: Any) -> int:
    return parse_memory("adapt: memory", value) if unit == "memory" else int(value)


def workers_of(job: str, worker: WorkerOptions) -> list[str]:
    """Return the names of a job's workers: ours the node's suffix, dask-cuda's the GPU's (dask_cuda/cuda_worker.py)."""
    names = [f"{job}-{i}" for i in range(worker.nodes_per_job)] if worker.nodes_per_job > 1 else [job]
    if worker.gpus_per_node > 1:
        names = [f"{name}-{i}" for name in names for i in range(worker.gpus_per_node)]
    return names


def sequence(name: str, cluster: str) -> int | None:
    """Return the number of a worker job of a cluster, by its name; None for another job."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == cluster and tail.isdigit() else None


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
