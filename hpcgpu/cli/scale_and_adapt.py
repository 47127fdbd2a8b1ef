"""`hpcgpu scale` and `hpcgpu adapt`: the size of a cluster."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from hpcgpu.cli.cluster_name import cluster_name
from hpcgpu.cli.printing import echo, json_option, show_jobs, show_json


@click.command()
@cluster_name
@click.option("--jobs", type=click.IntRange(min=0), required=True, help="Number of worker jobs.")
@click.option("--worker-group", default="default", show_default=True, help="Group of workers.")
@json_option
def scale(name: str, jobs: int, worker_group: str, as_json: bool) -> None:
    """Set the number of worker jobs of a cluster. Ends adaptive scaling, and a pause after failures. A program that
    manages the cluster makes the change, and continues to manage the cluster.

    Waits until new jobs are submitted, and until surplus jobs have finished their tasks and moved their data.

    \b
    Example: hpcgpu scale demo --jobs 4
    """
    from hpcgpu.existing_clusters.lookup import locate
    from hpcgpu.orders.change_size import scale_and_wait

    directory = locate(name)
    table = scale_and_wait(directory, jobs=jobs, worker_group=worker_group)
    if as_json:
        show_json(table)
    else:
        show_jobs(table, how=f"hpcgpu status {shlex.quote(name)} --all")


@click.command()
@cluster_name
@click.option(
    "--minimum-jobs", type=click.IntRange(min=0), default=0, show_default=True, help="Minimum number of worker jobs."
)
@click.option("--maximum-jobs", type=click.IntRange(min=1), required=True, help="Maximum number of worker jobs.")
@click.option("--idle-timeout", help="How long to keep a job without work, such as 5m.")
@click.option(
    "--maximum-gpu-hours",
    type=float,
    help="Budget of GPU hours. When it is used up, the jobs of the group end. Running tasks get 20 s. Results that no "
    "other worker can hold are lost.",
)
@click.option("--worker-group", default="default", show_default=True, help="Group of workers.")
def adapt(name: str, worker_group: str, **limits: Any) -> None:
    """Scale a cluster by its work, between two limits. If a program manages the cluster, it scales the cluster from
    now on. If not, the scheduler job scales it, and no program of yours needs to run.

    The scheduler job can scale the cluster only if the site lets compute nodes submit jobs. `hpcgpu status`, and
    logs/manager.log in the cluster's directory, show what happens. Also ends a pause after failures.

    \b
    Example: hpcgpu adapt demo --minimum-jobs 1 --maximum-jobs 8
    """
    from hpcgpu.existing_clusters.lookup import locate
    from hpcgpu.orders.change_size import adapt as request

    given = {key: value for key, value in limits.items() if value is not None}
    given["interactive"] = os.isatty(0)  # a terminal means an interactive user
    echo(request(locate(name), worker_group=worker_group, **given))
