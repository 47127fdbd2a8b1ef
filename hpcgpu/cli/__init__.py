"""The `hpcgpu` command."""

from __future__ import annotations

import json
import sys
import time

import click

from hpcgpu import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpcgpu")
def main() -> None:
    """GPU Dask clusters through the batch queue of an HPC system."""


@main.command()
@click.option(
    "--system",
    type=click.Choice(["auto", "slurm", "local"]),
    default="auto",
    show_default=True,
    help="Batch system; auto takes Slurm if `sinfo` answers, else the queue embedded in hpcgpu.",
)
def demo(system: str) -> None:
    """Start a cluster, analyse the flights of New York in 2013 on it, close it.

    Submits a scheduler job and two worker jobs, with GPUs if there are any. Queue, account and the like are taken from dask's
    configuration (hpcgpu.slurm.queue, or DASK_HPCGPU__SLURM__QUEUE in the environment).

    \b
    Exit status: 0 if the result is right and no job is left, 1 if not.
    """
    from hpcgpu.demo import run

    sys.exit(run(system))


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_clusters(as_json: bool) -> None:
    """List the clusters that were not closed, with their live jobs.

    Looks into the directories of the configuration (hpcgpu.cluster-directory).

    \b
    Example: hpcgpu list --json | jq '.[].name'
    """
    from rich.console import Console
    from rich.table import Table

    from hpcgpu.clusters import find
    from hpcgpu.display.progress import duration
    from hpcgpu.options import cluster_directories

    found = find(cluster_directories())
    if as_json:
        rows = [
            {
                "name": cluster.directory.path.name,
                "system": cluster.directory.system,
                "created": cluster.directory.created,
                "directory": str(cluster.directory.path),
                "jobs": [{"id": job.job_id, "name": job.name, "state": job.state.value, "reason": job.reason} for job in cluster.jobs],
                "trouble": cluster.trouble,
            }
            for cluster in found
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table("name", "system", "age", "jobs", "directory", box=None)
    for cluster in found:
        jobs = cluster.trouble or " ".join(f"{job.job_id} ({job.state.value})" for job in cluster.jobs) or "none"
        age = duration(time.time() - cluster.directory.created)
        table.add_row(cluster.directory.path.name, cluster.directory.system, age, jobs, str(cluster.directory.path))
    Console(soft_wrap=True, highlight=False).print(table if found else "There is no cluster.")


@main.command()
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All clusters that `hpcgpu list` shows.")
def stop(names: tuple[str, ...], everything: bool) -> None:
    """Cancel every job of these clusters and none else; also after their program has crashed.

    \b
    Example: hpcgpu stop demo
    Exit status: 0 if no job is left, 1 if one is, 2 if there is no such cluster.
    """
    from hpcgpu.batch import batch_system
    from hpcgpu.batch.base import BatchError
    from hpcgpu.clusters import find
    from hpcgpu.clusters import stop as stop_cluster
    from hpcgpu.options import cluster_directories

    if bool(names) == everything:
        raise click.UsageError("name the clusters to stop, or write --all")
    roots = cluster_directories()
    found = find(roots, names)
    if missing := set(names) - {cluster.directory.path.name for cluster in found}:
        there = ", ".join(cluster.directory.path.name for cluster in find(roots)) or "none"
        raise click.UsageError(f"no cluster named {', '.join(sorted(missing))} in {', '.join(map(str, roots))}; there are: {there}")
    status = 0
    for cluster in found:
        name = cluster.directory.path.name
        try:
            left = stop_cluster(cluster.directory, batch_system(cluster.directory.system))
        except BatchError as error:
            click.echo(f"{name}: {error}", err=True)
            status = 1
            continue
        if left:
            click.echo(f"{name}: still in the queue: {' '.join(job.job_id for job in left)}", err=True)
            status = 1
        else:
            click.echo(f"{name}: {len(cluster.jobs)} jobs cancelled, none is left")
    sys.exit(status)
