"""Which events of a cluster call `notify`, and how: a command or a Python function, which cannot block the cluster.

`Events` is pure: the time is an argument.
"""

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
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from hpcgpu.batch.base import JobState
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.errors import OptionError
from hpcgpu.options.shared_options_and_defaults import DEFAULT, ClusterOptions
from hpcgpu.options.values import notification
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling.walltime_margin import ends_soon
from hpcgpu.state.cluster_state import ClusterState

#: Events that occur once in the life of a cluster, also if its manager changes.
ONCE = frozenset({"ready", "ending", "ended"})
#: Seconds that a command may take.
LIMIT = 60.0
#: Seconds for which the end of a cluster waits for the command.
AT_END = 8.0
#: Most characters of a message, and of the output of a command that fails.
_MESSAGE, _OUTPUT = 4000, 500
#: Most notices that wait while a command runs.
_WAITING = 100


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event of a cluster.

    Attributes
    ----------
    event : str
        ``"ready"``: all workers of the first request are connected. ``"job_lost"``: a worker job ended early, or
        lacks workers. ``"paused"``: a group of workers gets no more jobs. ``"budget"``: 80 % of its budget of GPU
        hours is used, or all of it. ``"ending"``: the walltime of the scheduler job ends soon. ``"restarted"``: the
        scheduler job ended too early, and another one is started. ``"ended"``: the cluster has ended.
    cluster : str
        Its name.
    message : str
        What happened, for people.
    time : float
        Epoch seconds.
    """

    event: str
    cluster: str
    message: str
    time: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a manager sees of its cluster at one moment.

    Attributes
    ----------
    workers, wanted : int
        How many are connected, and how many there should be.
    paused : mapping
        Why each worker group gets no more jobs, by the name of the group; empty if it gets some.
    scheduler : str
        The id of the scheduler job while it runs, else empty.
    start, end : float or None
        Epoch seconds of its start and of the end of its walltime.
    """

    workers: int = 0
    wanted: int = 0
    paused: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    start: float | None = None
    end: float | None = None


class Events:
    """Decides which events are due.

    Parameters
    ----------
    name : str
        The cluster's name.
    notice : float
        Seconds before the end of the scheduler's walltime at which the event ``"ending"`` is due.
    """

    def __init__(self, name: str, notice: float) -> None:
        self.name = name
        self.notice = notice
        self._reported = set[str]()
        self._paused = dict[str, str]()

    def due(self, seen: Seen, *, now: float) -> list[tuple[str, str]]:
        """Return the events that are new, each with a message."""
        found: list[tuple[str, str]] = []
        if seen.workers >= seen.wanted > 0 and self._first("ready"):
            found.append(("ready", f"cluster {self.name} is ready: {counted(seen.workers, 'worker')} connected"))
        for group, why in seen.paused.items():
            if why and why != self._paused.get(group):
                which = f"cluster {self.name}" if group == DEFAULT else f"worker group {group} of cluster {self.name}"
                found.append(("paused", f"{which} gets no more jobs: {why}"))
        self._paused = dict(seen.paused)
        soon = seen.scheduler and seen.end is not None and ends_soon(seen.start, seen.end, self.notice, now=now)
        if soon and seen.end is not None and self._first("ending"):
            left = duration(max(0.0, seen.end - now))
            found.append(
                (
                    "ending",
                    f"the walltime of the scheduler job {seen.scheduler} ends in {left}, and cluster {self.name} with "
                    "it: save your results",
                )
            )
        return found

    def _first(self, event: str) -> bool:
        new = event not in self._reported
        self._reported.add(event)
        return new


