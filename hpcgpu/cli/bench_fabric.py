"""`hpcgpu bench-fabric`: how fast the workers' connections are."""

from __future__ import annotations

import shlex
from typing import cast

import click

from hpcgpu.cli.names import cluster_name
from hpcgpu.cli.printing import json_option, show_json, width
from hpcgpu.display.counts_and_durations import counted

#: Bytes of a message.
_SIZES = (2**20, 2**24, 2**28)


@click.command("bench-fabric")
@cluster_name
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="BYTES",
    help="Size of a message, such as 64MiB. May be repeated. Default: 1, 16, 256 MiB.",
)
@click.option("--host-only", is_flag=True, help="Measure buffers in host memory only.")
@json_option
def bench_fabric(name: str, sizes: tuple[str, ...], host_only: bool, as_json: bool) -> None:
    """Measure latency and bandwidth between workers of a running cluster: on one node and across nodes, host and GPU
    memory.

    Measures what Dask's own transfers achieve, and compares it with the line rate in sysfs. Measures two workers at a
    time. Nothing else should run on the cluster meanwhile.

    \b
    Example: hpcgpu bench-fabric demo --size 64MiB --size 1GiB
    """
    from dask.utils import parse_bytes
    from distributed import Client

    from hpcgpu import connect
    from hpcgpu.fabric import connection_report

    try:
        nbytes = [int(parse_bytes(size)) for size in sizes] or list(_SIZES)
    except ValueError as error:
        raise click.UsageError(f"--size: {error}") from error
    with cast(Client, connect(name, quiet=True, environment_check="off", set_as_default=False)) as client:
        workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        try:
            found = client.sync(connection_report.bench, client.scheduler, workers, nbytes, device=not host_only)
        except OSError as error:
            raise click.ClickException(str(error)) from error
    if not found:
        raise click.ClickException(
            f"cluster {name} has {counted(len(workers), 'worker')}, and a measurement needs two: wait for more, or run "
            f"hpcgpu scale {shlex.quote(name)} --jobs 2"
        )
    if as_json:
        show_json(found)
        return
    click.echo(connection_report.bench_table(found, width()))
