"""Commands on existing clusters."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.display.words import MANY, counted, listed
from hpcgpu.posix.printable import printable
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpcgpu.cli.output import ListedClusterJSON
    from hpcgpu.display.jobinfo import JobInfo
    from hpcgpu.errors import NotTrusted
    from hpcgpu.remote.clean import Ended
    from hpcgpu.remote.lookup import Found
    from hpcgpu.remote.snapshot import Snapshot

__all__ = [
    "adapt",
    "age",
    "cluster_name",
    "json_option",
    "list_clusters",
    "say",
    "scale",
    "show",
    "show_fitted",
    "show_jobs",
    "show_json",
    "status",
    "stop",
    "width",
]

#: Width of a table that is not for a terminal: one line per row.
_WIDE = 1000
_DAY = 86400.0


class _ClusterName(click.ParamType[str]):
    """The name of a cluster, or the path of its directory; completed in the shell."""

    name = "cluster"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from hpcgpu.configuration.resolve import cluster_directories
        from hpcgpu.remote.lookup import directories

        names = {one.path.name for root in cluster_directories() for one in directories(root)}
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete) and "~" not in name]


cluster_name = click.argument("name", type=_ClusterName())
all_option = click.option("--all", "every", is_flag=True, help="Show each job, also of clusters with more than 20.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def say(text: str, *, err: bool = False) -> None:
    """Print lines for people; control characters in them are shown as text."""
    click.echo(printable(text, None, lines=True), err=err)


def show(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table for people: in the width of the terminal; elsewhere one line per row."""
    from hpcgpu.display.text import columns

    click.echo(columns(head, rows, width()))


def show_fitted(text: Callable[[int], str]) -> None:
    """Print what fits itself into a width: that of the terminal; elsewhere one line per row."""
    say(text(width()))


def show_json(value: object) -> None:
    """Print JSON, as `hpcgpu.cli.output` describes it."""
    click.echo(json.dumps(value, indent=1, default=str))


def show_jobs(jobs: list[JobInfo], *, every: bool = False, how: str, now: float | None = None) -> None:
    """Print a table of jobs in the same way; if `every` is false, of many jobs a summary that says `how` to see all."""
    from hpcgpu.display.table import JobTable

    click.echo(JobTable(jobs, now=now).text(width(), every=every, how=f"`{how}` shows all"))