@dataclass(frozen=True)
class Callbacks:
    """The functions of the user's program that the manager calls; they are not saved with a cluster.

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
    def from_options(cls, options: dict[str, Any], on_ending: Any) -> Callbacks:
        """Return the callbacks. Remove `notify` from the options if it is a function; check it if it is a command."""
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
        Is called with the reason why a notice could not be delivered.
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
        """Deliver in this thread the notices that wait because no thread can start."""
        if self._thread is None and self._waiting:
            self._deliver(time.monotonic() + timeout)

    def finish(self, timeout: float) -> None:
        """Wait until all notices are delivered; end a command that takes longer."""
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
                problem = self._notify(notice, min(self.limit, left))
            except Exception as error:  # of the user's function, or of a command that cannot be started
                problem = f"failed: {error!r}"
            if problem:
                self.warn(printable(f"notify for the event {notice.event!r} {problem}"))

    def _notify(self, notice: Notice, limit: float) -> str:
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

    The shell gets only the user's own text. Data that differs from call to call is in the environment and on stdin.
    When the command has ended, processes that it left behind have the rest of the time. Then its whole session is
    killed.

    Parameters
    ----------
    command : str
    environment : mapping
        Variables.
    text : str
        The command's stdin.
    limit : float
        Most seconds that the command may take.
    hurry : threading.Event
        When it is set, the time is over.
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
    output = b""
    try:
        os.set_blocking(process.stderr.fileno(), False)
        with contextlib.suppress(OSError):  # the command does not read its stdin
            process.stdin.write(f"{text}\n".encode(errors="replace"))
            process.stdin.close()
        while (ended := _ended(process.pid)) is False or _members(process.pid):
            if time.monotonic() > deadline or hurry.is_set():
                break
            select.select([process.stderr], [], [], 0.1)
            output = (output + _read(process.stderr.fileno()))[-_OUTPUT:]
            hurry.wait(0.05)
        output = (output + _read(process.stderr.fileno()))[-_OUTPUT:]
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
    words = " ".join(output.decode(errors="replace").split())
    return f"ended with exit code {process.returncode}{f': {words}' if words else ''}" if process.returncode else ""


def _ended(pid: int) -> bool:
    """Whether a child has ended. The child is not reaped, so that no other process can get its id."""
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
    except OSError:  # there is no output now
        return b""


class Notices:
    """Watches one cluster, and notifies the user of its events.

    Parameters
    ----------
    state : ClusterState
    options : ClusterOptions
    callbacks : Callbacks
    cluster : object
        The argument of `on_ending`.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions, callbacks: Callbacks, cluster: object) -> None:
        self.state = state
        self.cluster = cluster
        self.on_ending = callbacks.on_ending
        self.events = Events(state.name, options.ending_notice)
        self.notifier = Notifier(callbacks.notify or options.notify, state.messages.warn)
        state.notify = self.notify

    def check(self) -> None:
        """Notify the user of new events."""
        state = self.state
        if not state.managed:
            return
        for event, message in self.events.due(self._seen(), now=state.now):
            self.notify(event, message)
            if event == "ending" and self.on_ending is not None:
                threading.Thread(target=self._call_on_ending, name="hpcgpu-on-ending", daemon=True).start()

    def _seen(self) -> Seen:
        state = self.state
        paused = {group.name: group.failures.paused for group in state.registry.groups.values()}
        wanted = state.registry.wanted_workers if state.listening else 0
        seen = Seen(workers=len(state.known_workers), wanted=wanted, paused=paused)
        for job in state.scheduler.entries if state.scheduler is not None else ():
            status = job.queue_status
            if status.state is JobState.RUNNING:
                return replace(seen, scheduler=job.job_id or "", start=status.start, end=status.end)
        return seen

    def notify(self, event: str, message: str) -> None:
        """Notify the user of an event. An event of `ONCE` is skipped if an earlier manager reported it."""
        if self.notifier.notify is None:
            return
        directory, token = self.state.dispatcher.directory, self.state.dispatcher.token
        # if a later cluster has the name by now, it reports its own events
        if event in ONCE and directory.is_of(token) and not directory.claim_notice(event):
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
        """Deliver now the notices that wait because no thread can start: the interpreter is ending."""
        self.notifier.deliver_unsent(AT_END)

    async def finish(self) -> None:
        """Deliver the remaining notices, for some seconds at most."""
        if self.notifier.notify is not None:
            await in_thread(self.notifier.finish, AT_END)
