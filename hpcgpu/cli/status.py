"""`hpcgpu status`: one cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.host_option import chosen_host, host_option, snapshot_by_ssh
from hpcgpu.cli.names import cluster_name
from hpcgpu.cli.printing import all_option, echo, json_option, show_jobs, show_json
from hpcgpu.cli.stop import clusters_without_directory, what_is_left
from hpcgpu.display.counts_and_durations import counted

if TYPE_CHECKING:
    from hpcgpu.existing_clusters.snapshot import Snapshot


@click.command()
@cluster_name
@host_option(exposed=True)
@all_option
@json_option
def status(name: str, host: str | None, every: bool, as_json: bool) -> None:
    """Show a cluster: its jobs with state and reason, its workers and GPUs, its dashboard, the program that scales
    it, how long it lasts, and its GPU hours.

    \b
    Examples: hpcgpu status demo
              hpcgpu status demo --json | jq -r .dashboard
    """
    from hpcgpu.errors import NoCluster
    from hpcgpu.existing_clusters.snapshot import snapshot
    from hpcgpu.ssh.login import Login

    host = chosen_host(host, click.get_current_context())
    try:
        found = snapshot(name) if host is None else snapshot_by_ssh(Login(host), name)
    except NoCluster:
        if host is None and (gone := clusters_without_directory(name)):
            message = "\n".join(
                f"{what_is_left(one)}. To end them, run: hpcgpu stop {one.directory.in_shell}" for one in gone
            )
            raise NoCluster(message) from None
        raise
    if as_json:
        show_json(found)
    else:
        _print(found, every, shlex.quote(name) + (f" --host {shlex.quote(host)}" if host is not None else ""))


def _print(found: Snapshot, every: bool, name: str) -> None:
    """Print a cluster; the printed commands use the user's own form, its name or its path."""
    from hpcgpu.display.counts_and_durations import duration

    over = found.state in ("ended", "closed")
    kept = ", continues without the program that started it" if found.detached and not over else ""
    if found.state == "not launched":
        launch = Path(found.directory) / "launch.sh"
        echo(f"cluster    {found.name} on {found.system}: not launched yet. To launch it, run: {launch} JOBS")
        return
    absent = "does not answer" if found.state == "unreachable" else "not running"
    lines = [
        f"cluster    {found.name} on {found.system}: {found.state}{kept}",
        f"workers    {found.workers}, on {counted(found.gpus, 'GPU')}",
        f"scheduler  {found.scheduler or absent}",
        f"dashboard  {found.dashboard or absent}"
        + f" (link with its token: hpcgpu dashboard {name})" * bool(found.dashboard),
    ]
    lines += [f"{'restart' if not number else '':<10} {text}" for number, text in enumerate(found.restart)]
    lines += [f"ended      {found.end}"] * bool(found.end)
    lines += [f"fabric     {found.fabric}"] * bool(found.fabric)
    lines += [f"manager    {found.manager or 'none: the number of jobs does not change'}"] * (found.state == "running")
    if found.time_left is not None:
        lines += [f"time left  {duration(found.time_left)}, until the walltime of the scheduler job ends"]
    lines += [f"GPU hours  {found.gpu_hours:.2f}, the scheduler job included"] * bool(found.gpu_hours)
    lines += [f"directory  {found.directory}"]
    lines += [f"warning    {text}" for text in found.warnings]
    lines += [f"problem    {found.problem}"] * bool(found.problem)
    echo("\n".join(lines) + "\n")
    # few users need the jobs that ended normally
    jobs = [job for job in found.jobs if every or job.state not in ("completed", "cancelled")]
    if jobs:
        show_jobs(jobs, every=every, how=f"hpcgpu status {name} --all", now=found.time)
    else:
        click.echo(
            "The state of its jobs is not known."
            if found.problem and found.state != "closed"
            else "The cluster has no jobs."
        )
