"""What a worker job does when its scheduler has ended: it starts again, and waits for the next scheduler.

It does so with ``on_scheduler_end="restart"`` only. The workers have ended then, and the job keeps its GPUs. The first
step of the job begins anew in the same process, so that all that depends on the scheduler is chosen anew: protocol,
interface, credentials.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hpcgpu.batch.base import OwnJob
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.errors import HpcgpuError
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime import stage
from hpcgpu.runtime.dask_signals import Wait
from hpcgpu.runtime.scheduler_connection import ConnectionResult, identify
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.present_scheduler import waits_to_follow

#: How often a scheduler that accepts a connection, and does nothing more, is tried again; seconds between two tries.
_TRIES, _PAUSE = 5, 2.0
#: Seconds between two checks of the contact, and how many must show another scheduler.
_INTERVAL, _CHECKS = 10.0, 3
#: Is set for workers whose job goes on if their scheduler ends.
RESTARTS = "HPCGPU_SCHEDULER_RESTARTS"
#: Is set when the workers of this job have lost their scheduler.
_LOST = "HPCGPU_SCHEDULER_LOST"
#: Each SIGTERM that came while Dask waited for signals, and those that this process has sent to itself.
_terminated: list[int] = []
_own_signals: list[int] = []
#: The jobs of the schedulers that the workers of this process have had.
_served: list[str] = [""]


def restart_wait(arguments: argparse.Namespace, directory: ClusterDirectory, own: OwnJob) -> float | None:
    """Return how many seconds this job waits for a scheduler that is restarted; None if it is not restarted.

    By default it is the time for which the job has waited in the queue, because another job would wait as long, and
    `death_timeout`: the end is noticed, and the scheduler starts.
    """
    wait: float | None = arguments.restart_wait
    if wait == 0:
        began = psutil.Process().create_time()
        submitted = next((submit.time for submit in directory.submits() if submit.job_id == own.job_id), began)
        wait = float(arguments.timeout) + max(0.0, began - submitted)
    return wait


def begins_anew() -> bool:
    """Whether the workers of this job have lost their scheduler, and its first step has begun anew; true only once."""
    return bool(os.environ.pop(_LOST, ""))


def report_wait(gpus: int, seconds: float) -> None:
    """Write into the log of the job that it waits for another scheduler, for how long at most, and what it keeps."""
    keeps = f"keeps its {counted(gpus, 'GPU')} and " if gpus else ""
    write_stderr(f"this job {keeps}waits for another scheduler, {duration(seconds)} at most (restart_wait)")


def reap_earlier_workers() -> None:
    """Let the processes of the earlier workers go: they have ended, and this process is still their parent."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def notice_signals(wait_for_signals: Wait) -> Wait:
    """Notice each SIGTERM that ends the workers of this process: a person, or the queue, wants the job to end.

    Dask may get it while the workers end with their scheduler, and does not report it.
    """

    async def notices() -> int:
        waiting = asyncio.ensure_future(wait_for_signals())
        await asyncio.sleep(0)  # then Dask has set its handler
        handle = signal.getsignal(signal.SIGTERM)

        def notice(number: int, frame: Any) -> None:
            _terminated.append(number)
            handle(number, frame)  # type: ignore[operator,misc]

        signal.signal(signal.SIGTERM, notice)
        return int(await waiting)

    return notices


def watch(directory: ClusterDirectory, contact: Contact) -> None:
    """End the workers of this process when the cluster has another scheduler, or ends: they may still start.

    A worker that has not connected yet would try to for `death_timeout`.
    """
    _served.append(contact.job_id)
    threading.Thread(target=_watch, args=(directory, contact), name="hpcgpu-scheduler", daemon=True).start()


def _watch(directory: ClusterDirectory, served: Contact) -> None:
    checks = 0
    while checks < _CHECKS:
        time.sleep(_INTERVAL)
        why = _why_end(directory, served)
        checks = checks + 1 if why else 0
    write_stderr(f"the cluster {why}: the workers of this job end")
    _own_signals.append(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def _why_end(directory: ClusterDirectory, served: Contact) -> str:
    """Return why workers that have not connected to this scheduler never will; empty if they may."""
    with suppress(OSError):  # a filesystem that fails for a moment proves nothing
        if directory.closing:
            return "is closed"
    contact = directory.contact()
    other = contact is not None and _is_another(contact, served.workers, served.job_id)
    return "has another scheduler" if other else ""


def begin_anew(arguments: argparse.Namespace, environment: Mapping[str, str], address: str) -> None:
    """Begin the first step of this worker job anew if its scheduler has ended and another one follows.

    Parameters
    ----------
    arguments : argparse.Namespace
        Of the first step.
    environment : mapping of str to str
        The environment in which the first step began.
    address : str
        The scheduler that the workers had.
    """
    if len(_terminated) > len(_own_signals):
        return
    if arguments.restart_wait is not None and _follows(arguments.directory, address):
        write_stderr("the scheduler has ended, and the first step of this job begins anew")
        sys.stdout.flush()
        kept = {0, 1, 2, *stage.lock()}
        for opened in Path("/proc/self/fd").iterdir():  # UCX's would stay open
            with suppress(OSError):
                os.set_inheritable(int(opened.name), int(opened.name) in kept)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, _LOST: "1"})


def _follows(path: Path, address: str) -> bool:
    """Whether the scheduler of this address has ended, and its cluster has not."""
    try:
        directory = ClusterDirectory.existing(path)
        if directory.closing or (directory.encrypted and not directory.tls.is_dir()):
            return False
        contact, manager = directory.certain_contact(), directory.manager()
    except HpcgpuError:
        return False
    except (OSError, ValueError):  # a filesystem that fails for a moment proves nothing
        return True
    # one that failed to take the cluster over has left it, but has not detached it: another program may come
    managed = manager is not None and not (manager.left and directory.detached)
    if not managed and not waits_to_follow(directory.submits(), _served[-1]):  # no other one comes
        return False
    return contact is None or _is_another(contact, address, _served[-1]) or not _lives(contact, directory)


def _is_another(contact: Contact, address: str, job_id: str) -> bool:
    """Whether it is not the contact of this scheduler. The next one may have the same port; the job may be unknown."""
    return contact.workers != address or job_id not in ("", contact.job_id)


def _lives(contact: Contact, directory: ClusterDirectory) -> bool:
    """Whether the scheduler of a contact proves that it lives. If it is only busy, the first step finds it again."""
    for _ in range(_TRIES):
        if (result := identify(contact, directory)) is not ConnectionResult.BUSY:
            return result is ConnectionResult.ACCEPTED
        time.sleep(_PAUSE)
    return False
