"""`hpcgpu jupyter-config`: clusters of hpcgpu in dask-labextension."""

from __future__ import annotations

from typing import Any

import click

from hpcgpu.cli.options import ClusterCommand, cluster_options, system_option
from hpcgpu.cli.start_and_run import chosen_system


@click.command("jupyter-config", cls=ClusterCommand)
@system_option
@cluster_options
def jupyter_config(system: str, arguments: dict[str, Any]) -> None:
    """Let the button "New" of dask-labextension start clusters with these options.

    Writes a file into the directory of Dask's configuration. Restart the Jupyter server afterwards. The code that
    dask-labextension writes into a notebook can connect, because Dask finds a cluster's credentials by its address.

    \b
    Example: hpcgpu jupyter-config --jobs 2 --gpus-per-node 4 --walltime 2h
    """
    from hpcgpu.jupyter.labextension import configuration, write

    path = write(configuration(chosen_system(system, arguments.get("profile")), arguments))
    click.echo(f"{path} is written. Restart the Jupyter server")
