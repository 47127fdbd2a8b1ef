"""A batch queue that goes wrong when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpcgpu.batch.base import After, JobState, JobStatus
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable
from tests.unit.simulated import Queue

#: How the names of scheduler jobs begin.
SCHEDULER = "demo-scheduler"


class Faulty(Queue):
    """A queue that refuses, is silent, loses its answer, or accepts a job only after the submit has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses_cancels = self.accepts_late = self.holds_back = False
        self.late: dict[str, float] = {}
        #: Which job must end before another one starts.
        self.held: dict[str, str] = {}
        self.polls, self.cancelled = 0, set[str]()
        #: Jobs that it does not show, though it has them.
        self.hidden = set[str]()
        #: Are called before and after each submit, and before each cancel: what must hold then.
        self.submits: Callable[[str], None] = lambda name: None
        self.submitted: Callable[[], None] = lambda: None
        self.cancels: Callable[[JobStatus], None] = lambda job: None

    def submit(self, script: Path, **arguments: Any) -> str:
        self.submits(arguments["job_name"])
        if self.accepts_late and self.refusal is None:
            self.late[arguments["job_name"]] = 0.0
            raise AmbiguousSubmit(f"it is not known whether job {arguments['job_name']!r} exists")
        try:
            return super().submit(script, **arguments)
        finally:
            after: After | None = arguments.get("after")
            found = self.find_all(arguments["job_name"])
            if after is not None and after.ended and found:
                self.held[found[-1]] = after.job_id
            self.submitted()

    def find_all(self, job_name: str) -> list[str]:
        """The ids of the jobs of a name."""
        return [job_id for job_id, status in self.jobs.items() if status.name == job_name]

    def accept(self, seconds: float, *, closed: bool) -> None:
        """Accept the jobs whose submit has failed before, unless an hour has passed since."""
        self.late = {name: age + seconds for name, age in self.late.items() if age < 3600 and not closed}
        while self.late and not (self.silent or self.loses_answers or self.holds_back or self.refusal):
            super().submit(Path("worker"), job_name=self.late.popitem()[0])

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        if self.refuses_cancels:
            raise BatchUnavailable("scancel: error: Access/permission denied")
        ids = list(job_ids)
        for job in (self.jobs[job_id] for job_id in ids):
            if job.state is JobState.RUNNING and not only_pending:
                self.cancels(job)
        self.cancelled.update(self.jobs[job_id].name for job_id in ids)
        super().cancel(ids, only_pending=only_pending)

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        self.polls += 1
        return super().poll(job_id for job_id in job_ids if job_id not in self.hidden)

    def find(self, job_name: str) -> list[str]:
        return [job_id for job_id in super().find(job_name) if job_id not in self.hidden]
