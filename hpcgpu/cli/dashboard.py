"""`hpcgpu dashboard`: the link to a dashboard, and ways to it for a browser on another computer."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.names import cluster_directory
from hpcgpu.cli.printing import echo
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from hpcgpu.client.dashboard_forwarding import DashboardEndpoint


@click.command(cls=Forwarded)
@cluster_directory
@click.option("--forward", is_flag=True, help="Forward a port of this machine to the dashboard, until Ctrl-C.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="With --forward: the port. Default: the dashboard's, or any."
)
def dashboard(directory: ClusterDirectory, forward: bool, port: int | None) -> None:
    """Print the link to a cluster's dashboard, with its token.

    Anyone with the link can read the dashboard until the cluster ends. The link is printed only after the dashboard
    has proved that it belongs to the cluster.

    Also prints an ssh command that forwards a port of your own computer to it, and the link to use after that. With
    --forward, this command itself forwards a port of 127.0.0.1 on this machine, for a browser or an editor that can
    connect to it. Other users of this machine can connect to that port too, but the dashboard asks them for the token.

    \b
    Examples: hpcgpu dashboard demo
              hpcgpu dashboard demo --forward --port 8787
    """
    import asyncio

    from hpcgpu.client.dashboard_forwarding import listening, ssh_command
    from hpcgpu.runtime.dashboard_access import link_with_token

    if port is not None and not forward:
        raise click.UsageError("--port needs --forward")
    contact = directory.contact()
    there = asyncio.run(listening(directory, contact))
    if forward:
        _forward(directory, port, there)
        return
    click.echo(link_with_token(directory, contact))
    echo(
        "If your browser does not reach that address, run this on your own computer:\n"
        f"  {ssh_command(there)}\n"
        f"and open:\n  {there.link(there.port)}",
        err=True,
    )


def _forward(directory: ClusterDirectory, port: int | None, there: DashboardEndpoint) -> None:
    import asyncio

    from hpcgpu.client.dashboard_forwarding import forward

    def ready(local: int) -> None:
        click.echo(there.link(local))
        click.echo(f"Forwards 127.0.0.1:{local} to {there.host}:{there.port}, until Ctrl-C.", err=True)

    def serve(local: int) -> None:
        asyncio.run(forward(directory, local, ready=ready, refused=lambda why: echo(why, err=True)))

    with contextlib.suppress(KeyboardInterrupt):
        try:
            serve(there.port if port is None else port)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            serve(0)
