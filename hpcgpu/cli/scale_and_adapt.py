"""`hpcgpu scale`, `adapt`, `resume`, `detach` and `manage`: the size of a cluster, and the program that keeps it."""

from __future__ import annotations

from typing import Any

import click

from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.names import cluster_directory
from hpcgpu.cli.printing import echo, json_option, person_waits, show_jobs, show_json
from hpcgpu.store.directory import ClusterDirectory


@click.command(cls=Forwarded)
@cluster_directory
@click.option("--jobs", type=click.IntRange(min=0), required=True, help="Number of worker jobs.")
@click.option("--worker-group", default="default", show_default=True, help="Group of workers.")
@json_option
def scale(directory: ClusterDirectory, jobs: int, worker_group: str, as_json: bool) -> None:
    """Set the number of worker jobs of a cluster. Ends adaptive scaling, and a pause after failures. A program that
    manages the cluster makes the change, and continues to manage the cluster.

    Waits until new jobs are submitted, and until surplus jobs have finished their tasks and moved their data.

    \b
    Example: hpcgpu scale demo --jobs 4
    """
    from hpcgpu.orders.change_size import scale_and_wait

    table = scale_and_wait(directory, jobs=jobs, worker_group=worker_group)
    if as_json:
        show_json(table)
    else:
        show_jobs(table, how=f"hpcgpu status {directory.in_shell} --all")


@click.command(cls=Forwarded)
@cluster_directory
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
def adapt(directory: ClusterDirectory, worker_group: str, **limits: Any) -> None:
    """Scale a cluster by its work, between two limits. If a program manages the cluster, it scales the cluster from
    now on. If not, the scheduler job scales it, and no program of yours needs to run. If compute nodes of the site
    cannot submit jobs, a process on this machine scales it, as with `hpcgpu manage`.

    `hpcgpu status`, and logs/manager.log in the cluster's directory, show what happens. Also ends a pause after
    failures.

    \b
    Example: hpcgpu adapt demo --minimum-jobs 1 --maximum-jobs 8
    """
    from hpcgpu.orders.change_size import adapt as request

    given = {key: value for key, value in limits.items() if value is not None}
    given["interactive"] = person_waits()
    echo(request(directory, worker_group=worker_group, **given))


@click.command(cls=Forwarded)
@cluster_directory
@click.option("--worker-group", default="default", show_default=True, help="Group of workers.")
def resume(directory: ClusterDirectory, worker_group: str) -> None:
    """Submit jobs again after a pause because of failures. The size of the group, or the limits of its adaptive
    scaling, stay as they are. Says so if there was no pause.

    \b
    Example: hpcgpu resume demo
    """
    from hpcgpu.orders.change_size import resume as request

    if text := request(directory, worker_group=worker_group):
        echo(text)


@click.command(cls=Forwarded)
@cluster_directory
def detach(directory: ClusterDirectory) -> None:
    """Let a cluster continue after the program that manages it. That program goes on as before; neither its end nor
    its `close` ends the cluster any more.

    The cluster ends by `hpcgpu stop`, by its --idle-timeout, or with its walltime.

    \b
    Example: hpcgpu detach demo
    """
    from hpcgpu.orders.change_size import detach as request

    echo(request(directory))


@click.command(cls=Forwarded)
@cluster_directory
@click.option("--foreground", is_flag=True, help="Manage the cluster in this process, until it is interrupted.")
def manage(directory: ClusterDirectory, foreground: bool) -> None:
    """Manage a cluster from this machine, in the background, until it ends: scale it, replace its jobs, restart its
    scheduler, as you have requested.

    Needed only at sites whose compute nodes may not submit jobs; elsewhere the scheduler job does the same. The process
    goes on when you log out, if the site allows that. It ends with the cluster, or when another program takes the
    cluster over.

    \b
    Example: hpcgpu manage demo
    """
    from hpcgpu.orders.manager_on_login_node import manage_here, on_login_node

    if foreground:
        manage_here(directory)
    else:
        echo(on_login_node(directory))
