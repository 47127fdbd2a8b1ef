"""The table of a cluster's jobs, as text and as HTML."""

from __future__ import annotations

import html

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcgpu.display.progress import duration
from hpcgpu.jobs import JobInfo

__all__ = ["JobTable"]

_COLUMNS = ("id", "kind", "name", "state", "waited", "node", "workers", "reason")


class JobTable(list[JobInfo]):
    """A list of `JobInfo` that shows itself as a table."""

    def _rows(self) -> list[tuple[str, ...]]:
        return [(job.id, job.kind, job.name, job.state, duration(job.waited), job.node, str(job.workers), job.reason) for job in self]

    def __repr__(self) -> str:
        return self.text(140)

    def text(self, width: int) -> str:
        """Return the table in so many columns of text."""
        table = Table(*_COLUMNS, box=None)
        for row in self._rows():
            table.add_row(*(Text(cell) for cell in row))
        console = Console(width=width, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows())
        return f"<table><tr>{head}</tr>{body}</table>"
