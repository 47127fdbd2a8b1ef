"""Batch systems. Nothing here imports Dask, distributed or CUDA."""

from __future__ import annotations

from hpcgpu.batch import system_registry
from hpcgpu.batch.base import BatchSystem


def batch_system(name: str) -> BatchSystem:
    """Return a client of the batch system of that name, with its defaults."""
    return system_registry.system(name).batch()