def width() -> int:
    """Return the width of what is printed: that of the terminal; elsewhere a row is one line."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else _WIDE


def age(seconds: float) -> str:
    """Return how old something is: in days, if that is more than two."""
    from hpcgpu.display.progress import duration

    return f"{seconds / _DAY:.0f} days" if seconds > 2 * _DAY else duration(seconds)


def _listed_jobs(cluster: Found, every: bool) -> str:
    """Return the jobs of a cluster with their states, or of many how many are in each."""
    if every or len(cluster.jobs) <= MANY:
        return " ".join(f"{job.job_id} ({job.state.value})" for job in cluster.jobs)
    states = Counter(job.state.value for job in cluster.jobs)
    return ", ".join(f"{count} {state}" for state, count in states.most_common())


@click.command("list")
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
    from hpcgpu.remote.clean import ended, size
    from hpcgpu.remote.lookup import close_ended, find
    from hpcgpu.remote.strays import strays

    def refuse(path: Path, error: NotTrusted) -> None:
        say(f"{path.name}: not shown: {error}", err=True)

    found = close_ended(find(cluster_directories(), refuse))
    found += strays(found, _say_silent)
    over = ended(cluster_directories(), lambda path, error: None) if everything else []
    sizes = {cluster.directory.path: size(cluster.directory.path) for cluster in found if everything}
    if as_json:
        show_json([*(_as_json(one, sizes.get(one.directory.path)) for one in found), *map(_ended_as_json, over)])
        return
    table = [_listed(one, sizes.get(one.directory.path), every) for one in found]
    table += [_listed_ended(one) for one in over]
    if table:
        show(("name", "system", "age", *(("size",) if everything else ()), "jobs", "directory"), table)
    else:
        click.echo("No clusters.")


def _say_silent(problem: str) -> None:
    say(f"hpcgpu: {problem}", err=True)


def _listed(cluster: Found, size: int | None, every: bool) -> tuple[str, ...]:
    from dask.utils import format_bytes

    jobs = _listed_jobs(cluster, every) or ("none" if cluster.known else "unknown")
    what = f"{jobs}; {cluster.problem}" if cluster.problem else jobs
    path, shown = cluster.directory.path, (format_bytes(size),) if size is not None else ()
    return path.name, cluster.system or "unknown", age(time.time() - cluster.created), *shown, what, str(path)


def _listed_ended(one: Ended) -> tuple[str, ...]:
    from dask.utils import format_bytes

    now, path = time.time(), one.directory.path
    since = f"ended {age(now - one.changed)} ago"
    return path.name, one.system or "unknown", age(now - one.created), format_bytes(one.size), since, str(path)


def _as_json(cluster: Found, size: int | None) -> ListedClusterJSON:
    return {
        "name": cluster.directory.path.name,
        "system": cluster.system,
        "created": cluster.created,
        "directory": str(cluster.directory.path),
        "jobs": [
            {"id": job.job_id, "name": job.name, "state": job.state.value, "reason": job.reason} for job in cluster.jobs
        ],
        "problem": cluster.problem,
        "ended": False,
        "size": size,
    }


def _ended_as_json(one: Ended) -> ListedClusterJSON:
    return {
        "name": one.directory.path.name,
        "system": one.system,
        "created": one.created,
        "directory": str(one.directory.path),
        "jobs": [],
        "problem": "",
        "ended": True,
        "size": one.size,
    }


@click.command()
@cluster_name
@all_option
@json_option
def status(name: str, every: bool, as_json: bool) -> None:
    """Show a cluster: its jobs with state and reason, its workers and GPUs, its dashboard, the program that scales
    it, how long it lasts, and its GPU hours.

    \b
    Examples: hpcgpu status demo
              hpcgpu status demo --json | jq -r .dashboard
    """
    from hpcgpu.remote.snapshot import snapshot

    found = snapshot(name)
    if as_json:
        show_json(found.as_json())
    else:
        _print(found, every, shlex.quote(name))


def _print(found: Snapshot, every: bool, asked: str) -> None:
    """Print a cluster; commands name it as the user did, by its name or its path."""
    from hpcgpu.display.progress import duration

    kept = ", continues without the program that started it" if found.detached else ""
    if found.state == "not launched":
        launch = Path(found.directory) / "launch.sh"
        say(f"cluster    {found.name} on {found.system}: not launched yet. To launch it, run: {launch} JOBS")
        return
    absent = "does not answer" if found.state == "unreachable" else "not running"
    lines = [
        f"cluster    {found.name} on {found.system}: {found.state}{kept}",
        f"workers    {found.workers}, on {counted(found.gpus, 'GPU')}",
        f"scheduler  {found.scheduler or absent}",
        f"dashboard  {found.dashboard or absent}"
        + f" (link with its token: hpcgpu dashboard {asked})" * bool(found.dashboard),
    ]
    lines += [f"fabric     {found.fabric}"] * bool(found.fabric)
    lines += [f"manager    {found.manager or 'none: the number of jobs does not change'}"] * (found.state == "running")
    if found.time_left is not None:
        lines += [f"time left  {duration(found.time_left)}, until the walltime of the scheduler job ends"]
    lines += [f"GPU hours  {found.gpu_hours:.2f}, the scheduler job included"] * bool(found.gpu_hours)
    lines += [f"directory  {found.directory}"]
    lines += [f"warning    {text}" for text in found.warnings]
    lines += [f"problem    {found.problem}"] * bool(found.problem)
    say("\n".join(lines) + "\n")
    # jobs that ended as they should are of interest to few
    jobs = [job for job in found.jobs if every or job.state not in ("completed", "cancelled")]
    if jobs:
        show_jobs(jobs, every=every, how=f"hpcgpu status {asked} --all", now=found.time)
    else:
        click.echo(
            "The state of its jobs is not known."
            if found.problem and found.state != "closed"
            else "The cluster has no jobs."
        )


@click.command()
@cluster_name
@click.option("--jobs", type=click.IntRange(min=0), required=True, help="Number of worker jobs.")
@click.option("--worker-group", default="default", show_default=True, help="Group of workers.")
@json_option
def scale(name: str, jobs: int, worker_group: str, as_json: bool) -> None:
    """Set the number of worker jobs of a cluster. Ends adaptive scaling. A program that manages the cluster does it and
    keeps the cluster.

    Waits until new jobs are submitted, and until surplus jobs have finished their tasks and moved their data.

    \b
    Example: hpcgpu scale demo --jobs 4
    """
    from hpcgpu.cluster.requests import scale_and_wait
    from hpcgpu.remote.lookup import locate

    directory = locate(name)
    table = scale_and_wait(directory, jobs=jobs, worker_group=worker_group)
    if as_json:
        show_json([job.as_json() for job in table])
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
    help="Budget of GPU hours. When it is used up, the jobs of the group end: running tasks get 20 s, data is lost.",
)
@click.option("--worker-group", default="default", show_default=True, help="Group of workers.")
def adapt(name: str, worker_group: str, **limits: Any) -> None:
    """Scale a cluster by its work, between two limits. A program that manages the cluster does it and keeps the
    cluster; without one, the scheduler job does it.

    Then no program of yours needs to run. The site must let compute nodes submit jobs. `hpcgpu status`, and
    logs/manager.log in the cluster's directory, show what happens.

    \b
    Example: hpcgpu adapt demo --minimum-jobs 1 --maximum-jobs 8
    """
    from hpcgpu.cluster.requests import adapt as request
    from hpcgpu.remote.lookup import locate

    given = {key: value for key, value in limits.items() if value is not None}
    say(request(locate(name), worker_group=worker_group, **given))


@click.command()
@click.argument("names", nargs=-1, type=_ClusterName())
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
    from hpcgpu.remote.lookup import find
    from hpcgpu.remote.strays import strays

    if bool(names) == everything:
        raise click.UsageError("give the names of the clusters to stop, or --all")
    status = 0

    def refuse(path: Path, error: NotTrusted) -> None:
        nonlocal status
        status = 1
        say(
            f"{path.name}: not stopped: {error}. Correct this, then run: hpcgpu stop {ClusterDirectory(path).in_shell}",
            err=True,
        )

    if everything:
        found = find(cluster_directories(), refuse)
        chosen: list[ClusterDirectory | Found] = [*(one.directory for one in found), *strays(found, _say_silent)]
    else:
        chosen = [one for name in names for one in _to_stop(name)]
    for one in chosen:
        try:
            status = max(status, _stop(one))
        except (BatchError, Damaged, OSError) as error:  # the others must nevertheless be stopped
            say(f"{_directory_of(one).path.name}: {error}", err=True)
            status = 1
    if everything and not chosen and not status:
        click.echo("No clusters.")
    sys.exit(status)


def _directory_of(cluster: ClusterDirectory | Found) -> ClusterDirectory:
    return cluster if isinstance(cluster, ClusterDirectory) else cluster.directory


def _to_stop(name: str) -> list[ClusterDirectory | Found]:
    """Return the cluster of that name, or those that have jobs and no directory any more."""
    from hpcgpu.configuration.resolve import cluster_directories
    from hpcgpu.errors import NoCluster
    from hpcgpu.remote.lookup import find, locate
    from hpcgpu.remote.strays import strays

    try:
        return [locate(name, any_format=True)]
    except NoCluster:
        wanted = Path(name).expanduser().absolute() if "/" in name else None
        found = [
            one
            for one in strays(find(cluster_directories(), lambda path, error: None), _say_silent)
            if name == one.directory.path.name or wanted == one.directory.path
        ]
        if not found:
            raise
        return [*found]


def _stop(cluster: ClusterDirectory | Found) -> int:
    """Stop one cluster, and say so; return the exit status."""
    from hpcgpu.batch import batch_system
    from hpcgpu.remote import lookup, strays

    name = _directory_of(cluster).path.name
    if isinstance(cluster, ClusterDirectory):
        batch = lookup.batch_of(cluster)
        there = len(lookup.live_jobs(cluster, batch))
        left = lookup.stop(cluster, batch)
    else:
        there = len(cluster.jobs)
        say(f"{name}: its directory {cluster.directory.path} is gone, but its jobs are in the queue: {_names(cluster)}")
        left = strays.end(cluster, batch_system(cluster.system))
    if left:
        say(
            f"{name}: still in the queue: {listed(job.job_id for job in left)}. Run the same command again. If "
            "they stay, cancel them with the batch system's own command",
            err=True,
        )
        return 1
    say(f"{name}: {counted(there, 'job')} cancelled, no job is left")
    return 0


def _names(cluster: Found) -> str:
    return listed([f"{job.job_id} ({job.name})" for job in cluster.jobs], ", ")
