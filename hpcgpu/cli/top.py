"""`hpcgpu top`: a cluster live in the terminal, its jobs and GPUs with their clocks."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.host_option import chosen_host, host_option, snapshot_by_ssh
from hpcgpu.cli.names import cluster_name
from hpcgpu.posix.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from hpcgpu.display.job_info import JobInfo
    from hpcgpu.existing_clusters.snapshot import GPUInfo, Snapshot


#: Seconds between two pictures.
_INTERVAL = 2.0
#: Age of a picture, in seconds, from which the age is shown.
_OLD = 10.0
#: Width of output that is not for a terminal: no line is cut.
_WIDE = 1000
#: Characters of a bar.
_BAR = 6
#: Lines by which a key scrolls, as in `less` and `vi`. The escape sequences are the arrows, page up and page down.
_MOVES = {"k": -1, "\x1b[A": -1, "j": 1, "\x1b[B": 1, "b": -10, "\x1b[5~": -10, " ": 10, "\x1b[6~": 10, "g": -(10**9)}
#: The order of the jobs: those that cost GPU hours first.
_ORDER = {"running": 0, "completing": 1, "pending": 2, "unknown": 3}


@click.command()
@cluster_name
@host_option(exposed=True)
def top(name: str, host: str | None) -> None:
    """Show a cluster live: each job with its state, wait and time left, each GPU with its use, memory and power.

    Press `q` to quit, and the arrow keys to scroll through many jobs. If the output is not a terminal, it prints the
    cluster once.

    \b
    Example: hpcgpu top demo
    """
    from rich.console import Console

    from hpcgpu.existing_clusters.lookup import locate
    from hpcgpu.existing_clusters.snapshot import Observer
    from hpcgpu.ssh.login import Login

    console = Console(highlight=False)
    host = chosen_host(host, click.get_current_context())
    login = Login(host) if host is not None else None
    take = Observer(locate(name)).snapshot if login is None else lambda: snapshot_by_ssh(login, name)
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        Console(width=_WIDE, highlight=False).print(picture(take(), now=time.time(), width=_WIDE))
        return
    with console.status(f"reading the state of cluster {printable(name)}"):
        first = take()
    with contextlib.suppress(KeyboardInterrupt):
        _live(console, take, first)


def _live(console: Console, take: Callable[[], Snapshot], first: Snapshot) -> None:
    """Show one picture after the other until the user presses `q`."""
    from rich.live import Live

    latest, error, end = first, "", threading.Event()

    def watch() -> None:  # in a thread: the keys must work while the queue or the scheduler is slow
        nonlocal latest, error
        while not end.wait(_INTERVAL):
            try:
                latest, error = take(), ""
            except Exception as problem:
                error = str(problem)

    threading.Thread(target=watch, name="hpcgpu-top", daemon=True).start()
    first_line = 0
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now, width, height = time.time(), console.width, console.height
            first_line = max(0, min(first_line, len(_job_lines(latest, now=now, width=width)) - 1))
            live.update(
                picture(latest, now=now, width=width, height=height, first=first_line, error=error), refresh=True
            )
            pressed = key(0.5)
            if pressed in ("q", "Q"):
                break
            first_line += _MOVES.get(pressed, 0)
    end.set()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys without echo; yields a function that waits for a key, and returns "" after a timeout."""
    try:
        import termios
        import tty
    except ImportError:  # on Windows only Ctrl-C is a key

        def none(timeout: float) -> str:
            time.sleep(timeout)
            return ""

        yield none
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key(timeout: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout)
        return os.read(descriptor, 8).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def picture(
    found: Snapshot, *, now: float, width: int, height: int | None = None, first: int = 0, error: str = ""
) -> RenderableType:
    """Draw a snapshot for a terminal.

    Parameters
    ----------
    found : Snapshot
    now : float
        Epoch seconds.
    width : int
        Characters of a line: reasons and warnings are wrapped.
    height : int, optional
        Lines of the terminal. Default: all jobs are shown.
    first : int, default 0
        The first line of the jobs that is shown.
    error : str, optional
        Why there is no later snapshot.
    """
    from rich.console import Group
    from rich.text import Text

    head = [Text(line, no_wrap=True) for text in _head(found, now=now, error=error) for line in _wrapped(text, width)]
    lines = _job_lines(found, now=now, width=width)
    shown = lines if height is None else lines[first : first + max(1, height - len(head) - 3)]
    more = len(lines) - first - len(shown)
    keys = "Ctrl-C or q ends" + ", arrows move" * (more > 0 or first > 0) + f", {more} more lines" * (more > 0)
    foot = [] if height is None else [Text(keys, style="dim")]
    return Group(*head, Text(), *shown, *foot)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False)


