"""`hpcgpu logs`: prints the logs of a cluster's jobs, and follows them."""

from __future__ import annotations

import sys
import time

import click

from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.names import cluster_directory
from hpcgpu.posix.printable import printable
from hpcgpu.store.directory import ClusterDirectory


@click.command(cls=Forwarded)
@cluster_directory
@click.option("--job", help="Id or name of one job.")
@click.option("--follow", "-f", is_flag=True, help="Print new output until all jobs have ended.")
def logs(directory: ClusterDirectory, job: str | None, follow: bool) -> None:
    """Print the logs of a cluster's jobs, also of jobs that have ended.

    On a terminal, control characters are shown as text, such as \\x1b. In a file or a pipe the logs are unchanged.

    \b
    Examples: hpcgpu logs demo
              hpcgpu logs demo --job 4711 --follow
    """
    from hpcgpu.existing_clusters.logs import Reader

    reader = Reader(directory, job)
    ended = not follow
    while True:
        for heading, text in reader.new_output():
            shown = f"{heading}\n{text}" if heading else text
            shown = printable(shown, None, lines=True) if sys.stdout.isatty() else shown
            click.echo(shown, nl=not text.endswith("\n"), color=True)  # unchanged to a pipe
        if ended:
            return
        ended = reader.ended()  # then the output up to that time is read once more
        time.sleep(0.5)
