"""Batch systems. Nothing here imports Dask, distributed or CUDA."""

from __future__ import annotations

from hpcgpu.batch.base import BatchSystem

__all__ = ["batch_system"]


def batch_system(name: str) -> BatchSystem:
    """Return the batch system of that name, with its defaults."""
    if name == "slurm":
        from hpcgpu.batch.slurm.client import Slurm

        return Slurm()
    if name == "pbs":
        from hpcgpu.batch.pbs.client import PBS

        return PBS()
    if name == "local":
        from hpcgpu.batch.local.queue import LocalQueue

        return LocalQueue()
    raise ValueError(f"unknown batch system {name!r}")
