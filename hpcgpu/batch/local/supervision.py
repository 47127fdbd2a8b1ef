"""The processes of a job of the embedded queue: which they are, how they are ended, and when that has to be."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping

import psutil

from hpcgpu.batch.base import JobState
from hpcgpu.posix.processes import identity

__all__ = ["end_all", "members", "wait_for_end"]

#: Seconds after which a killed process is left alone: it hangs in the kernel, or belongs to somebody else.
_UNKILLABLE = 10.0
#: Seconds between looks at all processes of the machine, 20 ms of CPU each, while those that are known have not ended.
_LOOK = 0.5


def members(marks: Mapping[str, str], session: int | None) -> set[psutil.Process]:
    """Return the live processes of a job.

    These have the job's marks in their environment, belong to its session, or descend from such a process.

    Any one of these can be lost: a daemon leaves session and parent, a process that sets its title overwrites its
    environment.
    """
    parents: dict[psutil.Process, int] = {}
    members: set[psutil.Process] = set()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                parents[process] = process.ppid()
                if os.getsid(pid) == session or marks.items() <= process.environ().items():
                    members.add(process)
    pids: set[int] = set()
    while len(pids) < len(members):
        pids = {process.pid for process in members}
        members |= {process for process, parent in parents.items() if parent in pids}
    return members


def end_all(find: Callable[[], set[psutil.Process]], grace: float) -> list[int]:
    """End all processes that `find` finds, now or later; return the ids of those that are left.

    TERM comes first, and KILL after the grace period.
    """
    known: set[psutil.Process] = set()
    for signum, timeout in ((signal.SIGTERM, grace), (signal.SIGKILL, _UNKILLABLE)):
        told: set[psutil.Process] = set()
        deadline = time.monotonic() + timeout
        while timeout:
            # A process once found stays ours, even when its parent has gone and nothing else shows where it came from.
            known = find() | {process for process in known if process.is_running() and identity(process.pid)}
            if not known:
                return []
            if time.monotonic() > deadline:
                break
            for process in known - told:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signum)
            told |= known
            again = min(time.monotonic() + _LOOK, deadline)
            while any(identity(process.pid) for process in known) and time.monotonic() < again:
                time.sleep(0.05)
    return sorted(process.pid for process in known)


def wait_for_end(pid: int, end: float | None) -> JobState | None:
    """Wait until the script has ended or must end; return the state of the job.

    None means that the state depends on the exit code.
    """
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        timeout = 30.0 if end is None else min(end - time.time(), 30.0)  # short, as the clock may be set
        if timeout <= 0:
            return JobState.TIMEOUT
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, timeout)
        if received and received.si_signo == signal.SIGTERM:
            return JobState.CANCELLED
    return None
