"""Checks on the login node, without a job."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu import __version__
from hpcgpu.batch import system_registry
from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.queues import Queue
from hpcgpu.checks.judge_job_reports import untested_lines
from hpcgpu.checks.result_lines import Line
from hpcgpu.errors import BatchError
from hpcgpu.fabric import interface_addresses
from hpcgpu.options.shared_options_and_defaults import Options
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
        found = system_registry.system(options.system).discover()
    except BatchError as error:
        yield Line(
            "login", "GPU queues", "warning", str(error), "set queue and gpu_type as the site's documentation says"
        )
        return
    if found is None:
        return
    jobs = {"GPU queues": options.worker} | (
        {"scheduler's queue": options.scheduler} if options.scheduler is not None else {}
    )
    for what, job in jobs.items():
        wanted = 0 if job.gpu_request == "none" else job.gpus_per_node
        yield replace(judge_queues(found.gpus, job.queue, job.gpu_type, wanted=wanted, route=found.route), what=what)


def judge_queues(
    found: Sequence[Queue], queue: str | None, gpu_type: str | None, *, wanted: int, route: bool = False
) -> Line:
    """Return whether the options fit the queues that have GPUs; pure.

    Parameters
    ----------
    found : sequence of Queue
    queue, gpu_type : str or None
        The options.
    wanted : int
        GPUs per node.
    route : bool, default False
        Whether a queue may route its jobs to other queues, which have the nodes.
    """
    if not found:
        advice = "set gpu_request='none' if jobs get whole nodes, or ask the site's support" if wanted else ""
        return Line(
            "login", "GPU queues", "warning" if wanted else "ok", "the batch system lists no nodes with GPUs", advice
        )
    named = "; ".join(
        dict.fromkeys(f"{q.name or 'any queue'}: {q.gpus} x {q.gpu_type or 'GPU'} per node" for q in found)
    )
    advice = _misfit(found, queue, gpu_type, wanted) if wanted else ""
    if advice and route and not _chosen(found, queue):
        advice = f"queue={queue!r} has no GPUs itself: choose one of these, unless it routes jobs to one of them"
        return Line("login", "GPU queues", "warning", named, advice)
    return Line("login", "GPU queues", "failure" if advice else "ok", named, advice)


def _chosen(found: Sequence[Queue], queue: str | None) -> list[Queue]:
    return [q for q in found if queue is None or not q.name or q.name in queue.split(",")]


def _misfit(found: Sequence[Queue], queue: str | None, gpu_type: str | None, wanted: int) -> str:
    """Return what to change in the options; empty if they fit."""
    chosen = _chosen(found, queue)
    if not chosen:
        return f"queue={queue!r} has no GPUs: choose one of these"
    if gpu_type is not None and not (fitting := [q for q in chosen if q.has(gpu_type)]):
        types = ", ".join(sorted({q.gpu_type for q in chosen if q.gpu_type}))
        if not types:
            return f"its GPUs have no type: leave out gpu_type={gpu_type!r}"
        return f"the queue has no gpu_type={gpu_type!r}: choose one of {types}"
    most = max(q.gpus + q.others for q in chosen) if gpu_type is None else max(q.gpus for q in fitting)
    return f"a node has fewer GPUs than gpus_per_node={wanted}: write {most}" if most < wanted else ""


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
