"""GPU Dask clusters on HPC systems, through the site's own batch queue.

Names are imported when they are used, so that ``import hpcgpu`` stays cheap and never touches CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.cluster import ClusterError as ClusterError
    from hpcgpu.cluster import GPUCluster as GPUCluster
    from hpcgpu.cluster import LocalGPUCluster as LocalGPUCluster
    from hpcgpu.cluster import PBSGPUCluster as PBSGPUCluster
    from hpcgpu.cluster import SlurmGPUCluster as SlurmGPUCluster
    from hpcgpu.clusters import NoCluster as NoCluster
    from hpcgpu.connection import connect as connect
    from hpcgpu.errors import ClusterWarning as ClusterWarning
    from hpcgpu.options import OptionError as OptionError
    from hpcgpu.runner import SlurmGPURunner as SlurmGPURunner

__version__ = "0.1.0"

_HOMES = {
    "ClusterError": "hpcgpu.cluster",
    "ClusterWarning": "hpcgpu.errors",
    "GPUCluster": "hpcgpu.cluster",
    "LocalGPUCluster": "hpcgpu.cluster",
    "NoCluster": "hpcgpu.clusters",
    "OptionError": "hpcgpu.options",
    "PBSGPUCluster": "hpcgpu.cluster",
    "SlurmGPUCluster": "hpcgpu.cluster",
    "SlurmGPURunner": "hpcgpu.runner",
    "connect": "hpcgpu.connection",
}

__all__ = [
    "ClusterError",
    "ClusterWarning",
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
