"""The `hpcgpu` command."""

from __future__ import annotations

import sys

import click

from hpcgpu import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpcgpu")
def main() -> None:
    """GPU Dask clusters through the batch queue of an HPC system."""


@main.command()
@click.option(
    "--system",
    type=click.Choice(["auto", "slurm", "local"]),
    default="auto",
    show_default=True,
    help="Batch system; auto takes Slurm if `sinfo` answers, else the queue embedded in hpcgpu.",
)
def demo(system: str) -> None:
    """Start a cluster, analyse the flights of New York in 2013 on it, close it.

    Submits a scheduler job and two worker jobs, with GPUs if there are any. Queue, account and the like are taken from dask's
    configuration (hpcgpu.slurm.queue, or DASK_HPCGPU__SLURM__QUEUE in the environment).

    \b
    Exit status: 0 if the result is right and no job is left, 1 if not.
    """
    from hpcgpu.demo import run

    sys.exit(run(system))
