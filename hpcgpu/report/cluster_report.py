"""The bill of a running or ended cluster: the cost and the work of its jobs, and what would cost less.

Its sources are the journal, the scheduler's record (`hpcgpu.store.usage_file`), and what queue and accounting still
report. `hpcgpu.report.bill` joins them.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dask.utils import format_bytes

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.display.counts_and_durations import MANY, counted, duration
from hpcgpu.display.html import html
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.job_summary import examples, summary
from hpcgpu.display.text_columns import aligned, below, columns
from hpcgpu.errors import BatchError, OptionError
from hpcgpu.existing_clusters.between_schedulers import between_schedulers
from hpcgpu.existing_clusters.describe_jobs import described
from hpcgpu.existing_clusters.lookup import batch_of, system_of
from hpcgpu.existing_clusters.query_jobs import jobs_without_end
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import run
from hpcgpu.report.advice import advice
from hpcgpu.report.bill import Gap, JobBill, Share, bill, gpus_of, share, total, without_scheduler
from hpcgpu.runtime.scheduler_connection import answer_of
from hpcgpu.store import saved_options, usage_file
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import Submit
from hpcgpu.store.usage_file import JobUsage

_COLUMNS = (
    *("id", "name", "waited", "ran", "GPU hours", "busy", "before", "after", "GPU %, peak", "memory, peak, all"),
    *("tasks", "lost", "sent", "spilled", "end"),
)
#: The columns of a job's first line if not all columns fit.
_FIRST = ("name", "ran", "GPU hours", "busy", "before", "after")
#: Characters of the last column that fit beside the other columns.
_END = 30
_BODY = "<div class='hpcgpu-report'>{{ facts(head) }}{{ table(columns, rows) }}</div>"
_PAGE = f"""<!doctype html>
<html lang='en'><head><meta charset='utf-8'><title>Report of cluster {{{{ name }}}}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em }}
table {{ border-collapse: collapse; margin-bottom: 1.5em }}
td, th {{ padding: .2em .7em; text-align: left; border-bottom: 1px solid #8884 }}
</style></head>
<body><h1>Report of cluster {{{{ name }}}}</h1>{_BODY}</body></html>"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The bill of a cluster: what its jobs cost, what they did, and what would cost less.

    Attributes
    ----------
    name, system, directory : str
    time : float
        Epoch seconds at which it was made.
    ended : bool
        Whether all jobs of the cluster have ended.
    jobs : list of JobBill
        In the order of their submits.
    advice : list of str
        Two sentences at most.
    problems : list of str
        What is not known, and why.
    restart : list of str
        As in `hpcgpu.existing_clusters.snapshot.Snapshot`.
    """

    name: str
    system: str
    directory: str
    time: float
    ended: bool
    jobs: list[JobBill] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    restart: list[str] = field(default_factory=list)

    @property
    def gpu_hours(self) -> float:
        """GPU hours of all jobs, as far as they are known."""
        return total(job.gpu_hours for job in self.jobs)

    @property
    def scheduler_gpu_hours(self) -> float:
        """GPU hours of the scheduler job."""
        return total(job.gpu_hours for job in self.jobs if job.kind == "scheduler")

    @property
    def shortened(self) -> bool:
        """Whether the text shows only some of the jobs, because there are many."""
        return len(self._shown(False)) < len(self.jobs)

    def share(self, part: str) -> Share:
        """Return how much of the GPU hours was ``"before"`` the first task, ``"busy"``, or idle ``"after"`` it.

        And how much was ``"waiting"`` for the next scheduler.
        """
        return share(self.jobs, part, self.gpu_hours)

    def as_json(self) -> dict[str, Any]:
        """Return what ``hpcgpu report --json`` prints."""
        workers = [job for job in self.jobs if job.kind == "worker"]
        done, lost = (_sum(getattr(job, name) for job in workers) for name in ("tasks_done", "tasks_lost"))
        return asdict(self) | {
            "gpu_hours": _sum(job.gpu_hours for job in self.jobs),
            "scheduler_gpu_hours": _sum(job.gpu_hours for job in self.jobs if job.kind == "scheduler"),
            "before": _sum(job.before for job in workers),
            "busy": _sum(job.busy for job in workers),
            "after": _sum(job.after for job in workers),
            "waiting": _sum(job.waiting for job in workers),
            "tasks_done": None if done is None else int(done),
            "tasks_lost": None if lost is None else int(lost),
        }

    def __repr__(self) -> str:
        return self.text(140)

    def text(self, width: int, *, every: bool = False) -> str:
        """Return the report as text of this width.

        Parameters
        ----------
        width : int
        every : bool, default False
            Whether all of more than twenty jobs are shown.
        """
        lines = [f"{name:<10} {text}" for name, text in self._head()]
        rows = [_row(job) for job in self._shown(every)]
        lines = [textwrap.fill(line, width, subsequent_indent=" " * 11) for line in lines]
        return "\n".join([*lines, "", _table(rows, width)]) if rows else "\n".join(lines)

    def _shown(self, every: bool) -> list[JobBill]:
        return self.jobs if every or len(self.jobs) <= MANY else examples(self.jobs)

    def _head(self) -> list[tuple[str, str]]:
        """Return the lines above the table: names and texts."""
        workers = sum(job.kind == "worker" for job in self.jobs)
        scheduler = " and the scheduler job" * any(job.kind == "scheduler" for job in self.jobs)
        state = "its jobs have ended" if self.ended else "not all of its jobs have ended"
        lines = [
            ("cluster", f"{self.name} on {self.system}: {state}"),
            ("GPU hours", f"{_number(self.gpu_hours)} of {counted(workers, 'worker job')}{scheduler}"),
        ]
        if self.gpu_hours:
            lines += [("", text) for text in self._parts()]
        done, lost = (total(getattr(job, name) for job in self.jobs) for name in ("tasks_done", "tasks_lost"))
        if any(job.tasks_done is not None for job in self.jobs):
            moved = f"{format_bytes(int(total(job.sent for job in self.jobs)))} sent between workers"
            lines.append(("tasks", f"{done:.0f} done, {lost:.0f} lost with workers; {moved}"))
        if len(self.jobs) > MANY:
            lines.append(("jobs", f"{len(self.jobs)}: {summary(self.jobs)}; a few of them:"))
        lines += [("restart" if not number else "", text) for number, text in enumerate(self.restart)]
        lines += [("advice", text) for text in self.advice]
        lines += [("not known", text) for text in self.problems]
        return [(name, printable(text, None)) for name, text in lines]

    def _parts(self) -> list[str]:
        """Return how the GPU hours were used."""
        named = (("busy", "with tasks"), ("before", "before the first task"), ("after", "idle after the first task"))
        parts = [(self.share(part), words) for part, words in named]
        parts.append((Share(self.scheduler_gpu_hours, self.gpu_hours), "of the scheduler job"))
        if (waiting := self.share("waiting")).hours:
            parts.append((waiting, "waiting for the next scheduler"))
        rest = self.gpu_hours - sum(part.hours for part, _ in parts)
        if rest > 0.005 * self.gpu_hours:
            parts.append((Share(rest, self.gpu_hours), "of jobs without usage data"))
        return [f"{_number(part.hours)} ({part.per_cent:.0f} %) {words}" for part, words in parts]

    def _repr_html_(self, template: str = _BODY) -> str:
        rows = [[printable(cell, None) for cell in _row(job)] for job in self._shown(False)]
        return html(template, name=printable(self.name, None), head=self._head(), columns=_COLUMNS, rows=rows)

    def page(self) -> str:
        """Return the report as an HTML page, as ``hpcgpu report --html FILE`` writes it."""
        return f"{self._repr_html_(_PAGE)}\n"


def _table(rows: list[tuple[str, ...]], width: int) -> str:
    """Return one line for each job; if not all columns fit, two: figures, and below them the other columns."""
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    if sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], _END) <= width:
        return columns(_COLUMNS, rows, width)
    name, *others = (size for column, size in zip(_COLUMNS, widths, strict=True) if column in _FIRST)
    sizes = [min(name, width - sum(others) - 2 * len(others)), *others]
    lines = aligned(_FIRST, sizes)
    for row in rows:
        job = dict(zip(_COLUMNS, map(printable, row), strict=True))
        lines += aligned([job.pop(column) for column in _FIRST], sizes)
        end, known = job.pop("end"), [f"{column} {cell}" for column, cell in job.items() if cell != "-"]
        lines += below("; ".join([*known, end]), width)
    return "\n".join(lines)


_ENDED = {"ended", *(state.value for state in JobState if state.ended)}
#: Seconds for the scheduler to write its record.
_TIMEOUT = 10.0


def report(directory: ClusterDirectory) -> Report:
    """Return the bill of a running or ended cluster. Queries the queue and the scheduler once."""
    contact = directory.contact()
    if contact is not None and not directory.closing and not directory.has_ended(contact.job_id):
        with suppress(OSError, TimeoutError, ValueError):  # the scheduler's file is a minute old at most
            run(answer_of(directory, contact, lambda scheduler: scheduler.hpcgpu_usage(), _TIMEOUT))
    now, problems = time.time(), list[str]()
    kept = usage_file.read(directory.path)
    problems += kept.problems
    if not kept.jobs and not kept.problems:
        problems.append(f"What the jobs did: the scheduler has not written {directory.path / usage_file.FILE}.")
    elif not kept.whole and not kept.problems:
        problems.append(f"What the oldest jobs did: {directory.path / usage_file.FILE} has the last ones only.")
    options = _options(directory, problems)
    submits = [submit for submit in directory.submits() if not submit.refused]
    by_hand = _by_hand(submits, kept.jobs)
    statuses: dict[str, JobStatus] = {}
    try:
        statuses = jobs_without_end(directory, batch_of(directory), [submit for submit, _ in by_hand])
    except BatchError as error:
        problems.append(str(error))
    problems += _more_connected(submits, options, kept.jobs)
    closed, left = directory.ended_at(), contact.job_id if contact is not None else ""
    written = max((job.last for job in kept.jobs.values()), default=None) if kept.whole else None

    def billed(submit: Submit, gpus: int | None, gaps: Sequence[Gap] = ()) -> JobBill:
        job_id = submit.job_id or ""
        used, status = kept.jobs.get(job_id), statuses.get(job_id)
        return bill(submit, used, status, gpus, now=now, closed=closed, written=written, gaps=gaps)

    counted_jobs = [*((one, gpus_of(one, options, kept.jobs)) for one in submits), *by_hand]
    gaps = list[Gap]()
    if options is not None and options.options.cluster.on_scheduler_end == "restart":
        schedulers = [billed(submit, gpus) for submit, gpus in counted_jobs if submit.kind == "scheduler"]
        served = {left: None, **{job.id: next(iter(job.firsts), None) for job in kept.jobs.values()}}
        gaps = without_scheduler(schedulers, served, now=now, closed=closed)
    jobs = [billed(submit, gpus, gaps) for submit, gpus in counted_jobs]
    shown = [described(submit, statuses.get(submit.job_id or ""), now=now) for submit, _ in counted_jobs]
    shown = [_with_usage(job, billed_job) for job, billed_job in zip(shown, jobs, strict=True)]
    restart = between_schedulers(directory, shown, now=now)
    return Report(
        name=directory.path.name,
        system=system_of(directory),
        directory=str(directory.path),
        time=now,
        ended=all(job.state in _ENDED for job in jobs),
        jobs=jobs,
        advice=advice(jobs, kept.jobs.values()),
        problems=[*problems, *_unknown(jobs), *directory.damage()],
        restart=restart.sentences if restart is not None else [],
    )


def _with_usage(job: JobInfo, used: JobBill) -> JobInfo:
    """Return a job with the times that its workers showed, where the queue has forgotten them."""
    return replace(job, started=used.started, ended=used.ended, gpus=used.gpus or 0)


def _by_hand(submits: Iterable[Submit], kept: Mapping[str, JobUsage]) -> list[tuple[Submit, int]]:
    """Return jobs that had workers and are not in the journal, and their GPUs: a person submitted them."""
    known = {submit.job_id for submit in submits}
    return [
        (Submit(job.name, job.kind, time=job.began or job.last, job_id=job.id), job.gpus)
        for job in kept.values()
        if job.id not in known
    ]


def _more_connected(
    submits: Iterable[Submit], options: saved_options.Saved | None, kept: Mapping[str, JobUsage]
) -> list[str]:
    """Return a sentence if more GPUs were connected than the options of the cluster request."""
    if options is None:
        return []
    pairs = ((options.gpus(one.kind, one.group), gpus_of(one, options, kept)) for one in submits)
    more = sum(known is not None and known != counts for known, counts in pairs)
    if not more:
        return []
    text = f"How many GPUs {counted(more, 'job')} requested: more were connected than the options of the cluster say."
    return [f"{text} The report counts the connected ones."]


def _options(directory: ClusterDirectory, problems: list[str]) -> saved_options.Saved | None:
    try:
        return saved_options.read(directory)
    except OptionError as error:
        problems.append(f"The GPUs of the jobs: {error}")
        return None


def _unknown(jobs: Iterable[JobBill]) -> list[str]:
    """Return sentences about unknown times of jobs."""
    unknown = [job for job in jobs if job.ran is None]
    uncounted = [job for job in jobs if job.gpus is None and job.ran is not None]
    later = [job for job in jobs if job.ended_later and job.ran is not None]
    text = []
    if unknown:
        text.append(f"When {counted(len(unknown), 'job')} started or ended: the queue has forgotten it.")
    if uncounted:
        text.append(f"How many GPUs {counted(len(uncounted), 'job')} requested.")
    if later:
        text.append(
            f"When {counted(len(later), 'job')} ended: the queue has forgotten it. The report uses the time at which "
            "the scheduler last received something from it."
        )
    return text


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if there are values and none is known."""
    found = list(values)
    return total(found) if any(value is not None for value in found) or not found else None


def _row(job: JobBill) -> tuple[str, ...]:
    use = (job.utilization_mean, job.utilization_peak)
    memory = (job.memory_mean, job.memory_peak, job.memory_total)
    waited = f"; {_number(job.waiting)} GPU hours waiting for the next scheduler" if job.waiting else ""
    return (
        job.id or "-",
        job.name,
        "-" if job.waited is None else duration(job.waited),
        "-" if job.ran is None else duration(job.ran),
        *(_number(value) for value in (job.gpu_hours, job.busy, job.before, job.after)),
        "-" if None in use else "/".join(f"{value:.0f}" for value in use if value is not None),
        "-" if None in memory else "/".join(f"{value / 2**30:.3g}" for value in memory if value is not None) + " GiB",
        *("-" if value is None else str(value) for value in (job.tasks_done, job.tasks_lost)),
        *(_size(value) for value in (job.sent, job.spilled)),
        ": ".join(filter(None, [job.state, job.reason])) + waited,
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _size(value: float | None) -> str:
    return "-" if value is None else format_bytes(round(value))
