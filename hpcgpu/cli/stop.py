"""`hpcgpu stop`: cancels the jobs of clusters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.names import ClusterName
from hpcgpu.cli.printing import echo, warn_unanswered
from hpcgpu.display.counts_and_durations import counted, listed
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from hpcgpu.errors import NotTrusted
    from hpcgpu.existing_clusters.lookup import Found


@click.command(cls=Forwarded)
@click.argument("names", nargs=-1, type=ClusterName())
@click.option("--all", "everything", is_flag=True, help="Stop all clusters that `hpcgpu list` shows.")
def stop(names: tuple[str, ...], everything: bool) -> None:
    """Cancel all jobs of these clusters, and no other job. Works also after their program has crashed, and after their
    directory was removed.

    \b
    Example: hpcgpu stop demo
    Exit status: 0 if no job is left; 1 if one is, or if a cluster could not be stopped; 2 if there is no such cluster.
    """
    from hpcgpu.configuration.resolve import cluster_directories
    from hpcgpu.errors import BatchError, Damaged
    from hpcgpu.existing_clusters.jobs_without_directory import strays
    from hpcgpu.existing_clusters.lookup import find

    if bool(names) == everything:
        raise click.UsageError("give the names of the clusters to stop, or --all")
    status = 0

    def refuse(path: Path, error: NotTrusted) -> None:
        nonlocal status
        status = 1
        echo(
            f"{path.name}: not stopped: {error}. Correct this, then run: hpcgpu stop {ClusterDirectory(path).in_shell}",
            err=True,
        )

    if everything:
        found = find(cluster_directories(), refuse)
        chosen: list[ClusterDirectory | Found] = [*(one.directory for one in found), *strays(found, warn_unanswered)]
    else:
        chosen = [one for name in names for one in _to_stop(name)]
    for one in chosen:
        try:
            status = max(status, _stop(one))
        except (BatchError, Damaged, OSError) as error:  # the other clusters must nevertheless be stopped
            echo(f"{_directory_of(one).path.name}: {error}", err=True)
            status = 1
    if everything and not chosen and not status:
        click.echo("No clusters.")
    sys.exit(status)


def _directory_of(cluster: ClusterDirectory | Found) -> ClusterDirectory:
    return cluster if isinstance(cluster, ClusterDirectory) else cluster.directory


def _to_stop(name: str) -> list[ClusterDirectory | Found]:
    """Return the cluster of that name, or the clusters of that name that have jobs but no directory any more."""
    from hpcgpu.errors import NoCluster
    from hpcgpu.existing_clusters.lookup import locate

    try:
        return [locate(name, any_format=True)]
    except NoCluster:
        if found := clusters_without_directory(name):
            return [*found]
        raise


def clusters_without_directory(name: str) -> list[Found]:
    """Return the clusters of that name or path that have jobs but no directory any more."""
    from hpcgpu.configuration.resolve import cluster_directories
    from hpcgpu.existing_clusters.jobs_without_directory import strays
    from hpcgpu.existing_clusters.lookup import find

    wanted = Path(name).expanduser().absolute() if "/" in name else None
    known = find(cluster_directories(), lambda path, error: None)
    return [o for o in strays(known, warn_unanswered) if name == o.directory.path.name or wanted == o.directory.path]


def what_is_left(cluster: Found) -> str:
    """Return a sentence about the removed directory and the remaining jobs."""
    jobs = listed([f"{job.job_id} ({job.name})" for job in cluster.jobs], ", ")
    path = cluster.directory.path
    return f"{path.name}: its directory {path} is gone, but its jobs are in the queue: {jobs}"


def _stop(cluster: ClusterDirectory | Found) -> int:
    """Stop one cluster, and print the result; return the exit status."""
    from hpcgpu.batch import batch_system
    from hpcgpu.existing_clusters import jobs_without_directory
    from hpcgpu.existing_clusters.lookup import batch_of
    from hpcgpu.existing_clusters.query_jobs import live_and_unknown
    from hpcgpu.existing_clusters.stop import stop as stop_jobs
    from hpcgpu.existing_clusters.stop import what_stays

    unknown: list[str] = []
    name = _directory_of(cluster).path.name
    if isinstance(cluster, ClusterDirectory):
        batch = batch_of(cluster)
        live, unknown = live_and_unknown(cluster, batch)
        there = len(live)
        left = stop_jobs(cluster, batch)
    else:
        there = len(cluster.jobs)
        echo(what_is_left(cluster))
        left = jobs_without_directory.end(cluster, batch_system(cluster.system))
    if left:
        echo(f"{name}: {what_stays(left, 'Run the same command again')}", err=True)
        return 1
    if unknown:
        it, them = ("it", "it") if len(unknown) == 1 else ("they", "them")
        which = f"The queue of this machine does not know {listed(unknown, ', ')}: hpcgpu counts {them} as ended"
        elsewhere = f"If {it} may be in the queue of another machine, cancel {them} there"
        echo(f"{name}: {counted(there, 'job')} cancelled. {which}. {elsewhere}")
        return 0
    echo(f"{name}: {counted(there, 'job')} cancelled, no job is left")
    return 0
