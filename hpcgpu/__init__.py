"""GPU Dask clusters on HPC systems, through the site's own batch queue.

Names are imported when they are used, so that ``import hpcgpu`` stays cheap and never touches CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.cluster.gpucluster import ClusterError as ClusterError
    from hpcgpu.cluster.gpucluster import GPUCluster as GPUCluster
    from hpcgpu.cluster.gpucluster import LocalGPUCluster as LocalGPUCluster
    from hpcgpu.cluster.gpucluster import PBSGPUCluster as PBSGPUCluster
    from hpcgpu.cluster.gpucluster import SlurmGPUCluster as SlurmGPUCluster
    from hpcgpu.cluster.runner import SlurmGPURunner as SlurmGPURunner
    from hpcgpu.options.schema import OptionError as OptionError
    from hpcgpu.remote.connection import connect as connect
    from hpcgpu.remote.lookup import NoCluster as NoCluster

__version__ = "0.1.0"

_HOMES = {
    "ClusterError": "hpcgpu.cluster.gpucluster",
    "GPUCluster": "hpcgpu.cluster.gpucluster",
    "LocalGPUCluster": "hpcgpu.cluster.gpucluster",
    "NoCluster": "hpcgpu.remote.lookup",
    "OptionError": "hpcgpu.options.schema",
    "PBSGPUCluster": "hpcgpu.cluster.gpucluster",
    "SlurmGPUCluster": "hpcgpu.cluster.gpucluster",
    "SlurmGPURunner": "hpcgpu.cluster.runner",
    "connect": "hpcgpu.remote.connection",
}

__all__ = [
    "ClusterError",
    "GPUCluster",
    "LocalGPUCluster",
    "NoCluster",
    "OptionError",
    "PBSGPUCluster",
    "SlurmGPUCluster",
    "SlurmGPURunner",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcgpu' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
