"""Finds and ends all processes that a job or a program has started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hpcgpu.posix.process_identity import identity

if TYPE_CHECKING:
    import psutil

#: Seconds after which a killed process is left alone: it hangs in the kernel, or belongs to somebody else.
_UNKILLABLE = 10.0
#: Seconds between two scans of all processes of the machine, while known processes have not ended. A scan takes 20 ms
#: of CPU.
_CHECK_INTERVAL = 0.5


def members(marks: Mapping[str, str], session: int | None) -> set[psutil.Process]:
    """Return the live processes that have these marks in their environment, belong to a session, or descend from these.

    A process can lose each of these properties: a daemon leaves session and parent, a process that sets its title
    overwrites its environment.
    """
    import psutil  # only the end of a job needs it

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

    TERM comes first, and KILL after the grace period. What a process starts because of TERM, such as a command that
    saves a result, does not get TERM.
    """
    import psutil

    known: set[psutil.Process] = set()
    for signum, timeout in ((signal.SIGTERM, grace), (signal.SIGKILL, _UNKILLABLE)):
        signalled: set[psutil.Process] = set()
        sent = 0  # when the signal was sent first, in ticks since boot
        deadline = time.monotonic() + timeout
        while timeout:
            # A process once found stays ours, even when its parent has gone and nothing else shows where it came from.
            known = find() | {process for process in known if process.is_running() and identity(process.pid)}
            if not known:
                return []
            if time.monotonic() > deadline:
                break
            new = known - signalled
            if not signalled:
                sent = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
            elif signum == signal.SIGTERM:
                new = {process for process in new if (found := identity(process.pid)) and found[1] < sent}
            for process in new:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signum)
            signalled |= known
            again = min(time.monotonic() + _CHECK_INTERVAL, deadline)
            while any(identity(process.pid) for process in known) and time.monotonic() < again:
                time.sleep(0.05)
    return sorted(process.pid for process in known)
