"""`hpcgpu render`: standalone scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpcgpu.cli.names import SystemName
from hpcgpu.cli.options import ClusterCommand, cluster_options


@click.command(cls=ClusterCommand)
@click.argument("system", type=SystemName())
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Directory for the scripts, on a filesystem that login and compute nodes share. Its last part is the "
    "cluster's name.",
)
@click.option("--single-job", is_flag=True, help="One script for scheduler, workers and a program, in one allocation.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --single-job: number of nodes.")
@cluster_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def render(
    system: str, output: Path, single_job: bool, nodes: int | None, program: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    """Write the scripts of a cluster, for people and machines that submit without Python.

    Writes launch.sh, stop.sh, README and the job scripts. `launch.sh 3` submits the scheduler job and three worker
    jobs, `stop.sh` ends them; the README says how to connect. With --single-job, writes one script that runs all, and
    ends with the program's exit code.

    \b
    Examples: hpcgpu render slurm --gpus-per-node 4 --walltime 2h -o ~/clusters/demo && ~/clusters/demo/launch.sh 3
              hpcgpu render pbs --config site.yaml -o ~/clusters/demo
              hpcgpu render slurm --single-job --nodes 4 --gpus-per-node 4 -o train -- python train.py
    """
    from hpcgpu.batch import system_registry
    from hpcgpu.scripts.bundle import make, make_single

    if not single_job:
        if program or nodes:
            raise click.UsageError("a program and --nodes need --single-job")
        directory = make(system, arguments, output)
        click.echo(f"Start the cluster with {directory.path}/launch.sh JOBS, end it with stop.sh; see README.")
        return
    if not program:
        raise click.UsageError("--single-job needs a program: hpcgpu render slurm --single-job ... -- python train.py")
    if nodes is not None:
        arguments["nodes_per_job"] = nodes
    script = make_single(system, arguments, output, program)
    click.echo(f"{system_registry.system(system).command} {script}")
