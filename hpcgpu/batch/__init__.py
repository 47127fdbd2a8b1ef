"""Batch systems. Nothing here imports Dask, distributed or CUDA."""

from __future__ import annotations

from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.registry import system

__all__ = ["batch_system"]


def batch_system(name: str) -> BatchSystem:
    """Return a client of the batch system of that name, with its defaults."""
    return system(name).batch()
