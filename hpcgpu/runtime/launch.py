"""First step of every job, ``python -m hpcgpu.runtime.launch``.

It checks the resources of the job, then becomes the stock Dask command.

If that command could not succeed, this step fails at once and prints why. The command runs in the same process, so that
signals from the batch system reach Dask directly. A worker imports Dask while it waits for the scheduler: on a busy
shared filesystem the import takes longer than all other steps.

`prepare` contains all steps of a job, in order. Each step is a function of its own, here or in the module of its
subject, such as `gpus_of_job`, `scratch`, `scheduler_connection`, `complete_dask_commands`, `run_dask`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.batch.cuda_visible_devices import VARIABLE
from hpcgpu.errors import Damaged, HpcgpuError, LaunchError, NotTrusted, OtherFormat
from hpcgpu.fabric.node_gpus import gpus_on_node, whole_uuids
from hpcgpu.posix import standard_streams, variables_of_this_process
from hpcgpu.posix.long_imports import long_imports
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime import dask_signals, forkserver, next_scheduler, preemption, stage, standby_scheduler
from hpcgpu.runtime.complete_dask_commands import scheduler_command, worker_command, worker_program
from hpcgpu.runtime.credentials_of_job import exit_code, remove_secrets
from hpcgpu.runtime.end_without_directory import watch_directory
from hpcgpu.runtime.gpus_of_job import visible_gpus
from hpcgpu.runtime.import_from_working_directory import import_from_working_directory
from hpcgpu.runtime.job_identity import remember
from hpcgpu.runtime.run_dask import run_dask
from hpcgpu.runtime.scheduler_connection import check_alone
from hpcgpu.runtime.scratch import temporary_place
from hpcgpu.store import certificates_and_keys, removed_directory
from hpcgpu.store.directory import ClusterDirectory

#: Dask's program of the scheduler.
_SCHEDULER = "distributed.cli.dask_scheduler"


def main(argv: Sequence[str]) -> None:
    """Check the job, complete the Dask command, and run it in this process."""
    standard_streams.drop_what_cannot_be_written()
    faulthandler.enable()  # else a crash in a library leaves no line in the log of the job
    stage.release_at_exit()
    arguments, environment = _parse(argv), dict(os.environ)
    variables_of_this_process.remember(environment)
    at_end = contextlib.ExitStack()
    try:
        command, place = prepare(arguments, at_end)
    except (LaunchError, NotTrusted, Damaged, OtherFormat) as error:
        write_stderr(error)
        if arguments.kind == "scheduler" and arguments.restarts:
            _record_failure(arguments)
        sys.exit(1)
    write_stderr(f"on {socket.gethostname()}, {VARIABLE}={os.environ.get(VARIABLE, 'unset')}: {shlex.join(command)}")
    try:
        run_dask(command, place, at_end, functools.partial(_afterwards, arguments, environment, command))
    except Exception:  # Dask does not name a missing file
        if not removed_directory.missing(arguments.directory):
            raise
        traceback.print_exc()
        write_stderr(f"the cluster directory {arguments.directory} is missing: was it removed? This job ends")
        sys.exit(1)


def _record_failure(arguments: argparse.Namespace) -> None:
    with contextlib.suppress(HpcgpuError):
        own = own_job(batch_system(arguments.system))
        standby_scheduler.record_failure(ClusterDirectory.existing(arguments.directory), own)


def prepare(arguments: argparse.Namespace, at_end: contextlib.ExitStack) -> tuple[list[str], Path]:
    """Return the full command of the job, and the directory for its temporary files.

    `at_end` collects what the job must do at its end.

    Raises
    ------
    LaunchError
        The job cannot become a scheduler or a worker.
    NotTrusted, OtherFormat, Damaged
        Its cluster directory cannot be used.
    """
    directory = open_directory(arguments.directory)
    batch = batch_system(arguments.system)
    own = own_job(batch)
    remember(own, arguments.walltime, arguments.walltime_margin)
    choose_gpus(arguments)
    configure(directory)
    forks = arguments.kind == "worker" and forkserver.prepare(arguments)
    place = temporary_place(arguments)
    import_from_working_directory()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # until Dask has its own handler
    if arguments.kind == "worker":
        try:
            dask_signals.replace()
            dask_signals.add(next_scheduler.notice_signals)
            with long_imports():  # also those of the fork server
                importlib.import_module(worker_program(arguments))
                importlib.import_module("hpcgpu.dask_worker.start_again").replace_kill()
                preemption.expect(warned=own.warned and dask_signals.obeyed(gpus=bool(arguments.gpus)))
                fork_server = forkserver.begin(gpus=bool(arguments.gpus), at_end=at_end) if forks else None
            watch_directory(directory)  # a thread: after the fork
            command = worker_command(arguments, directory, batch, own)
            command = forkserver.finish(fork_server, command, gpus=bool(arguments.gpus))
        except BaseException:
            at_end.close()
            raise
        return command, place
    watch_directory(directory)
    if arguments.restarts:
        timeout = next_scheduler.restart_wait(arguments, directory, own)
        standby_scheduler.wait_until_alone(directory, batch, own, timeout or 0.0)
    else:
        check_alone(directory, own.job_id)
    at_end.callback(remove_secrets, directory, directory.token(), own.job_id, restarts=arguments.restarts)
    command = scheduler_command(arguments, directory, own)
    require_dashboard_token()
    return command, place


def _afterwards(arguments: argparse.Namespace, environment: Mapping[str, str], command: Sequence[str]) -> int:
    """Return the exit code of a job whose Dask has ended, unless this worker job goes on with another scheduler."""
    if arguments.kind == "worker":
        next_scheduler.begin_anew(arguments, environment, command[-1])
    return exit_code() if arguments.restarts else 0


def open_directory(path: Path) -> ClusterDirectory:
    """Return the cluster directory if the cluster lives and its credentials are valid."""
    if not (path / "cluster.json").exists():
        raise LaunchError(
            f"{path} is not a cluster directory, or this node does not see it: it must be on a filesystem that "
            "login and compute nodes share (option cluster_directory)"
        )
    directory = ClusterDirectory.existing(path)
    if directory.closing or (directory.encrypted and not directory.tls.is_dir()):
        raise LaunchError(f"the cluster in {directory.path} is closed: this job ends")
    if problem := certificates_and_keys.problem(directory, now=time.time()):
        raise LaunchError(problem)
    return directory


def own_job(batch: BatchSystem) -> OwnJob:
    """Return the job that this process is in."""
    own = batch.own_job(os.environ)
    if own is None:
        raise LaunchError(f"this is not a job of the batch system {batch.name!r}: submit the script, do not run it")
    return own


def choose_gpus(arguments: argparse.Namespace) -> None:
    """Let this process see the GPUs that the job requested, and no others."""
    on_node = None if VARIABLE in os.environ or not arguments.gpus else gpus_on_node()
    visible = visible_gpus(arguments.gpus, os.environ, on_node, whole_nodes=arguments.whole_nodes, kind=arguments.kind)
    if visible is not None:
        os.environ[VARIABLE] = whole_uuids(visible)


def configure(directory: ClusterDirectory) -> None:
    """Set the environment from which Dask and our preloads read about the cluster."""
    os.environ["HPCGPU_CLUSTER_DIRECTORY"] = str(directory.path)
    os.environ.update(certificates_and_keys.environment(directory))


def require_dashboard_token() -> None:
    """Let the dashboard of this scheduler require its token."""
    with long_imports():
        importlib.import_module(_SCHEDULER)
        from hpcgpu.runtime import dashboard_access

    del sys.modules[_SCHEDULER]  # it is run as a program, and Python warns of a program that was imported
    dashboard_access.require_token_in_this_process()


def job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all first steps of a job share."""
    parser.add_argument("kind", choices=["scheduler", "worker"])
    parser.add_argument("system", help="batch system")
    parser.add_argument("directory", type=Path, help="cluster directory")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that the job requested, per node")
    parser.add_argument("--whole-nodes", action="store_true", help="all GPUs of a node are the job's")
    parser.add_argument("--protocol", default="auto", help="auto, ucx, tcp or tls")
    parser.add_argument("--interface", help="network interface of the workers")
    parser.add_argument("--client-interface", help="network interface for clients")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpcgpu.runtime.launch", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    job_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the scheduler")
    parser.add_argument(
        "--restart-wait", type=float, help="seconds to wait for a scheduler that is restarted; 0: as the job has waited"
    )
    parser.add_argument("--restarts", action="store_true", help="another scheduler job follows if this one is ended")
    parser.add_argument("--walltime", type=float, help="seconds that the job requests")
    parser.add_argument(
        "--walltime-margin", type=float, help="seconds before the end of the walltime at which workers retire"
    )
    parser.add_argument(
        "--worker-start", choices=["forkserver", "spawn"], default="forkserver", help="how workers start"
    )
    parser.add_argument(
        "--lease", type=float, default=0.0, help="seconds without a manager after which the scheduler ends; 0: never"
    )
    parser.add_argument(
        "--rmm-pool",
        action="store_true",
        help="give the scheduler a small pool of GPU memory under UCX, as workers have",
    )
    # Only processes that all spill by cuDF, or all do not, can exchange its tables. cuDF 26.10 says otherwise: "cannot
    # create SpillableBufferOwner without a global spill manager". The scheduler rebuilds tables and sends them on.
    parser.add_argument("--cudf-spill", action="store_true", help="let the scheduler spill by cuDF, as workers do")
    split = list(argv).index("--")
    arguments = parser.parse_args(argv[:split])
    arguments.command = [sys.executable, *argv[split + 2 :]]
    return arguments


if __name__ == "__main__":
    main(sys.argv[1:])
