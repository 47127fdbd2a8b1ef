"""The classes of clusters by batch system, and the clusters that dask-ctl finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from hpcgpu.batch import system_registry
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.display.warn import warn
from hpcgpu.existing_clusters.lookup import find

if TYPE_CHECKING:
    from hpcgpu.cluster.gpucluster import GPUCluster


def cluster_class(system: str) -> type[GPUCluster]:
    """Return the class of clusters of a batch system."""
    found: type[GPUCluster] = system_registry.load(system_registry.system(system).cluster_class)
    return found


async def discover() -> AsyncIterator[tuple[str, type[GPUCluster]]]:
    """Yield name and class of each cluster, for dask-ctl (entry point ``dask_cluster_discovery``)."""
    for found in find(cluster_directories()):
        if not found.readable:
            warn(found.problem)
        elif found.system:
            yield found.directory.path.name, cluster_class(found.system)
