"""One line that shows what a program waits for: live on a terminal and in a notebook, else one at each change."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from hpcgpu.display.jobinfo import JobInfo
from hpcgpu.display.summary import summary
from hpcgpu.display.words import MANY
from hpcgpu.posix.printable import printable

__all__ = ["Progress", "duration", "ending", "waiting_for"]

_NUMBERS = re.compile(r"(for|within) [\d hmins]+|\d+ s (ago|after)")


def duration(seconds: float) -> str:
    """Return a duration for people: ``42 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def waiting_for(jobs: Iterable[JobInfo]) -> str:
    """Describe the jobs that a program waits for: name, state, how long, why; the first three in full.

    Of more than twenty, say how many are in each state and why.
    """
    listed = list(jobs)
    if len(listed) > MANY:
        return f"{summary(listed)}, the first for {duration(max(job.waited for job in listed))}"
    parts = []
    for job in listed[:3]:
        known_by = f"{job.kind} job {job.id or job.name}"
        if job.state == "running":
            parts.append(f"{known_by} runs on {job.node or 'its node'}, {job.reason or 'its processes are starting'}")
        else:
            parts.append(f"{known_by} {job.state} for {duration(job.waited)}{', ' if job.reason else ''}{job.reason}")
    if len(listed) > 3:
        parts.append(f"{len(listed) - 3} more")
    return "; ".join(parts)


def ending(ids: Sequence[str]) -> str:
    """Name the jobs that must end: ``jobs 12 13``; the first five."""
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return f"{'jobs' if len(ids) > 1 else 'job'} {' '.join(ids[:5])}{more}"


class _Cell:
    """A line in the output of a notebook's cell, which changes in place. It needs IPython alone, no widget.

    Parameters
    ----------
    display : callable
        ``IPython.display.display``.
    """

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._line = ""

    def show(self, line: str) -> None:
        """Show this line instead of the last one."""
        if line == self._line:
            return
        content, self._line = {"text/plain": f"hpcgpu: {line}"}, line
        with contextlib.suppress(Exception):  # a kernel that is ending; what is waited for must not fail because of it
            if self._handle is None:
                self._handle = self._display(content, raw=True, display_id=True)
            else:
                self._handle.update(content, raw=True)


def _cell() -> _Cell | None:
    """Return the output of the cell that runs, None outside of a notebook. It imports nothing there."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return _Cell(display)


class Progress:
    """Shows what a program waits for: on stderr, or in the output of a notebook's cell.

    Parameters
    ----------
    quiet : bool
        Show nothing.
    clock : callable, default time.monotonic
    """

    REPEAT = 60.0
    CHANGE = 10.0

    def __init__(self, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)
        self.clock = clock
        self._live: Status | None = None
        self._cell = None if quiet else _cell()
        self._what, self._begun = "", clock()
        self._printed = ("", -1e9)
        #: What is left of what was waited for, where the wait ends before its time; empty if nothing is.
        self.left = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._cell is not None and self._what:  # it stays in the cell, so it must be true from now on
            how = "done" if kind is None and not self.left else "not done"
            how += f", {printable(self.left)} left" * bool(self.left)
            self._cell.show(f"{self._what}: {how}, after {duration(self.clock() - self._begun)}")

    def update(self, what: str, detail: str = "") -> None:
        """Show ``what: detail``.

        In a notebook the cell has one line, which changes. Away from both a line is printed when `what` changes, when
        `detail` changes in more than its numbers (but not more often than each 10 s), and each minute.
        """
        if self.quiet:
            return
        line, self._what = printable(f"{what}: {detail}" if detail else what), printable(what)
        if self._cell is not None:
            self._cell.show(line)
            return
        if self.console.is_terminal and not self.console.is_dumb_terminal:  # rich shows nothing that moves on TERM=dumb
            if self._live is None:
                self._live = self.console.status(Text(line))
                self._live.start()
            self._live.update(Text(line))
            return
        last, at = self._printed
        now = self.clock()
        changed = _NUMBERS.sub("", line) != _NUMBERS.sub("", last)
        if not last.startswith(what) or (changed and now - at >= self.CHANGE) or now - at >= self.REPEAT:
            self.console.print(f"hpcgpu: {line}", markup=False, soft_wrap=True)  # one line in a log file, however long
            self._printed = (line, now)
