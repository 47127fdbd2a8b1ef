"""A process of a login node that manages a cluster: for sites whose compute nodes may not submit jobs.

Elsewhere the manager in the scheduler job is better: it ends with the cluster, and no login node needs it; see
`hpcgpu.orders.manager_in_scheduler_job`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from hpcgpu.batch import batch_system
from hpcgpu.dask_scheduler.keep_manager_running import LOG
from hpcgpu.errors import ClusterError
from hpcgpu.manager.manager import Manager
from hpcgpu.orders.run_manager import manage_alone, run
from hpcgpu.posix import variables_of_this_process
from hpcgpu.posix.full_disk import cannot_be_written, file_error, is_full
from hpcgpu.posix.printable import printable
from hpcgpu.runtime.scheduler_connection import answer_of, unreachable
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.managers import ManagerRecord

#: Seconds that the process has to take the cluster over: it queries the queue first.
_TIMEOUT = 120.0
#: Seconds that the scheduler has to report who manages its cluster.
_ANSWER = 20.0
#: Seconds for which a new manager of another machine may not be known to the scheduler.
_FIRST_HEARTBEAT = 300.0


def on_login_node(directory: ClusterDirectory) -> str:
    """Start a process on this machine that manages the cluster until its end; return a message.

    It goes on when the user logs out, if the site lets it.

    Raises
    ------
    ClusterError
        Another program manages the cluster, or the process cannot manage it.
    """
    _check_unmanaged(directory)
    log = directory.logs / LOG
    try:
        with open(log, "ab") as stream:
            before = stream.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcgpu", "manage", "--foreground", "--", str(directory.path)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=variables_of_this_process.without(),
                start_new_session=True,
            )
    except OSError as error:
        raise ClusterError(f"no process can manage cluster {directory.path.name}: {file_error(error)}") from error
    try:
        manager = _wait_until_it_manages(directory, process)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if manager is None:
        _check_unmanaged(directory)  # another program may have been faster
        if is_full(directory.logs):  # so that the log lacks the reason
            full = cannot_be_written(log, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            raise ClusterError(f"no process can manage cluster {directory.path.name}: {full}")
        printed = printable(log.read_bytes()[before:].decode(errors="replace").strip(), 2000, lines=True)
        raise ClusterError(f"the process that should manage cluster {directory.path.name} ended: {printed}\nLog: {log}")
    return (
        f"{directory.path.name}: {manager} manages it from now on, and writes to {log}. If this machine restarts, or "
        f"ends that process, run: hpcgpu manage {directory.in_shell}"
    )


def manage_if_needed(directory: ClusterDirectory) -> str:
    """Do the same if the scheduler job should manage the cluster, and cannot; return a message, empty if it can.

    Raises
    ------
    ClusterError
        The process cannot manage it, or the scheduler does not answer.
    """
    deadline = time.monotonic() + _TIMEOUT
    try:
        while directory.wanted().manager_in_scheduler_job and time.monotonic() < deadline:
            manager = _ask(directory, lambda scheduler: scheduler.hpcgpu_state(), _ANSWER)["manager"]
            if manager["present"]:
                break
            if manager["problem"]:
                problem = _ask(directory, lambda scheduler: scheduler.hpcgpu_manage(), _TIMEOUT)
                return f"{on_login_node(directory)}. The scheduler job cannot: {problem}" if problem else ""
            time.sleep(0.5)
    except ClusterError:  # another program may have been faster, or the cluster ends
        if not directory.closing and directory.contact() is not None and _present_manager(directory) is None:
            raise
    return ""


def _ask(directory: ClusterDirectory, call: Callable[[Any], Any], timeout: float) -> Any:
    if (contact := directory.contact()) is None:
        raise ClusterError(f"the scheduler of cluster {directory.path.name} is gone")
    try:
        return asyncio.run(answer_of(directory, contact, call, timeout))
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(unreachable(f"its scheduler at {contact.client}", error)) from error


def _wait_until_it_manages(directory: ClusterDirectory, process: subprocess.Popen[bytes]) -> ManagerRecord | None:
    """Wait until a process manages the cluster; return None if it has ended."""
    deadline = time.monotonic() + _TIMEOUT
    while (manager := directory.manager()) is None or manager.process[:1] != [process.pid]:
        if process.poll() is not None:
            return None
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the process that should manage cluster {directory.path.name} has not done so within {_TIMEOUT:g} s. "
                f"Log: {directory.logs / LOG}"
            )
        time.sleep(0.1)
    return manager


def _check_unmanaged(directory: ClusterDirectory) -> None:
    """Raise `ClusterError` if a program manages the cluster now, other than the scheduler job."""
    if (present := _present_manager(directory)) is not None:
        raise ClusterError(f"{present} manages cluster {directory.path.name} already")


def _present_manager(directory: ClusterDirectory) -> ManagerRecord | None:
    """Return the program that manages the cluster now; None if that is the scheduler job."""
    manager, contact = directory.manager(), directory.contact()
    if manager is None or manager.left or manager.in_scheduler_job or manager.lives is False:
        return None
    if manager.lives is None and contact is not None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            state = asyncio.run(answer_of(directory, contact, lambda one: one.hpcgpu_state(), _ANSWER))
            reported = state["manager"]
            begins = reported["number"] < manager.number and time.time() - directory.modified < _FIRST_HEARTBEAT
            return manager if reported["present"] or begins else None
    return manager


def manage_here(directory: ClusterDirectory) -> None:
    """Manage the cluster in this process, until it ends, another program takes it over, or a signal comes.

    Raises
    ------
    ClusterError
        Another program manages the cluster.
    """
    latest = directory.manager()
    _check_unmanaged(directory)
    manage_alone(lambda: _manage(directory, latest.number if latest is not None else 0))


async def _manage(directory: ClusterDirectory, after: int) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # its terminal was closed
    batch = batch_system(directory.system)
    manager = Manager.of_existing(directory, batch, ends_jobs=False, wait=False, after=after, quiet=True)
    await run(manager, end, manager.close)
