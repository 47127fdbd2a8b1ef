"""The table of a cluster's jobs, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable

from hpcgpu.display.jobinfo import JobInfo
from hpcgpu.display.progress import duration
from hpcgpu.display.text import columns

__all__ = ["JobTable"]

_COLUMNS = ("id", "kind", "name", "state", "waited", "node", "workers", "reason")


#: Seconds from which on the age of the queue's answer is shown.
_FRESH = 3.0


class JobTable(list[JobInfo]):
    """A list of `JobInfo` that shows itself as a table.

    Parameters
    ----------
    jobs : iterable of JobInfo
    age : float, default 0
        Seconds since the queue last reported the states of the jobs.
    """

    def __init__(self, jobs: Iterable[JobInfo] = (), age: float = 0.0) -> None:
        super().__init__(jobs)
        self.age = age

    def _note(self) -> str:
        """Return how old it is; empty if it is fresh."""
        return f"States as of the queue's last answer, {duration(self.age)} ago." if self and self.age >= _FRESH else ""

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (job.id, job.kind, job.name, job.state, duration(job.waited), job.node, str(job.workers), job.reason)
            for job in self
        ]

    def __repr__(self) -> str:
        return self.text(140)

    def text(self, width: int) -> str:
        """Return the table for this width of text."""
        table = columns(_COLUMNS, self._rows(), width)
        return f"{table}\n{note}" if (note := self._note()) else table

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows()
        )
        note = f"<p>{html.escape(self._note())}</p>" if self._note() else ""
        return f"<table><tr>{head}</tr>{body}</table>{note}"