def _head(found: Snapshot, *, now: float, error: str) -> list[str]:
    from hpcgpu.display.counts_and_durations import counted, duration

    use = [f"{found.idle} idle"] * bool(found.devices)
    use += [] if found.utilization is None else [f"{found.utilization:.0f} % in use"]
    left = [] if found.time_left is None else [f"time left {duration(found.time_left)}"]
    lines = [
        f"{found.name} on {found.system}: {found.state}",
        "   ".join(
            [
                counted(found.workers, "worker"),
                ", ".join([counted(found.gpus, "GPU"), *use]),
                *left,
                f"{found.gpu_hours:.2f} GPU hours",
            ]
        ),
    ]
    for group in found.groups:
        size = f"{counted(group['target'], 'job')} wanted" if group["target"] is not None else "no decision yet"
        if group["maximum"] is not None:
            size += f", adaptive from {group['minimum']} to {group['maximum']}: {group['reason']}"
        if group["maximum_gpu_hours"] is not None:
            size += f", {group['gpu_hours']:.2f} of {group['maximum_gpu_hours']:g} GPU hours"
        lines.append(f"group {group['name']}: {size}")
        lines += [f"  paused: {group['paused']}"] * bool(group["paused"])
    lines += [f"manager: {found.manager or 'none'}"] * (found.state == "running")
    lines += [f"restart: {text}" for text in found.restart]
    lines += [f"ended: {found.end}"] * bool(found.end)
    lines += [f"warning: {text}" for text in found.warnings]
    lines += [f"problem: {text}" for text in (found.problem, error) if text]
    if now - found.time >= _OLD:
        lines.append(f"as of {duration(now - found.time)} ago")
    return [printable(line.split("\n", 1)[0]) for line in lines]


def _job_lines(found: Snapshot, *, now: float, width: int) -> list[Text]:
    """Return a line for each job that has not ended, and below it the reason for the wait, or the job's GPUs."""
    gpus: dict[str, list[GPUInfo]] = {}
    for gpu in found.devices:
        gpus.setdefault(gpu.job, []).append(gpu)
    jobs = [job for job in found.jobs if job.state in _ORDER] or found.jobs
    jobs = sorted(jobs, key=lambda job: (job.kind != "scheduler", _ORDER.get(job.state, len(_ORDER))))
    widths = [max((len(text) for text in column), default=0) for column in zip(*map(_cells, jobs), strict=True)]
    workers = max((len(gpu.worker) for gpu in found.devices), default=0)
    lines = []
    for job in jobs:
        lines += _lines_of_job(job, widths, now=now, width=width)
        lines += [_gpu_line(gpu, workers, now=now) for gpu in gpus.get(job.name, ())]
    return lines


def _cells(job: JobInfo) -> tuple[str, ...]:
    from hpcgpu.display.counts_and_durations import duration

    clock = f" for {duration(job.waited)}" if job.state == "pending" else ""
    clock = f", {duration(job.time_left)} left" if job.time_left is not None else clock
    return printable(job.id), printable(job.name), f"{job.state}{clock}", printable(job.node)


def _lines_of_job(job: JobInfo, widths: list[int], *, now: float, width: int) -> list[Text]:
    from rich.text import Text

    from hpcgpu.display.job_table import why

    style = {"pending": "yellow", "unknown": "yellow", "running": "green"}.get(job.state, "")
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, (text, size) in enumerate(zip(_cells(job), widths, strict=True)):
        line.append(f"{text:{size}}  ", style=style if number == 2 else "bold")
    return [line, *(Text(text, no_wrap=True) for text in _wrapped(printable(why(job, now=now)), width, " " * 4))]


def _gpu_line(gpu: GPUInfo, width: int, *, now: float) -> Text:
    from dask.utils import format_bytes
    from rich.text import Text

    from hpcgpu.display.counts_and_durations import duration
    from hpcgpu.display.text_columns import bar

    use = (
        f"{bar(gpu.utilization / 100, _BAR)} {gpu.utilization:3.0f} %"
        if gpu.utilization is not None
        else "use not known"
    )
    memory = ""
    if gpu.memory_used is not None and gpu.memory_total:
        memory = f"{bar(gpu.memory_used / gpu.memory_total, _BAR)} {format_bytes(gpu.memory_used):>10}"
    power = f"{gpu.power:3.0f} W" if gpu.power is not None else ""
    idle = f"idle {duration(max(0.0, now - gpu.idle_since))}" if gpu.idle_since is not None else ""
    parts = [f"{gpu.worker:{width}}", use, memory, power, idle, gpu.model.removeprefix("NVIDIA ")]
    text = printable("    " + "  ".join(filter(None, parts)))
    return Text(text, style="yellow" if idle else "", no_wrap=True, overflow="ellipsis")
