"""The table of a cluster's jobs, as text and as HTML."""

from __future__ import annotations

import html

from hpcgpu.display.jobinfo import JobInfo
from hpcgpu.display.progress import duration
from hpcgpu.display.text import columns

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
        return columns(_COLUMNS, self._rows(), width)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows())
        return f"<table><tr>{head}</tr>{body}</table>"
