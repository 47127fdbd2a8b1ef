"""Slurm."""

from __future__ import annotations

from hpcgpu.batch.registry import System, common_templates

__all__ = ["system"]

#: A plugin of Slurm: `srun` itself starts the container.
_PYXIS = (
    '{{ launcher or "srun --ntasks=1 --kill-on-bad-exit=0" ~ (" --cpus-per-task=%s" % cores if cores else "") }} '
    '--container-image="$image" --container-mounts="$(IFS=,; echo "${mounts[*]}")" --container-workdir="$PWD" '
    '{% if own_variables %}--container-env={{ own_variables | join(",") }} {% endif %}'
    "--no-container-entrypoint{{ arguments }}"
)

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
    container_runtimes={"pyxis": _PYXIS},
)
