"""The classes of clusters by batch system, and the clusters that dask-ctl finds."""

from __future__ import annotations

from collections.abc import AsyncIterator

from hpcgpu.cluster.gpucluster import GPUCluster, LocalGPUCluster, PBSGPUCluster, SlurmGPUCluster
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.remote.lookup import find

__all__ = ["cluster_class", "discover"]

_CLASSES: dict[str, type[GPUCluster]] = {cls.system: cls for cls in (SlurmGPUCluster, PBSGPUCluster, LocalGPUCluster)}


def cluster_class(system: str) -> type[GPUCluster]:
    """Return the class of clusters of a batch system."""
    return _CLASSES[system]


async def discover() -> AsyncIterator[tuple[str, type[GPUCluster]]]:
    """Yield name and class of each cluster, for dask-ctl (entry point ``dask_cluster_discovery``)."""
    for found in find(cluster_directories()):
        if found.system:
            yield found.directory.path.name, cluster_class(found.system)
