"""`hpcgpu list`: the clusters that are not closed, and those that have ended."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.printing import age, echo, json_option, show, show_json, warn_unanswered
from hpcgpu.display.counts_and_durations import MANY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcgpu.batch.base import JobStatus
    from hpcgpu.cli.json_types import ListedClusterJSON
    from hpcgpu.errors import NotTrusted
    from hpcgpu.existing_clusters.clean import Ended
    from hpcgpu.existing_clusters.lookup import Found


@click.command("list", cls=Forwarded)
@click.option("--all", "everything", is_flag=True, help="Also the clusters that have ended, and the size of each.")
@click.option("--jobs", "every", is_flag=True, help="Show each job, also of clusters with more than 20.")
@json_option
def list_clusters(everything: bool, every: bool, as_json: bool) -> None:
    """List the clusters that are not closed, and their jobs; with --all also those that have ended.

    Searches the cluster directories of the configuration (hpcgpu.cluster-directory). Marks a cluster as closed, and
    removes its credentials, when all its jobs have ended. Lists a cluster whose jobs the queue does not know until you
    stop it. Lists a damaged directory with what is wrong, and jobs of yours in the queue whose cluster directory was
    removed. Does not list scripts of `hpcgpu render` that were never launched. `hpcgpu clean` removes the directories
    of clusters that have ended.

    \b
    Example: hpcgpu list --json | jq '.[].name'
    """
    from hpcgpu.configuration.resolve import cluster_directories
    from hpcgpu.existing_clusters.clean import ended, size
    from hpcgpu.existing_clusters.close_ended import close_ended
    from hpcgpu.existing_clusters.jobs_without_directory import strays
    from hpcgpu.existing_clusters.lookup import find

    def refuse(path: Path, error: NotTrusted) -> None:
        echo(f"{path.name}: not shown: {error}", err=True)

    found = close_ended(find(cluster_directories(), refuse))
    found += strays(found, warn_unanswered)
    over = ended(cluster_directories(), lambda path, error: None) if everything else []
    sizes = {cluster.directory.path: size(cluster.directory.path) for cluster in found if everything}
    if as_json:
        rows = [_as_json(one, one.jobs, one.problem, ended=False, size=sizes.get(one.directory.path)) for one in found]
        show_json([*rows, *(_as_json(one, ended=True, size=one.size) for one in over)])
        return
    table = [_listed(one, sizes.get(one.directory.path), every) for one in found]
    table += [_listed_ended(one) for one in over]
    if table:
        show(("name", "system", "age", *(("size",) if everything else ()), "jobs", "directory"), table)
    else:
        click.echo("No clusters.")


def _listed(cluster: Found, size: int | None, every: bool) -> tuple[str, ...]:
    from dask.utils import format_bytes

    from hpcgpu.existing_clusters.between_schedulers import next_scheduler_job

    jobs = _listed_jobs(cluster, every) or ("none" if cluster.known else "unknown")
    what = "; ".join(filter(None, [jobs, next_scheduler_job(cluster.directory, cluster.jobs), cluster.problem]))
    path, shown = cluster.directory.path, (format_bytes(size),) if size is not None else ()
    return path.name, cluster.system or "unknown", age(time.time() - cluster.created), *shown, what, str(path)


def _listed_jobs(cluster: Found, every: bool) -> str:
    """Return the jobs of a cluster with their states; if there are many, the number of jobs in each state."""
    if every or len(cluster.jobs) <= MANY:
        return " ".join(f"{job.job_id} ({job.state.value})" for job in cluster.jobs)
    states = Counter(job.state.value for job in cluster.jobs)
    return ", ".join(f"{count} {state}" for state, count in states.most_common())


def _listed_ended(one: Ended) -> tuple[str, ...]:
    from dask.utils import format_bytes

    now, path = time.time(), one.directory.path
    since = f"ended {age(now - one.changed)} ago"
    return path.name, one.system or "unknown", age(now - one.created), format_bytes(one.size), since, str(path)


def _as_json(
    cluster: Found | Ended, jobs: Iterable[JobStatus] = (), problem: str = "", *, ended: bool, size: int | None
) -> ListedClusterJSON:
    return {
        "name": cluster.directory.path.name,
        "system": cluster.system,
        "created": cluster.created,
        "directory": str(cluster.directory.path),
        "jobs": [{"id": job.job_id, "name": job.name, "state": job.state.value, "reason": job.reason} for job in jobs],
        "problem": problem,
        "ended": ended,
        "size": size,
    }
