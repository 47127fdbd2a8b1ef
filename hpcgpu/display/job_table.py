"""The table of a cluster's jobs, as text and as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from hpcgpu.display.counts_and_durations import MANY, duration
from hpcgpu.display.html import html
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.job_summary import examples, summary
from hpcgpu.display.text_columns import aligned, below, columns
from hpcgpu.posix.printable import printable

_COLUMNS = ("id", "kind", "name", "state", "waited", "node", "workers", "reason")
_HTML = "{{ paragraphs(about) }}{{ table(columns, rows) }}{{ paragraphs(notes) }}"


#: How a program shows all jobs of a long table.
_HOW = "`print(cluster.jobs.text(140, every=True))` shows all"
#: Characters that a reason needs beside its job. In a table with fewer, the reason stands below its job.
_REASON = 40
#: The age of the queue's answer is shown after this many seconds.
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
    """A list of `JobInfo` that shows itself as a table; for more than twenty jobs, as a summary and a few rows.

    Parameters
    ----------
    jobs : iterable of JobInfo
    age : float, default 0
        Seconds since the queue last reported the states of the jobs.
    now : float, optional
        Epoch seconds. With it the table shows when a pending job is expected to start.
    """

    def __init__(self, jobs: Iterable[JobInfo] = (), age: float = 0.0, now: float | None = None) -> None:
        super().__init__(jobs)
        self.age, self.now = age, now

    def _note(self) -> str:
        """Return a note on the age of the table; empty if it is fresh."""
        return f"States as of the queue's last answer, {duration(self.age)} ago." if self and self.age >= _FRESH else ""

    def _shown(self, every: bool) -> list[tuple[str, ...]]:
        """Return the rows that are shown."""
        jobs = self if every or len(self) <= MANY else examples(self)
        reasons = [job.reason if self.now is None else why(job, now=self.now) for job in jobs]
        return [
            (job.id, job.kind, job.name, job.state, duration(job.waited), job.node, str(job.workers), reason)
            for job, reason in zip(jobs, reasons, strict=True)
        ]

    def _summary(self, rows: int, how: str) -> str:
        """Return the summary of the rows that are not shown; empty if all rows are shown."""
        return f"{len(self)} jobs: {summary(self)}\n{rows} of them, {how}:" if rows < len(self) else ""

    def __repr__(self) -> str:
        return self.text(140)

    def text(self, width: int, *, every: bool = False, how: str = _HOW) -> str:
        """Return the table for this width of text.

        Parameters
        ----------
        width : int
        every : bool, default False
            Whether all jobs are shown, even if there are more than twenty.
        how : str, optional
            How to see all jobs, for a table that shows only some.
        """
        rows = self._shown(every)
        about = [textwrap.fill(line, width) for line in self._summary(len(rows), how).splitlines()]
        return "\n".join([*about, _fitted(rows, width), *filter(None, [self._note()])])

    def _repr_html_(self) -> str:
        rows = self._shown(False)
        about = self._summary(len(rows), _HOW).splitlines()
        notes = [*filter(None, [self._note()])]
        return html(_HTML, about=about, columns=_COLUMNS, rows=rows, notes=notes)


def _fitted(rows: list[tuple[str, ...]], width: int) -> str:
    """Return a line for each job; if the line has no space for the reasons, they stand below it."""
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    room = width - sum(widths[:-1]) - 2 * len(widths)
    places = sorted(range(len(widths) - 1), key=lambda place: _COLUMNS[place] != "name")  # the name is first
    name, *others = (widths[place] for place in places)
    sizes = [min(name, width - sum(others) - 2 * len(others)), *others]
    if room >= min(widths[-1], _REASON) or sizes[0] < len("name"):
        return columns(_COLUMNS, rows, width)
    lines = aligned([_COLUMNS[place] for place in places], sizes)
    for row in rows:
        cells = [printable(cell) for cell in row]
        lines += [*aligned([cells[place] for place in places], sizes), *below(cells[-1], width)]
    return "\n".join(lines)
