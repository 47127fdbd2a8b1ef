"""PBS Professional and OpenPBS."""

from __future__ import annotations

from hpcgpu.batch.system_registry import System, common_templates

system = System(
    name="pbs",
    title="PBS",
    client="hpcgpu.batch.pbs.client:PBS",
    syntax="hpcgpu.batch.pbs.directive_syntax:SYNTAX",
    cluster_class="hpcgpu.cluster.system_classes:PBSGPUCluster",
    templates=common_templates() / "pbs",
    suffix="pbs",
    command="qsub",
    queues="hpcgpu.batch.pbs.queues:queues",
    rank=2,
    worker_options="hpcgpu.batch.pbs.options:PBSWorkerOptions",
    scheduler_options="hpcgpu.batch.pbs.options:PBSSchedulerOptions",
    check_options="hpcgpu.batch.pbs.options:check",
)
