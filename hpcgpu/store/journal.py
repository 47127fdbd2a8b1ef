"""The journal of a cluster, ``journal.jsonl``: the intent is on disk before a job is submitted, its id after it.

Each line is an event. A damaged line loses only its own event. The lines ``intent``, ``submitted``, ``closing`` and
``closed`` are the same in every format of the directory (see `hpcgpu.store.cluster_json`), so any version of hpcgpu can
cancel the jobs of any cluster.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.errors import Damaged
from hpcgpu.posix import checked_files, json_records
from hpcgpu.store.atomic_files import Files

#: The most characters that are kept of the reason of a refusal, or of the end of a cluster.
_WHY = 1000


@dataclass(frozen=True, kw_only=True)
class End:
    """How a job ended, as the queue reported it: the queue forgets it after minutes.

    Attributes
    ----------
    state : str
        A `JobState`.
    start, end : float or None
        Epoch seconds, if the queue reported them.
    """

    state: str = ""
    start: float | None = None
    end: float | None = None

    @classmethod
    def of(cls, status: JobStatus, *, gone: float | None = None, cancelled: bool = False) -> Self:
        """Return how a job ended.

        Parameters
        ----------
        status : JobStatus
            The queue's last report of the job.
        gone : float or None, optional
            When the queue no longer showed the job, epoch seconds; None if the report is that of its end.
        cancelled : bool, default False
            Whether such a job is gone because hpcgpu cancelled it. Otherwise it is unknown how it ended.
        """
        if gone is None:
            return cls(state=status.state.value, start=status.start, end=status.end)
        state = JobState.CANCELLED if cancelled else JobState.UNKNOWN
        return cls(state=state.value, start=status.start, end=gone)


@dataclass(frozen=True, kw_only=True, slots=True)  # many are kept
class _Event:
    """A line of the journal."""

    event: str
    time: float = 0.0
    name: str = ""
    kind: str = ""
    group: str = "default"
    id: str = ""
    names: list[str] = field(default_factory=list)
    why: str = ""
    after_end: str = ""
    state: str = ""
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        if self.event == "intent" and not (self.name.isprintable() and self.name and self.kind and self.group):
            raise ValueError("it names no job")
        if self.event == "submitted" and not (self.name.isprintable() and self.name):
            raise ValueError("it names no job")
        if self.event == "submitted" and not re.fullmatch("[A-Za-z0-9][!-~]{0,200}", self.id):
            raise ValueError("it has no job id")


@dataclass
class Submit:
    """What the journal records of one job: the intent, and its outcome.

    Attributes
    ----------
    name, kind, group : str
    time : float
        Epoch seconds of the intent.
    job_id : str or None
        None while it is not known.
    refused : bool
        The job certainly does not exist.
    why : str
        The batch system's words of the refusal.
    ended : bool
        The job has ended, and hpcgpu has seen that.
    before_close : bool
        The job ended before the cluster was closed or stopped, so it ended for another reason.
    unwanted : bool
        A manager decided to end the job, and did not revoke the decision.
    after_end : str
        The job that must end before the queue starts this one; empty if there is none.
    how : End or None
        How the job ended, if the queue reported it.
    """

    name: str
    kind: str
    group: str = "default"
    time: float = 0.0
    job_id: str | None = None
    refused: bool = False
    why: str = ""
    ended: bool = False
    before_close: bool = False
    unwanted: bool = False
    after_end: str = ""
    how: End | None = None


class Journal(Files):
    """The journal of one directory."""

    #: The whole lines that were read last, and what each of them holds: a manager reads the journal each second.
    _read: tuple[bytes, tuple[_Event | str | None, ...]] = (b"", ())

    def intend(self, name: str, kind: str, group: str = "default", after_end: str = "") -> None:
        """Record that a job of this name is about to be submitted, perhaps to start after the end of another one."""
        dependency = {"after_end": after_end} if after_end else {}
        self._append({"event": "intent", "name": name, "kind": kind, "group": group, **dependency})

    def submitted(self, name: str, job_id: str) -> None:
        """Record the id of a submitted job."""
        self._append({"event": "submitted", "name": name, "id": job_id})

    def refused(self, name: str, why: str = "") -> None:
        """Record that a job certainly does not exist, and why."""
        self._append({"event": "refused", "name": name, "why": why[:_WHY]})

    def ended(self, jobs: Mapping[str, str | None], how: Mapping[str, End] | None = None) -> None:
        """Record that jobs have ended: their ids by name, None for an unknown id, and how each ended, by name."""
        self._append(
            *(
                {"event": "ended", "name": name}
                | ({"id": id_} if id_ is not None else {})
                | (asdict(how[name]) if how is not None and name in how else {})
                for name, id_ in jobs.items()
            )
        )

    def cancel(self, names: Iterable[str]) -> None:
        """Record that these jobs are no longer wanted.

        This is written before their workers retire, and before they are cancelled.
        """
        self._append({"event": "cancel", "names": list(names)})

    def keep(self, names: Iterable[str]) -> None:
        """Record that these jobs stay after all: they had started already, or their data fits nowhere else."""
        self._append({"event": "keep", "names": list(names)})

    def close(self) -> None:
        """Record that none of the cluster's jobs is alive."""
        self._append({"event": "closed"})

    def begin_close(self, why: str = "") -> None:
        """Record that the cluster's jobs were cancelled, and why, if no person wanted it; some take a while to end."""
        self._append({"event": "closing"} | ({"why": why[:_WHY]} if why else {}))

    @property
    def closing(self) -> bool:
        """Whether the cluster's jobs were cancelled for good; they may have ended, or not yet."""
        return self.ended_at() is not None

    @property
    def journal_size(self) -> int:
        """Bytes of the journal: it only grows."""
        try:
            return (self.path / "journal.jsonl").stat().st_size
        except OSError:
            return 0

    def ended_at(self) -> float | None:
        """Return when the cluster's jobs were cancelled for good, epoch seconds; None if they were not."""
        times = {line.event: line.time for line in self._journal()}
        return times.get("closing", times.get("closed"))

    def why_ended(self) -> str:
        """Return why the cluster's jobs were cancelled for good; empty if they were not, or if a person wanted it."""
        return next((line.why for line in self._journal() if line.event == "closing" and line.why), "")

    def times(self) -> list[float]:
        """Return the times of all events of its jobs, epoch seconds."""
        return [line.time for line in self._journal()]

    @property
    def closed(self) -> bool:
        """Whether the cluster was closed."""
        return any(line.event == "closed" for line in self._journal())

    def has_ended(self, job_id: str) -> bool:
        """Whether hpcgpu has seen the end of a job."""
        return any(submit.job_id == job_id and submit.ended for submit in self.submits())

    def submits(self) -> list[Submit]:
        """Return what the journal records of each job, in order."""
        jobs: dict[str, Submit] = {}
        earlier: list[Submit] = []
        closing = False
        for line in self._journal():
            job = jobs.get(line.name)
            if line.event == "intent":
                if job is not None and job.job_id is not None:
                    # a line of a manager that another program had already replaced
                    earlier.append(jobs.pop(line.name))
                jobs[line.name] = Submit(line.name, line.kind, line.group, line.time, after_end=line.after_end)
            elif line.event in ("cancel", "keep"):
                for name in jobs.keys() & set(line.names):
                    jobs[name].unwanted = line.event == "cancel"
            elif line.event == "submitted":
                if job is None:  # the line of its intent is damaged, but the job exists
                    kind = "scheduler" if re.search("-scheduler[0-9]*$", line.name) else "worker"
                    job = jobs[line.name] = Submit(line.name, kind, time=line.time)
                job.job_id, job.refused = line.id, False
            elif line.event in ("closing", "closed"):
                closing = True
            elif job is not None and line.event == "refused":
                job.refused, job.why = job.job_id is None, line.why
            elif job is not None and line.event == "ended" and line.id in ("", job.job_id):
                # a later cluster of this name may have a job of the same name, with another id
                job.ended, job.before_close = True, not closing
                job.how = End(state=line.state, start=line.start, end=line.end) if line.state else None
        return [*earlier, *jobs.values()]

    def _append(self, *new: dict[str, Any]) -> None:
        now = round(time.time(), 3)
        line = "".join(json.dumps({"time": now, **record}) + "\n" for record in new).encode()
        # In a directory that somebody has emptied, a new journal would look like a cluster, and its jobs would not end.
        create = os.O_CREAT if (self.path / "cluster.json").exists() else 0
        descriptor = os.open(self.path / "journal.jsonl", os.O_RDWR | create | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk cut the last line short
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError as error:
            error.filename = str(self.path)  # that of a full disk names no file
            raise
        finally:
            os.close(descriptor)

    def _journal(self) -> Iterator[_Event]:
        return (line for line in self._lines() if isinstance(line, _Event))

    def journal_damage(self) -> list[str]:
        """Return a sentence for each damaged line."""
        return [line for line in self._lines() if isinstance(line, str)]

    def _lines(self) -> Iterator[_Event | str]:
        """Yield each line of the journal, or what is wrong with it: a crash or a full disk may have cut it short."""
        try:
            content = checked_files.read(self.path / "journal.jsonl")
        except (FileNotFoundError, NotADirectoryError):
            return
        known, records = self._read
        if not content.startswith(known):  # the journal of a later cluster of this name
            known, records = b"", ()
        *whole, last = content[len(known) :].split(b"\n")
        if whole:
            records = (*records, *(_record(line, number) for number, line in enumerate(whole, len(records) + 1)))
            self._read = content[: len(content) - len(last)], records
        yield from (record for record in (*records, _record(last, len(records) + 1)) if record is not None)


def _record(line: bytes, number: int) -> _Event | str | None:
    """Return what a line holds, or what is wrong with it; None if it is empty."""
    if not line.strip():
        return None
    try:
        return json_records.parse(line, _Event, f"line {number}")
    except Damaged as error:
        return str(error)
