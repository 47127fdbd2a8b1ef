"""The `hpcgpu` command. Also reached as ``dask hpcgpu``.

Every command imports what it needs when it runs: ``--help`` and completion stay fast.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from typing import Any

import click

from hpcgpu import __version__
from hpcgpu.cli.answer_by_ssh import answers, contact, order, wait_for_workers
from hpcgpu.cli.bench_fabric import bench_fabric
from hpcgpu.cli.check import check
from hpcgpu.cli.clean import clean
from hpcgpu.cli.config_and_completion import completion, config
from hpcgpu.cli.dashboard import dashboard
from hpcgpu.cli.far_side import far_side, relay
from hpcgpu.cli.install import install
from hpcgpu.cli.jupyter_config import jupyter_config
from hpcgpu.cli.list_clusters import list_clusters
from hpcgpu.cli.logs import logs
from hpcgpu.cli.options import system_option
from hpcgpu.cli.plan import plan
from hpcgpu.cli.profiles import profiles
from hpcgpu.cli.render import render
from hpcgpu.cli.report import report
from hpcgpu.cli.scale_and_adapt import adapt, detach, manage, resume, scale
from hpcgpu.cli.start_and_run import run, start
from hpcgpu.cli.status import status
from hpcgpu.cli.stop import stop
from hpcgpu.cli.top import top
from hpcgpu.posix.full_disk import file_error
from hpcgpu.posix.printable import printable


class _Impossible(click.ClickException):
    """The command or an option is not valid."""

    exit_code = 2


def _words(error: Exception) -> str:
    """Return the message of an error, and below it its notes, as a traceback shows them."""
    return printable("\n".join([str(error), *getattr(error, "__notes__", ())]), None, lines=True)


def _drop_what_cannot_be_written() -> None:
    """Python would try again at its end, and then exit with 120 (seen with Python 3.14)."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Group(click.Group):
    """Turns the errors of the package into sentences and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        from hpcgpu.errors import ClusterExists, HpcgpuError, NoCluster, NotTrusted, OptionError

        try:
            return super().invoke(ctx)
        except (OptionError, NoCluster, NotTrusted, ClusterExists) as error:
            raise _Impossible(_words(error)) from error
        except (HpcgpuError, TimeoutError) as error:
            raise click.ClickException(_words(error)) from error
        except OSError as error:  # a directory that cannot be made, a file that cannot be read
            if error.errno == errno.EPIPE:  # `| head`: click ends quietly
                raise
            _drop_what_cannot_be_written()
            raise click.ClickException(file_error(error)) from error


@click.group("hpcgpu", cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hpcgpu")
def main() -> None:
    """GPU Dask clusters on the batch queue of an HPC system.

    \b
    hpcgpu start demo --jobs 2 --gpus-per-node 4 --walltime 2h    # a cluster that continues
    hpcgpu status demo
    python -c 'import hpcgpu; client = hpcgpu.connect("demo"); ...'
    hpcgpu stop demo

    Exit status of all commands: 0 on success, 1 if the cluster or the queue failed, 2 if the command or an option is
    not valid.
    """
    atexit.register(gc.freeze)  # else Python visits each object of Dask once more before it ends


@main.command()
@system_option
def demo(system: str) -> None:
    """Start a cluster, analyse the flights of New York in 2013 on it, close it.

    Submits a scheduler job and two worker jobs, with GPUs if there are any. Queue, account and the like are taken from
    dask's configuration (hpcgpu.slurm.queue, or DASK_HPCGPU__SLURM__QUEUE in the environment).

    \b
    Exit status: 0 if the result is right and no job is left, 1 if not.
    """
    from hpcgpu.cli.demo import run

    sys.exit(run(system))


for _command in (
    start,
    plan,
    run,
    render,
    check,
    bench_fabric,
    list_clusters,
    status,
    top,
    dashboard,
    scale,
    adapt,
    resume,
    detach,
    manage,
    logs,
    report,
    stop,
    clean,
    config,
    install,
    jupyter_config,
    profiles,
    completion,
    contact,
    far_side,
    answers,
    order,
    relay,
    wait_for_workers,
):
    main.add_command(_command)
