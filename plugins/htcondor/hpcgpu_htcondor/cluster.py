"""Clusters on HTCondor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

from hpcgpu import GPUCluster

if TYPE_CHECKING:
    from hpcgpu_htcondor.typed import HTCondorArguments, HTCondorSchedulerArguments

__all__ = ["HTCondorGPUCluster"]


class HTCondorGPUCluster(GPUCluster):
    """A GPU Dask cluster on HTCondor."""

    system = "htcondor"

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            scheduler: HTCondorSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            **options: Unpack[HTCondorArguments],
        ) -> None: ...
