"""Checks on the login node, without a job."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hpcgpu import __version__
from hpcgpu.batch import system_registry
from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.queues import Machine
from hpcgpu.checks.judge_job_reports import untested_lines
from hpcgpu.checks.queue_limits import judge_job
from hpcgpu.checks.result_lines import Grade, Line
from hpcgpu.errors import BatchError
from hpcgpu.fabric import interface_addresses
from hpcgpu.options.shared_options_and_defaults import JobOptions, Options
from hpcgpu.posix.filesystems import filesystem, is_local
from hpcgpu.posix.ownership import private_directory, weaknesses
from hpcgpu.releases import TESTED
from hpcgpu.software import compare_environments


def login_lines(options: Options, batch: BatchSystem) -> Iterator[Line]:
    """Yield the results for this machine."""
    here = compare_environments.collect()
    packages = ", ".join(f"{name} {here[name]}" for name in TESTED if name in here)
    yield Line("login", "host", "ok", f"{socket.gethostname()}, hpcgpu {__version__}")
    yield Line("login", "python", "ok", f"{here['python']} at {sys.executable}: {packages}")
    yield from untested_lines("login", here)
    yield from _queue_lines(options, batch)
    yield from directory_lines(
        options.cluster.cluster_directory, shared=not system_registry.system(options.system).one_machine
    )
    addresses = interface_addresses.addresses()
    named = ", ".join(f"{name} ({address})" for name, address in sorted(addresses.items()))
    yield Line("login", "interfaces", "ok", named or "none with an IPv4 address")
    yield Line("login", "GPU", "ok", here.get("GPU", "none; the login node does not need one"))


def _queue_lines(options: Options, batch: BatchSystem) -> Iterator[Line]:
    try:
        batch.check()
        version = batch.version()
        began = time.monotonic()
        batch.find("hpcgpu-check")
    except BatchError as error:
        advice = (
            "run this on a login node, perhaps after `module load`. If the commands exist here, the batch system "
            "is down: try again later"
        )
        yield Line("login", "queue", "failure", str(error), advice)
        return
    yield Line("login", "queue", "ok", f"{batch.name}: {version}; it answered in {time.monotonic() - began:.1f} s")
    try:
        machine = system_registry.system(options.system).machine(accounts=False)
    except BatchError as error:
        yield Line(
            "login", "GPU queues", "warning", str(error), "set queue and gpu_type as the site's documentation says"
        )
        return
    if machine is None:
        return
    yield judge_queues("GPU queues", options.worker, machine)
    if options.scheduler is not None:
        yield judge_queues("scheduler's queue", options.scheduler, machine)


def judge_queues(what: str, job: JobOptions, machine: Machine) -> Line:
    """Return whether the options of a job fit the queues that have GPUs; pure."""
    wanted = job.gpus_per_node > 0 and job.gpu_request != "none"
    if not machine.queues.gpus:
        advice = "set gpu_request='none' if jobs get whole nodes, or ask the site's support" if wanted else ""
        return Line("login", what, "warning" if wanted else "ok", "the batch system lists no nodes with GPUs", advice)
    kinds = (f"{q.name or 'any queue'}: {q.gpus} x {q.gpu_type or 'GPU'} per node" for q in machine.queues.gpus)
    broken = [
        str(one)
        for one in (judge_job(job, machine) if wanted else ())
        if one.grade == "failure" and one.option in ("queue", "gpu-type", "gpus-per-node")
    ]
    # the site may choose the queue of a job that names none
    grade: Grade = "ok" if not broken else "failure" if job.queue else "warning"
    return Line("login", what, grade, "; ".join(dict.fromkeys(kinds)), "; ".join(broken))


def directory_lines(path: Path, *, shared: bool) -> Iterator[Line]:
    """Yield the results for the filesystem of the cluster directories; `shared`: other machines must see it."""
    try:
        private_directory(path)
        probe = path / f".hpcgpu-check-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        advice = "set cluster_directory to a directory that you own on the shared filesystem"
        yield Line("login", "cluster directory", "failure", f"{path}: {error.strerror}", advice)
        return
    kind = filesystem(path)
    if shared and is_local(path):
        advice = "jobs must see it: test that with `--in-job`, or set cluster_directory to a shared filesystem"
        yield Line("login", "cluster directory", "warning", f"{path} is on {kind}, which is usually not shared", advice)
    else:
        yield Line("login", "cluster directory", "ok", f"{path} ({kind or 'unknown filesystem'})")
    found = weaknesses(path, shared=True)
    for weakness in found:
        advice = f"other users could replace the credentials: {weakness.advice}"
        yield Line("login", "permissions", "warning" if weakness.by_group else "failure", weakness.why, advice)
    if not found:
        yield Line(
            "login",
            "permissions",
            "ok",
            f"according to the file modes, only you can write to {path} and to the directories above it",
        )
