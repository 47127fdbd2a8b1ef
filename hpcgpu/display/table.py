"""The table of a cluster's jobs, as text and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable

from hpcgpu.display.jobinfo import JobInfo
from hpcgpu.display.progress import duration
from hpcgpu.display.summary import examples, summary
from hpcgpu.display.text import columns
from hpcgpu.display.words import MANY

__all__ = ["JobTable", "why"]

_COLUMNS = ("id", "kind", "name", "state", "waited", "node", "workers", "reason")


#: How a program sees all of many jobs.
_HOW = "`print(cluster.jobs.text(140, every=True))` shows all"
#: Seconds from which on the age of the queue's answer is shown.
_FRESH = 3.0


def why(job: JobInfo, *, now: float) -> str:
    """Return why a job waits or ended, and when it is expected to start, as far as that is known."""
    parts = [job.reason]
    if job.expected_start is not None:
        parts.append(f"the queue expects to start it in {duration(max(0.0, job.expected_start - now))}")
    if job.usual_wait is not None:
        parts.append(f"such jobs waited {duration(job.usual_wait)} before")
    return "; ".join(filter(None, parts))


class JobTable(list[JobInfo]):
    """A list of `JobInfo` that shows itself as a table; of more than twenty a summary and a few rows.

    Parameters
    ----------
    jobs : iterable of JobInfo
    age : float, default 0
        Seconds since the queue last reported the states of the jobs.
    now : float, optional
        Epoch seconds. With it the table says when a pending job is expected to start.
    """

    def __init__(self, jobs: Iterable[JobInfo] = (), age: float = 0.0, now: float | None = None) -> None:
        super().__init__(jobs)
        self.age, self.now = age, now

    def _note(self) -> str:
        """Return how old it is; empty if it is fresh."""
        return f"States as of the queue's last answer, {duration(self.age)} ago." if self and self.age >= _FRESH else ""

    def _shown(self, every: bool) -> list[tuple[str, ...]]:
        """Return the rows that are shown."""
        return [
            (job.id, job.kind, job.name, job.state, duration(job.waited), job.node, str(job.workers), self._why(job))
            for job in (self if every or len(self) <= MANY else examples(self))
        ]

    def _why(self, job: JobInfo) -> str:
        return job.reason if self.now is None else why(job, now=self.now)

    def _summary(self, rows: int, how: str) -> str:
        """Return what stands for the rows that are not shown; empty if all are."""
        return f"{len(self)} jobs: {summary(self)}\n{rows} of them, {how}:" if rows < len(self) else ""

    def __repr__(self) -> str:
        return self.text(140)

    def text(self, width: int, *, every: bool = False, how: str = _HOW) -> str:
        """Return the table for this width of text.

        Parameters
        ----------
        width : int
        every : bool, default False
            Whether all of more than twenty jobs are shown.
        how : str, optional
            Says how all jobs are seen where only some are shown.
        """
        rows = self._shown(every)
        about = [textwrap.fill(line, width) for line in self._summary(len(rows), how).splitlines()]
        return "\n".join([*about, columns(_COLUMNS, rows, width), *filter(None, [self._note()])])

    def _repr_html_(self) -> str:
        rows = self._shown(False)
        about = "".join(f"<p>{html.escape(line)}</p>" for line in self._summary(len(rows), _HOW).splitlines())
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        note = f"<p>{html.escape(self._note())}</p>" if self._note() else ""
        return f"{about}<table><tr>{head}</tr>{body}</table>{note}"
