"""Clusters on Abacus."""

from __future__ import annotations

from hpcgpu import GPUCluster

__all__ = ["AbacusGPUCluster"]


class AbacusGPUCluster(GPUCluster):
    """A GPU Dask cluster on Abacus."""

    system = "abacus"
