"""HTCondor for hpcgpu."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.batch.system_registry import System

if TYPE_CHECKING:
    from hpcgpu_htcondor.cluster import HTCondorGPUCluster

__all__ = ["HTCondorGPUCluster", "system"]

system = System(
    name="htcondor",
    title="HTCondor",
    client="hpcgpu_htcondor.client:HTCondor",
    syntax="hpcgpu_htcondor.directives:SYNTAX",
    cluster_class="hpcgpu_htcondor.cluster:HTCondorGPUCluster",
    templates=Path(__file__).parent / "templates",
    suffix="condor",
    command="condor_submit",
    queues="hpcgpu_htcondor.machines:queues",
    rank=4,
    worker_options="hpcgpu_htcondor.options:HTCondorWorkerOptions",
    scheduler_options="hpcgpu_htcondor.options:HTCondorSchedulerOptions",
    check_options="hpcgpu_htcondor.options:check",
)


def __getattr__(name: str) -> Any:
    """Import the cluster class when it is used: every command and every job imports this package."""
    if name == "HTCondorGPUCluster":
        from hpcgpu_htcondor.cluster import HTCondorGPUCluster

        return HTCondorGPUCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
