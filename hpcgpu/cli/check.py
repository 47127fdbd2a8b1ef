"""`hpcgpu check`: users send its output to support."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.interrupts import interruptible
from hpcgpu.cli.options import ClusterCommand, cluster_options, system_option
from hpcgpu.cli.printing import json_option, show_json, width
from hpcgpu.cli.start_and_run import chosen_system

if TYPE_CHECKING:
    from hpcgpu.cli.json_types import CheckJSON


@click.command(cls=ClusterCommand)
@system_option
@click.option("--in-job", is_flag=True, help="Also submit one short job of each kind, and run checks in it.")
@click.option("--timeout", help="With --in-job: how long to wait for the jobs, such as '10m'. Default: no limit.")
@json_option
@cluster_options
def check(system: str, in_job: bool, timeout: str | None, as_json: bool, arguments: dict[str, Any]) -> None:
    """Check what hpcgpu needs: the queue, the filesystem, the network, the GPUs, the software. Accepts the options of a
    cluster.

    Each line is ok, a warning or a failure; warnings and failures say what to do. Ctrl-C, SIGTERM or a closed terminal
    cancels its jobs.

    \b
    Examples: hpcgpu check
              hpcgpu check --in-job --gpus-per-node 4 --queue gpu --account proj
              hpcgpu check --in-job --json > report.json
    Exit status: 0 if nothing failed, 1 if something did.
    """
    from hpcgpu.batch import batch_system
    from hpcgpu.checks import result_lines as report
    from hpcgpu.checks.check_jobs import check_jobs
    from hpcgpu.checks.login_node import login_lines
    from hpcgpu.configuration.resolve import resolve
    from hpcgpu.options import values
    from hpcgpu.software.compare_environments import collect, overview

    limit = None if timeout is None else values.duration("--timeout", timeout)
    options = resolve(chosen_system(system, arguments.get("profile")), arguments)
    batch = batch_system(options.system)
    lines = list(login_lines(options, batch))
    kept = None
    environments: Mapping[str, Mapping[str, str]] = {"login": collect()}
    broken = [line.what for line in lines if line.what in ("queue", "cluster directory") and line.grade == "failure"]
    if in_job and broken:
        lines.append(
            report.Line("login", "jobs", "failure", "no job was submitted", f"correct this first: {', '.join(broken)}")
        )
    elif in_job:
        try:
            with interruptible():
                result = check_jobs(options, batch, quiet=options.cluster.quiet, timeout=limit)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # the terminal may be gone
                click.echo(
                    "hpcgpu: the check was interrupted and its jobs were cancelled. `hpcgpu list` shows jobs that "
                    "are left",
                    err=True,
                )
            sys.exit(130)
        lines += result.lines
        kept, environments = result.kept, result.environments
    failed = any(line.grade == "failure" for line in lines)
    if as_json:
        checked: CheckJSON = {"ok": not failed, "lines": lines, "environments": environments, "kept": kept}
        show_json(checked)
        sys.exit(int(failed))
    click.echo(report.text(lines, width()))
    click.echo(f"\n{overview(environments)}\n")
    if kept is not None:
        click.echo(f"Scripts and logs of the jobs: {kept}")
    if not in_job:
        click.echo("`hpcgpu check --in-job` also runs checks in a job of each kind.")
    sys.exit(int(failed))
