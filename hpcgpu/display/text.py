"""Columns of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hpcgpu.posix.printable import printable

__all__ = ["columns"]


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], width: int = 140) -> str:
    """Return a table without lines, each row wrapped to the width.

    The content is text: markup and terminal commands have no effect.
    """
    table = Table(*(Column(Text(printable(cell))) for cell in head), box=None)
    for row in rows:
        table.add_row(*(Text(printable(cell, None, lines=True)) for cell in row))
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
