"""Slurm."""

from __future__ import annotations

from hpcgpu.batch.registry import System, common_templates

__all__ = ["system"]

system = System(
    name="slurm",
    title="Slurm",
    client="hpcgpu.batch.slurm.client:Slurm",
    syntax="hpcgpu.batch.slurm.directives:SYNTAX",
    cluster_class="hpcgpu.cluster.system_classes:SlurmGPUCluster",
    templates=common_templates() / "slurm",
    suffix="sbatch",
    command="sbatch",
    queues="hpcgpu.batch.slurm.queues:queues",
    accounts="hpcgpu.batch.slurm.accounts:accounts",
    rank=1,
    worker_options="hpcgpu.batch.slurm.options:SlurmWorkerOptions",
    scheduler_options="hpcgpu.batch.slurm.options:SlurmSchedulerOptions",
)
