"""`hpcgpu install`: installs this hpcgpu on a login node."""

from __future__ import annotations

import click

from hpcgpu.cli.printing import echo


@click.command()
@click.option("--host", required=True, metavar="HOST", help="The login node: what `ssh` understands.")
@click.option(
    "--python",
    default="",
    metavar="PATH",
    help="An interpreter there, in whose environment it is installed: the one that the jobs use. Default: a private "
    "environment, with what pip brings.",
)
def install(host: str, python: str) -> None:
    """Install the hpcgpu of this machine on a login node, by ssh, so that the two can work together.

    The jobs use the same Python, unless the option `python` of a cluster names another one. So with --python choose one
    that has the software of your tasks, and the versions of Dask and Python that this machine has.

    \b
    Example: hpcgpu install --host login1 --python /home/ada/miniforge3/envs/rapids/bin/python
    """
    from hpcgpu.software.own_wheel import wheel
    from hpcgpu.ssh.install import install as install_there
    from hpcgpu.ssh.login import Login

    login = Login(host, python)
    echo(f"{host}: {install_there(login, *wheel())}")
