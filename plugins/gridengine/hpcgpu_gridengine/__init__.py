"""Grid Engine for hpcgpu: Son of Grid Engine, and its relatives with the same commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.batch.system_registry import System

if TYPE_CHECKING:
    from hpcgpu_gridengine.cluster import SGEGPUCluster

__all__ = ["SGEGPUCluster", "system"]

system = System(
    name="gridengine",
    title="Grid Engine",
    client="hpcgpu_gridengine.client:GridEngine",
    syntax="hpcgpu_gridengine.directives:SYNTAX",
    cluster_class="hpcgpu_gridengine.cluster:SGEGPUCluster",
    templates=Path(__file__).parent / "templates",
    profiles=Path(__file__).parent / "profiles",
    suffix="sge",
    command="qsub",
    queues="hpcgpu_gridengine.queues:queues",
    rank=3,
    worker_options="hpcgpu_gridengine.options:GridEngineWorkerOptions",
    scheduler_options="hpcgpu_gridengine.options:GridEngineSchedulerOptions",
    check_options="hpcgpu_gridengine.options:check",
)


def __getattr__(name: str) -> Any:
    """Import the cluster class when it is used: every command and every job imports this package."""
    if name == "SGEGPUCluster":
        from hpcgpu_gridengine.cluster import SGEGPUCluster

        return SGEGPUCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
