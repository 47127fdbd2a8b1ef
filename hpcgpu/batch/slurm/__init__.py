"""Slurm."""

from __future__ import annotations

from hpcgpu.batch.system_registry import System, common_templates

#: A plugin of Slurm: `srun` itself starts the container. enroot's hook mounts no GPU and no libcuda without the two
#: variables, which images made for GPUs set (98-nvidia.sh).
_PYXIS = (
    '{% if gpus %}env NVIDIA_VISIBLE_DEVICES="${NVIDIA_VISIBLE_DEVICES:-all}" '
    'NVIDIA_DRIVER_CAPABILITIES="${NVIDIA_DRIVER_CAPABILITIES:-compute,utility}" {% endif %}'
    '{{ launcher or "srun --ntasks=1 --kill-on-bad-exit=0" ~ (" --cpus-per-task=%s" % cores if cores else "") }} '
    '--container-image="$image" --container-mounts="$(IFS=,; echo "${mounts[*]}")" --container-workdir="$PWD" '
    '{% if own_variables %}--container-env={{ own_variables | join(",") }} {% endif %}'
    "--no-container-entrypoint{{ arguments }}"
)

system = System(
    name="slurm",
    title="Slurm",
    client="hpcgpu.batch.slurm.client:Slurm",
    syntax="hpcgpu.batch.slurm.directive_syntax:SYNTAX",
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
