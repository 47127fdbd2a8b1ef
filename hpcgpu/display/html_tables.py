"""Text as HTML, as notebooks show it. All text is escaped here.

There is no style sheet, because viewers of notebooks remove it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a title above each column."""
    return f"<table>{_row('th', titles)}{''.join(_row('td', row) for row in rows)}</table>"


def facts(named: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and texts, a row for each."""
    rows = (
        f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in named
    )
    return f"<table>{''.join(rows)}</table>"


def paragraphs(lines: Iterable[str], *, bold: bool = False) -> str:
    """Return a paragraph for each line."""
    start, end = ("<p><b>", "</b></p>") if bold else ("<p>", "</p>")
    return "".join(f"{start}{html.escape(line)}{end}" for line in lines)


def _row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"
