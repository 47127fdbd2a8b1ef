"""Commands that start a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.interrupts import handled, interruptible
from hpcgpu.cli.names import AUTO
from hpcgpu.cli.options import ClusterCommand, ForwardedClusterCommand, cluster_options, system_option
from hpcgpu.cli.printing import echo, json_option, person_waits, show_jobs, show_json
from hpcgpu.display.counts_and_durations import counted

if TYPE_CHECKING:
    from hpcgpu.cli.json_types import StartedJSON
    from hpcgpu.cluster.gpucluster import GPUCluster
    from hpcgpu.store.directory import ClusterDirectory


def chosen_system(given: str, profile: str | None = None) -> str:
    """Return the requested batch system, that of the profile, or that of this machine.

    Raises
    ------
    BatchError
        A batch system is installed, but none answers: there, nobody expects a cluster on this machine only.
    """
    from hpcgpu.batch import system_registry
    from hpcgpu.batch.detect import detect
    from hpcgpu.errors import BatchError
    from hpcgpu.profiles import site_profiles

    if given != AUTO:
        return given
    if profile is not None:
        return site_profiles.load(profile).system
    found = detect()
    if found.system is not None:
        for sentence in found.silent:
            echo(f"hpcgpu: {sentence}", err=True)
        return found.system.name
    alone = system_registry.fallback()
    if found.silent:
        advice = (
            f"Try again later, or choose one with --system; --system {alone.name} is {alone.title}, on this machine "
            "only"
        )
        raise BatchError(f"no batch system answers. {'. '.join(found.silent)}. {advice}")
    known = " nor ".join(one.title for one in system_registry.systems() if one.command)
    click.echo(f"hpcgpu: neither {known} is installed here: hpcgpu uses {alone.title}, on this machine only", err=True)
    return alone.name


def _start_by_ssh(host: str, arguments: list[str]) -> None:
    from hpcgpu.cli.start_by_ssh import start_by_ssh

    start_by_ssh(host, arguments)


@click.command(cls=ForwardedClusterCommand, by_ssh=_start_by_ssh)
@click.argument("name")
@system_option
@click.option(
    "--adapt", is_flag=True, help="Scale the number of worker jobs with the work, from inside the scheduler job."
)
@click.option(
    "--minimum-jobs",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --adapt: minimum number of worker jobs.",
)
@click.option("--maximum-jobs", type=click.IntRange(min=1), help="With --adapt: maximum number of worker jobs.")
@click.option("--managed", is_flag=True, hidden=True, help="The scheduler job manages the cluster.")
@click.option("--token", hidden=True, default="", help="Names this start: it is continued if it runs again.")
@json_option
@cluster_options
def start(  # noqa: PLR0913, PLR0917  # click passes one argument for each option
    name: str,
    system: str,
    adapt: bool,
    minimum_jobs: int,
    maximum_jobs: int | None,
    managed: bool,
    token: str,
    as_json: bool,
    arguments: dict[str, Any],
) -> None:
    """Start a cluster that continues after this command, until `hpcgpu stop`, its --idle-timeout or its walltime ends
    it.

    Waits for the scheduler; with --no-wait, only until the queue has accepted the jobs. If the queue refuses a job, or
    says that it never starts the scheduler job, all jobs are cancelled. Ctrl-C or SIGTERM during the wait also cancels
    all jobs.

    \b
    Examples: hpcgpu start demo --jobs 2 --gpus-per-node 4 --walltime 2h --idle-timeout 30m
              hpcgpu start demo --config site.yaml --scheduler queue=small --no-wait
              hpcgpu start demo --gpus-per-node 4 --adapt --maximum-jobs 8
    Connect:  hpcgpu.connect("demo") in Python
    """
    from hpcgpu.cluster.dask_ctl import cluster_class
    from hpcgpu.display.job_table import JobTable
    from hpcgpu.existing_clusters.snapshot import snapshot
    from hpcgpu.manager.started_before import started_before
    from hpcgpu.orders.manager_in_scheduler_job import in_scheduler_job

    if adapt and maximum_jobs is None:
        raise click.UsageError("--adapt needs --maximum-jobs")
    if not adapt and (maximum_jobs is not None or minimum_jobs):
        raise click.UsageError("--minimum-jobs and --maximum-jobs need --adapt")
    if adapt and minimum_jobs > (maximum_jobs or 0):
        raise click.UsageError(f"--minimum-jobs {minimum_jobs} is more than --maximum-jobs {maximum_jobs}")
    if adapt:
        arguments.setdefault("jobs", minimum_jobs)
    cluster_type = cluster_class(chosen_system(system, arguments.get("profile")))
    given = {**arguments, "name": name, "host": "", "shutdown_on_close": False}
    if token and (there := started_before(cluster_type.system, given, token)) is not None:
        directory, jobs, link = there, JobTable(snapshot(there.path).jobs), ""
    else:
        cluster = _started(cluster_type, given, token)
        if cluster.options.cluster.notify and not adapt and cluster.options.cluster.on_scheduler_end == "end":
            click.echo(
                "hpcgpu: nobody manages this cluster after this command, so --notify does not run until a program "
                "attaches to it. Add --adapt or --on-scheduler-end restart: then the scheduler job manages it",
                err=True,
            )
        jobs, directory, link = cluster.jobs, cluster.directory, cluster.dashboard_link
        _leave(cluster)
    scaling = _adapt(directory, minimum_jobs, maximum_jobs) if adapt and maximum_jobs is not None else ""
    if managed and not adapt and (text := in_scheduler_job(directory, None)):
        echo(text, err=True)
    if as_json:
        started: StartedJSON = {"name": name, "directory": str(directory.path), "dashboard": link, "jobs": jobs}
        show_json(started)
        return
    word = directory.in_shell
    show_jobs(jobs, how=f"hpcgpu status {word} --all")
    click.echo(
        f"dashboard  {'print its link with' if link else 'when the scheduler job runs, print its link with'}: "
        f"hpcgpu dashboard {word}"
    )
    click.echo(f"directory  {directory.path}")
    if scaling:
        echo(scaling)
    click.echo(f'Connect in Python: hpcgpu.connect("{directory.found_as}"). End it: hpcgpu stop {word}')


def _started(cluster_type: type[GPUCluster], given: dict[str, Any], token: str) -> GPUCluster:
    """Start the cluster; if that is interrupted, exit."""
    from hpcgpu.store.create_directory import REQUESTED_TOKEN

    earlier = REQUESTED_TOKEN.set(token)
    try:
        with interruptible():
            return cluster_type(**given)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo(f"hpcgpu: the start of {given['name']} was interrupted, and its jobs are cancelled", err=True)
        sys.exit(130)
    finally:
        REQUESTED_TOKEN.reset(earlier)


def _adapt(directory: ClusterDirectory, minimum: int, maximum: int) -> str:
    """Let the scheduler job scale the cluster; return a message on the outcome."""
    from hpcgpu.errors import ClusterError
    from hpcgpu.orders.manager_in_scheduler_job import in_scheduler_job
    from hpcgpu.scaling.sizes_to_jobs import limits, target_duration
    from hpcgpu.scaling.wanted_state import Adapt
    from hpcgpu.store import saved_options

    worker = saved_options.read(directory).options.worker
    size = limits(worker, minimum_jobs=minimum, maximum_jobs=maximum, interactive=person_waits())
    try:
        return in_scheduler_job(directory, Adapt("default", size, target_duration()))
    except ClusterError as error:
        raise ClusterError(
            f"{error}. The cluster runs without adaptive scaling, with {counted(minimum, 'worker job')}. To "
            f"end it, run: hpcgpu stop {directory.in_shell}"
        ) from error


def _leave(cluster: GPUCluster) -> None:
    """Detach the cluster. If jobs of the start are missing, keep the lease: nobody would submit these jobs."""
    from hpcgpu.display.counts_and_durations import duration
    from hpcgpu.errors import ClusterError
    from hpcgpu.existing_clusters.unsubmitted_jobs import unfinished

    if not (rest := unfinished(cluster.directory, now=time.time(), left=True)):
        try:
            cluster.detach()
        except ClusterError:
            cluster.close()  # if the start has failed just now, its jobs are being cancelled: wait for that
            raise
        return
    directory, lease = cluster.directory, cluster.options.cluster.lease
    cluster.sync(cluster.manager.close, release=False)
    cluster.close()
    end = f". Else its scheduler ends when nobody has managed it for {duration(lease)}" if lease else ""
    raise ClusterError(
        f"cluster {directory.path.name} is not complete: {rest}{end}. To end it now, run: hpcgpu stop "
        f"{directory.in_shell}"
    )


@click.command(cls=ClusterCommand)
@system_option
@click.option("--name", help="Name of the cluster. Default: a new one.")
@cluster_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True)
def run(system: str, name: str | None, program: tuple[str, ...], arguments: dict[str, Any]) -> None:
    """Start a cluster, run a program here that uses it, close the cluster, and exit with the program's exit code.

    The program connects with `Client()`: DASK_SCHEDULER_ADDRESS and the credentials are in its environment. It starts
    when all workers of
    --jobs are connected. Signals are passed on to it.

    \b
    Example: hpcgpu run --jobs 2 --gpus-per-node 4 --walltime 1h -- python train.py --epochs 10
    Exit status: the program's, 128 + N if signal N ended it; 127 if it cannot be started.
    """
    from hpcgpu.cluster.dask_ctl import cluster_class
    from hpcgpu.store import certificates_and_keys

    if shutil.which(program[0]) is None:
        click.echo(f"hpcgpu: {program[0]!r} cannot be run: there is no such program", err=True)
        sys.exit(127)
    with cluster_class(chosen_system(system, arguments.get("profile")))(
        **{**arguments, "host": "", "shutdown_on_close": True, **({"name": name} if name else {})}
    ) as cluster:
        if cluster.options.cluster.jobs:
            cluster.wait_for_workers()
        environment = certificates_and_keys.environment(cluster.directory) | {
            "DASK_SCHEDULER_ADDRESS": cluster.scheduler_address
        }
        code = _run(program, environment)
    sys.exit(code)


def _run(program: tuple[str, ...], environment: dict[str, str]) -> int:
    """Run a program with more variables, pass signals on to it, and return its exit code as a shell does."""
    process = subprocess.Popen(program, env=os.environ | environment)
    with handled(lambda number, frame: process.send_signal(number), signal.SIGTERM, signal.SIGHUP):
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the terminal sent the signal to the program too, which handles it
    return 128 - code if code < 0 else code
