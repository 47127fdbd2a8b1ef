"""GPU Dask clusters on HPC systems, through the site's own batch queue.

Names are imported when they are used, so that ``import hpcgpu`` stays cheap and never touches CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.cluster.gpucluster import GPUCluster as GPUCluster
    from hpcgpu.cluster.runner import SlurmGPURunner as SlurmGPURunner
    from hpcgpu.cluster.system_classes import LocalGPUCluster as LocalGPUCluster
    from hpcgpu.cluster.system_classes import PBSGPUCluster as PBSGPUCluster
    from hpcgpu.cluster.system_classes import SlurmGPUCluster as SlurmGPUCluster
    from hpcgpu.display.jobinfo import JobInfo as JobInfo
    from hpcgpu.errors import AmbiguousSubmit as AmbiguousSubmit
    from hpcgpu.errors import AuthenticationError as AuthenticationError
    from hpcgpu.errors import BatchError as BatchError
    from hpcgpu.errors import BatchUnavailable as BatchUnavailable
    from hpcgpu.errors import Cancelled as Cancelled
    from hpcgpu.errors import CertificateError as CertificateError
    from hpcgpu.errors import ClusterError as ClusterError
    from hpcgpu.errors import ClusterExists as ClusterExists
    from hpcgpu.errors import ClusterWarning as ClusterWarning
    from hpcgpu.errors import Damaged as Damaged
    from hpcgpu.errors import HpcgpuError as HpcgpuError
    from hpcgpu.errors import LaunchError as LaunchError
    from hpcgpu.errors import NameLost as NameLost
    from hpcgpu.errors import NoCluster as NoCluster
    from hpcgpu.errors import NotTrusted as NotTrusted
    from hpcgpu.errors import OptionError as OptionError
    from hpcgpu.errors import OtherFormat as OtherFormat
    from hpcgpu.errors import OtherQueue as OtherQueue
    from hpcgpu.errors import SubmitLimited as SubmitLimited
    from hpcgpu.errors import SubmitRefused as SubmitRefused
    from hpcgpu.errors import Superseded as Superseded
    from hpcgpu.remote.connection import connect as connect
    from hpcgpu.remote.snapshot import GPUInfo as GPUInfo
    from hpcgpu.remote.snapshot import Snapshot as Snapshot
    from hpcgpu.remote.snapshot import snapshot as snapshot

__version__ = "0.1.0"

_ERRORS = "hpcgpu.errors"
_HOMES = {
    "GPUCluster": "hpcgpu.cluster.gpucluster",
    "GPUInfo": "hpcgpu.remote.snapshot",
    "JobInfo": "hpcgpu.display.jobinfo",
    "LocalGPUCluster": "hpcgpu.cluster.system_classes",
    "PBSGPUCluster": "hpcgpu.cluster.system_classes",
    "SlurmGPUCluster": "hpcgpu.cluster.system_classes",
    "SlurmGPURunner": "hpcgpu.cluster.runner",
    "Snapshot": "hpcgpu.remote.snapshot",
    "connect": "hpcgpu.remote.connection",
    "snapshot": "hpcgpu.remote.snapshot",
    "AmbiguousSubmit": _ERRORS,
    "AuthenticationError": _ERRORS,
    "BatchError": _ERRORS,
    "BatchUnavailable": _ERRORS,
    "Cancelled": _ERRORS,
    "CertificateError": _ERRORS,
    "ClusterError": _ERRORS,
    "ClusterExists": _ERRORS,
    "ClusterWarning": _ERRORS,
    "Damaged": _ERRORS,
    "HpcgpuError": _ERRORS,
    "LaunchError": _ERRORS,
    "NameLost": _ERRORS,
    "NoCluster": _ERRORS,
    "NotTrusted": _ERRORS,
    "OptionError": _ERRORS,
    "OtherFormat": _ERRORS,
    "OtherQueue": _ERRORS,
    "SubmitLimited": _ERRORS,
    "SubmitRefused": _ERRORS,
    "Superseded": _ERRORS,
}

__all__ = [
    "AmbiguousSubmit",
    "AuthenticationError",
    "BatchError",
    "BatchUnavailable",
    "Cancelled",
    "CertificateError",
    "ClusterError",
    "ClusterExists",
    "ClusterWarning",
    "Damaged",
    "GPUCluster",
    "GPUInfo",
    "HpcgpuError",
    "JobInfo",
    "LaunchError",
    "LocalGPUCluster",
    "NameLost",
    "NoCluster",
    "NotTrusted",
    "OptionError",
    "OtherFormat",
    "OtherQueue",
    "PBSGPUCluster",
    "SlurmGPUCluster",
    "SlurmGPURunner",
    "Snapshot",
    "SubmitLimited",
    "SubmitRefused",
    "Superseded",
    "__version__",
    "connect",
    "snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcgpu' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
