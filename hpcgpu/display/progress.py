"""One line that shows what a program waits for: live on a terminal and in a notebook, else one at each change."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, ClassVar

from rich.console import Console
from rich.status import Status
from rich.text import Text

from hpcgpu.display.counts_and_durations import MANY, duration
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.job_summary import summary
from hpcgpu.posix.printable import printable

_NUMBERS = re.compile(r"(for|within) [\d hmins]+|\d+ s (ago|after)")


def waiting_for(jobs: Iterable[JobInfo]) -> str:
    """Describe the jobs that a program waits for: name, state, how long, why; the first three in full.

    For more than twenty jobs, describe how many are in each state, and why.
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


def ipython() -> Any:
    """Return the shell of IPython or of a Jupyter kernel; None in another program."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


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
        with contextlib.suppress(Exception):  # the kernel may be ending, and the wait must not fail
            if self._handle is None:
                self._handle = self._display(content, raw=True, display_id=True)
            else:
                self._handle.update(content, raw=True)


def _cell() -> _Cell | None:
    """Return the output of the running cell; None outside of a notebook, where nothing is imported."""
    if getattr(ipython(), "kernel", None) is None:
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
    #: When a wait of this process has last checked what it waits for; None while there is none.
    last_check: ClassVar[float | None] = None

    def __init__(self, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)
        self.clock = clock
        self._live: Status | None = None
        self._cell = None if quiet else _cell()
        self._what, self._begun = "", clock()
        self._printed = ("", -1e9)
        #: What remains if the wait ends early; empty if nothing remains.
        self.left = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Progress.last_check = None
        if self._live is not None:
            self._live.stop()
        if self._cell is not None and self._what:  # the line stays in the cell, so it must remain true
            how = "done" if kind is None and not self.left else "not done"
            how += f", {printable(self.left)} left" * bool(self.left)
            self._cell.show(f"{self._what}: {how}, after {duration(self.clock() - self._begun)}")

    def update(self, what: str, detail: str = "") -> None:
        """Show ``what: detail``.

        In a notebook the cell has one line, which changes. If neither a terminal nor a notebook is there, a line is
        printed when `what` changes, when `detail` changes in more than its numbers (at most every 10 s), and every
        minute.
        """
        Progress.last_check = time.monotonic()
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
