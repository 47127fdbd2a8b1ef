"""Slurm."""

from __future__ import annotations

from hpcgpu.batch.system import System, common_templates

__all__ = ["system"]

system = System(
    name="slurm",
    title="Slurm",
    client="hpcgpu.batch.slurm.client:Slurm",
    cluster_class="hpcgpu.cluster.gpucluster:SlurmGPUCluster",
    templates=common_templates() / "slurm",
    suffix="sbatch",
    command="sbatch",
    rank=1,
)
