"""Columns and bars of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from hpcgpu.posix.printable import printable

_INDENT = " " * 4


def aligned(cells: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Return a line with cells of these sizes; if the first cell is too long, it gets a line of its own above."""
    long = len(cells[0]) > sizes[0]
    line = "  ".join(cell.ljust(size) for cell, size in zip(("" if long else cells[0], *cells[1:]), sizes, strict=True))
    return [cells[0]] * long + [line.rstrip()]


def below(text: str, width: int) -> list[str]:
    """Return the lines of a text that stands below a row of a table, because the row has no space for it."""
    return textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)


def bar(share: float, size: int) -> str:
    """Return a bar of `size` characters, filled up to `share`."""
    full = round(max(0.0, min(1.0, share)) * size)
    return "\N{FULL BLOCK}" * full + "\N{LIGHT SHADE}" * (size - full)


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], width: int = 140) -> str:
    """Return a table without lines, each row wrapped to the width.

    The content is text: markup and terminal commands have no effect.
    """
    from rich.console import Console  # takes longer than this package; the jobs that import it print no table
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(Text(printable(cell))) for cell in head), box=None)
    for row in rows:
        table.add_row(*(Text(printable(cell, None, lines=True)) for cell in row))
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
