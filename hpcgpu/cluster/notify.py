"""Tells the user of events of a cluster, by a command or a Python function; neither can hold up the cluster."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from hpcgpu.batch.base import JobState
from hpcgpu.cluster.events import ONCE, Events, Notice, Seen
from hpcgpu.cluster.state import ClusterState
from hpcgpu.cluster.waiting import wanted_workers
from hpcgpu.errors import OptionError
from hpcgpu.options.common import ClusterOptions
from hpcgpu.options.values import notification
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread

__all__ = ["Callbacks", "Notices", "Notifier"]

#: Seconds that a command may take.
LIMIT = 60.0
#: Seconds for which the end of a cluster waits for it.
AT_END = 8.0
#: Characters of a message, and of what a command says when it fails.
_MESSAGE, _SAID = 4000, 500
#: Notices that wait while a command runs.
_WAITING = 100


@dataclass(frozen=True)
class Callbacks:
    """The functions of this program that are called; they are not saved with a cluster.

    Attributes
    ----------
    notify : callable or None
        Is called with each `Notice`.
    on_ending : callable or None
        Is called with the cluster before the walltime of its scheduler job ends.
    """

    notify: Callable[[Notice], object] | None = None
    on_ending: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        for name in ("notify", "on_ending"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"{name} must be a function, not {value!r}")

    @classmethod
    def taken(cls, options: dict[str, Any], on_ending: Any) -> Callbacks:
        """Return them, and remove `notify` from the options where it is a function; else check it."""
        notify = options.pop("notify", None)
        if notify is not None and not callable(notify):
            options["notify"] = notification("notify", notify)
        return cls(notify if callable(notify) else None, on_ending)


class Notifier:
    """Delivers notices one after the other, in a thread of its own.

    Parameters
    ----------
    notify : str or callable or None
        A command, which sh runs; or a function, which is called with the notice.
    warn : callable
        Is called with why a notice could not be delivered.
    limit : float, optional
        Seconds that a command may take.
    """

    def __init__(
        self, notify: str | Callable[[Notice], object] | None, warn: Callable[[str], None], limit: float = LIMIT
    ) -> None:
        self.notify = notify
        self.warn = warn
        self.limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[Notice] = deque()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()

    def send(self, notice: Notice) -> None:
        """Deliver a notice soon."""
        with self._lock:
            if self.notify is None:
                return
            if len(self._waiting) >= _WAITING:
                self._waiting.popleft()
            self._waiting.append(notice)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._deliver, name="hpcgpu-notify", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending
                self._thread = None

    def deliver_unsent(self, timeout: float) -> None:
        """Deliver in this thread what waits because no thread can start."""
        if self._thread is None and self._waiting:
            self._deliver(time.monotonic() + timeout)

    def finish(self, timeout: float) -> None:
        """Wait until all is delivered, and end what takes longer."""
        self.deliver_unsent(timeout)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive() and isinstance(self.notify, str):
            self._hurry.set()
            thread.join(1.0)

    def _deliver(self, deadline: float = math.inf) -> None:
        while (left := deadline - time.monotonic()) > 0:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                notice = self._waiting.popleft()
            try:
                problem = self._told(notice, min(self.limit, left))
            except Exception as error:  # of the user's function, or of a command that cannot be started
                problem = f"failed: {error!r}"
            if problem:
                self.warn(printable(f"notify for the event {notice.event!r} {problem}"))

    def _told(self, notice: Notice, limit: float) -> str:
        """Deliver one notice; return what went wrong."""
        if callable(self.notify):
            self.notify(notice)
            return ""
        message = printable(notice.message, _MESSAGE, lines=True)
        environment = {"HPCGPU_EVENT": notice.event, "HPCGPU_CLUSTER": notice.cluster, "HPCGPU_MESSAGE": message}
        return run_command(str(self.notify), environment, message, limit=limit, hurry=self._hurry)


def run_command(
    command: str, environment: Mapping[str, str], text: str, *, limit: float, hurry: threading.Event
) -> str:
    """Run a command of the user; return what went wrong.

    The shell sees the user's own text alone: what differs from call to call is in the environment and on stdin. When
    the command has ended, processes that it left behind have the rest of the time. Then all of its session is killed.

    Parameters
    ----------
    command : str
    environment : mapping
        Variables.
    text : str
        For its stdin.
    limit : float
        Seconds.
    hurry : threading.Event
        It ends the time.
    """
    deadline = time.monotonic() + limit
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stderr is not None
    said = b""
    try:
        os.set_blocking(process.stderr.fileno(), False)
        with contextlib.suppress(OSError):  # it does not read
            process.stdin.write(f"{text}\n".encode(errors="replace"))
            process.stdin.close()
        while (ended := _ended(process.pid)) is False or _members(process.pid):
            if time.monotonic() > deadline or hurry.is_set():
                break
            select.select([process.stderr], [], [], 0.1)
            said = (said + _read(process.stderr.fileno()))[-_SAID:]
            hurry.wait(0.05)
        said = (said + _read(process.stderr.fileno()))[-_SAID:]
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    if not ended:
        return f"did not end within {'the time that is left' if hurry.is_set() else f'{limit:g} s'}, and was killed"
    words = " ".join(said.decode(errors="replace").split())
    return f"ended with exit code {process.returncode}{f': {words}' if words else ''}" if process.returncode else ""


def _ended(pid: int) -> bool:
    """Whether a child has ended. It is not reaped, so that its id stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _members(session: int) -> bool:
    """Whether a process of this session lives."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _read(stream: int) -> bytes:
    try:
        return os.read(stream, 65536)
    except OSError:  # there is nothing now
        return b""


class Notices:
    """Watches one cluster, and tells of its events.

    Parameters
    ----------
    state : ClusterState
    options : ClusterOptions
    callbacks : Callbacks
    cluster : object
        What `on_ending` is called with.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions, callbacks: Callbacks, cluster: object) -> None:
        self.state = state
        self.cluster = cluster
        self.on_ending = callbacks.on_ending
        self.events = Events(state.name, options.ending_notice)
        self.notifier = Notifier(callbacks.notify or options.notify, state.messages.warn)
        state.tell = self.tell

    def look(self) -> None:
        """Tell of what is new."""
        state = self.state
        if not state.managed:
            return
        for event, message in self.events.due(self._seen(), now=state.now):
            self.tell(event, message)
            if event == "ending" and self.on_ending is not None:
                threading.Thread(target=self._call_on_ending, name="hpcgpu-on-ending", daemon=True).start()

    def _seen(self) -> Seen:
        state = self.state
        paused = {group.name: group.failures.paused for group in state.registry.groups.values()}
        wanted = wanted_workers(state) if state.listening else 0
        seen = {"workers": len(state.known_workers), "wanted": wanted, "paused": paused}
        for job in state.scheduler.entries if state.scheduler is not None else ():
            status = job.queue_status
            if status.state is JobState.RUNNING:
                return Seen(**seen, scheduler=job.job_id or "", start=status.start, end=status.end)  # type: ignore[arg-type]
        return Seen(**seen)  # type: ignore[arg-type]

    def tell(self, event: str, message: str) -> None:
        """Tell of an event; of those that a cluster has once, only if no manager did before."""
        if self.notifier.notify is None:
            return
        dispatcher = self.state.dispatcher
        # a later cluster that has the name by now tells of its own events
        if event in ONCE and dispatcher.directory.is_of(dispatcher.token) and not dispatcher.directory.first(event):
            return
        self.notifier.send(Notice(event=event, cluster=self.state.name, message=message, time=self.state.now))

    def _call_on_ending(self) -> None:
        assert self.on_ending is not None
        self.state.messages.log("the walltime of the scheduler job ends soon: on_ending is called")
        try:
            self.on_ending(self.cluster)
        except Exception as error:
            self.state.messages.warn(printable(f"on_ending failed: {error!r}"))

    def deliver_unsent(self) -> None:
        """Deliver now what waits because no thread can start: the interpreter is ending."""
        self.notifier.deliver_unsent(AT_END)

    async def finish(self) -> None:
        """Deliver what is left; for some seconds at most."""
        if self.notifier.notify is not None:
            await in_thread(self.notifier.finish, AT_END)
