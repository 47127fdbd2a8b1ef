"""How all commands print: text, tables, JSON, and jobs."""

from __future__ import annotations

import json
import os
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

import click

from hpcgpu.posix.printable import printable
from hpcgpu.ssh.far_side import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpcgpu.display.job_info import JobInfo

#: Width of a table that is not for a terminal: one line per row.
_WIDE = 1000
_DAY = 86400.0

all_option = click.option("--all", "every", is_flag=True, help="Show each job, also of clusters with more than 20.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def echo(text: str, *, err: bool = False) -> None:
    """Print lines for people; control characters in them are shown as text."""
    click.echo(printable(text, None, lines=True), err=err)


def warn_unanswered(problem: str) -> None:
    """Print that a queue did not answer."""
    echo(f"hpcgpu: {problem}", err=True)


def show(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table for people: in the width of the terminal, or without a terminal one line per row."""
    from hpcgpu.display.text_columns import columns

    click.echo(columns(head, rows, width()))


def show_json(value: object) -> None:
    """Print JSON, as `hpcgpu.cli.json_types` describes it."""
    click.echo(json.dumps(value, indent=1, default=lambda one: vars(one) if is_dataclass(one) else str(one)))


def show_jobs(jobs: list[JobInfo], *, every: bool = False, how: str, now: float | None = None) -> None:
    """Print a table of jobs. If there are many, and `every` is false, print a summary and the command `how` for all."""
    from hpcgpu.display.job_table import JobTable

    click.echo(JobTable(jobs, now=now).text(width(), every=every, how=f"`{how}` shows all"))


def width() -> int:
    """Return the width of the output: that of the terminal; without a terminal, a row is one line."""
    from rich.console import Console

    console = Console()
    context = click.get_current_context(silent=True)
    near = context.find_object(Request) if context is not None else None
    return (near.columns or _WIDE) if near is not None else console.width if console.is_terminal else _WIDE


def person_waits() -> bool:
    """Whether a person waits for the command: it runs in a terminal, here or on the machine that asks by ssh."""
    context = click.get_current_context(silent=True)
    near = context.find_object(Request) if context is not None else None
    return near.interactive if near is not None else os.isatty(0)


def age(seconds: float) -> str:
    """Return an age as text: in days, if it is more than two."""
    from hpcgpu.display.counts_and_durations import duration

    return f"{seconds / _DAY:.0f} days" if seconds > 2 * _DAY else duration(seconds)
