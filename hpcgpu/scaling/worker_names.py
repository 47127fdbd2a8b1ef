"""The names of Dask workers: the names of a job's workers, and the job that a worker belongs to. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcgpu.options.shared_options_and_defaults import WorkerOptions


def workers_of(job: str, worker: WorkerOptions) -> list[str]:
    """Return the names of a job's workers. We add the node, dask-cuda adds the GPU (dask_cuda/cuda_worker.py)."""
    names = [f"{job}-{i}" for i in range(worker.nodes_per_job)] if worker.nodes_per_job > 1 else [job]
    if worker.gpus_per_node > 1:
        names = [f"{name}-{i}" for name in names for i in range(worker.gpus_per_node)]
    return names


def sequence(name: str, cluster: str) -> int | None:
    """Return the number in the name of a worker job of this cluster; None for any other job."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == cluster and tail.isdigit() else None


def job_of(worker: object, jobs: Mapping[str, Any]) -> str | None:
    """Return the name of the job that a worker belongs to; None if it belongs to none of these jobs.

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
