"""Clusters on Grid Engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

from hpcgpu import GPUCluster

if TYPE_CHECKING:
    from hpcgpu_gridengine.typed import SGEArguments, SGESchedulerArguments

__all__ = ["SGEGPUCluster"]


class SGEGPUCluster(GPUCluster):
    """A GPU Dask cluster on Grid Engine."""

    system = "gridengine"

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            scheduler: SGESchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            **options: Unpack[SGEArguments],
        ) -> None: ...
