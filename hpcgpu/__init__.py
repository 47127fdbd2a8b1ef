"""GPU Dask clusters on HPC systems, through the site's own batch queue.

Names other than the errors are imported when they are used, so that ``import hpcgpu`` stays cheap and never touches
CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpcgpu import errors
from hpcgpu.errors import *  # noqa: F403

if TYPE_CHECKING:
    from hpcgpu.checkpoints.save_and_restore import Checkpoint as Checkpoint
    from hpcgpu.checkpoints.save_and_restore import checkpoint as checkpoint
    from hpcgpu.checkpoints.save_and_restore import restore as restore
    from hpcgpu.client.connect import connect as connect
    from hpcgpu.client.held_set import HeldWorker as HeldWorker
    from hpcgpu.client.held_set import HeldWorkers as HeldWorkers
    from hpcgpu.client.hold import hold as hold
    from hpcgpu.client.replay import replay as replay
    from hpcgpu.client.upload_package import upload_package as upload_package
    from hpcgpu.cluster.gpucluster import GPUCluster as GPUCluster
    from hpcgpu.cluster.system_classes import LocalGPUCluster as LocalGPUCluster
    from hpcgpu.cluster.system_classes import PBSGPUCluster as PBSGPUCluster
    from hpcgpu.cluster.system_classes import SlurmGPUCluster as SlurmGPUCluster
    from hpcgpu.display.job_info import JobInfo as JobInfo
    from hpcgpu.existing_clusters.snapshot import GPUInfo as GPUInfo
    from hpcgpu.existing_clusters.snapshot import Snapshot as Snapshot
    from hpcgpu.existing_clusters.snapshot import snapshot as snapshot
    from hpcgpu.runner import SlurmGPURunner as SlurmGPURunner

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "hpcgpu.checkpoints.save_and_restore",
    "GPUCluster": "hpcgpu.cluster.gpucluster",
    "GPUInfo": "hpcgpu.existing_clusters.snapshot",
    "HeldWorker": "hpcgpu.client.held_set",
    "HeldWorkers": "hpcgpu.client.held_set",
    "JobInfo": "hpcgpu.display.job_info",
    "LocalGPUCluster": "hpcgpu.cluster.system_classes",
    "PBSGPUCluster": "hpcgpu.cluster.system_classes",
    "SlurmGPUCluster": "hpcgpu.cluster.system_classes",
    "SlurmGPURunner": "hpcgpu.runner",
    "Snapshot": "hpcgpu.existing_clusters.snapshot",
    "checkpoint": "hpcgpu.checkpoints.save_and_restore",
    "connect": "hpcgpu.client.connect",
    "hold": "hpcgpu.client.hold",
    "replay": "hpcgpu.client.replay",
    "restore": "hpcgpu.checkpoints.save_and_restore",
    "snapshot": "hpcgpu.existing_clusters.snapshot",
    "upload_package": "hpcgpu.client.upload_package",
}

__all__ = [
    "Checkpoint",
    "GPUCluster",
    "GPUInfo",
    "HeldWorker",
    "HeldWorkers",
    "JobInfo",
    "LocalGPUCluster",
    "PBSGPUCluster",
    "SlurmGPUCluster",
    "SlurmGPURunner",
    "Snapshot",
    "__version__",
    "checkpoint",
    "connect",
    "hold",
    "replay",
    "restore",
    "snapshot",
    "upload_package",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcgpu' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
