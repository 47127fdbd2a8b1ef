"""The command that shows what a cluster cost."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.names import cluster_directory
from hpcgpu.cli.printing import all_option, echo, json_option, show_json, width
from hpcgpu.store.directory import ClusterDirectory


@click.command(cls=Forwarded)
@cluster_directory
@all_option
@json_option
@click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write the report to this file, as a page."
)
def report(directory: ClusterDirectory, every: bool, as_json: bool, page: Path | None) -> None:
    """Show what a cluster cost, what its jobs did, and what would have cost less. Works also after it has ended.

    For each job: how long it waited and ran; its GPU hours with tasks, before the first task, and idle after it; mean
    and peak GPU use and memory; tasks done and lost; bytes sent and spilled; how it ended. `-` means not known.

    \b
    Examples: hpcgpu report demo
              hpcgpu report demo --html demo.html
              hpcgpu report demo --json | jq .gpu_hours
    """
    from hpcgpu.report.cluster_report import report as report_of

    found = report_of(directory)
    if page is not None:
        page.write_text(found.page(), encoding="utf-8")
        echo(f"written to {page}", err=True)
    if as_json:
        show_json(found.as_json())
    elif page is None:
        how = f"\n`hpcgpu report {directory.in_shell} --all` shows each job." if not every and found.shortened else ""
        echo(found.text(width(), every=every) + how)
