"""`hpcgpu plan`: when a cluster would start, and what it costs."""

from __future__ import annotations

from typing import Any

import click

from hpcgpu.cli.options import ForwardedClusterCommand, cluster_options, system_option
from hpcgpu.cli.printing import echo, json_option, show_json, width
from hpcgpu.cli.start_and_run import chosen_system


@click.command(cls=ForwardedClusterCommand)
@system_option
@json_option
@cluster_options
def plan(system: str, as_json: bool, arguments: dict[str, Any]) -> None:
    """Show when the jobs of a cluster would start, what is in their way, and what they cost. Submits nothing.

    Takes the options of `hpcgpu start`. Queries the batch system in each queue for the scheduler job and for one worker
    job. On Slurm it uses `sbatch --test-only`. PBS has no such test: there it shows the limits of the queue, and
    whether enough resources are free now.

    \b
    Example: hpcgpu plan --jobs 4 --gpus-per-node 4 --walltime 2h --queue gpu,short
    """
    from hpcgpu.cluster.dask_ctl import cluster_class

    found = cluster_class(chosen_system(system, arguments.get("profile"))).plan(**arguments)
    if as_json:
        show_json(found)
    else:
        echo(found.text(width()))
