"""How `hpcgpu logs --follow` learns that nothing more will be written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.errors import BatchUnavailable
from hpcgpu.existing_clusters import logs
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory
from tests.helpers import Clock


class Queue:
    """Answers with a script: the state of the one job, None where it is left out, or an error. The last one holds."""

    remembers = False

    def __init__(self, *answers: JobState | Exception | None, accounting: JobState | None = None) -> None:
        self.answers, self.accounting, self.polls = list(answers), accounting, 0

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        self.polls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"7": JobStatus(job_id="7", name="demo-0", state=answer)} if answer is not None else {}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {"7": JobStatus(job_id="7", name="demo-0", state=self.accounting)} if self.accounting is not None else {}

    def find(self, job_name: str) -> list[str]:
        return []

    def identity(self) -> str:
        return ""


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    directory = create_directory.claim(
        tmp_path / "demo", lambda earlier: [], system="slurm", complete=lambda draft: draft.tls.mkdir()
    )
    directory.intend("demo-0", "worker")
    directory.submitted("demo-0", "7")
    return directory


def follow(directory: ClusterDirectory, queue: Queue, monkeypatch: pytest.MonkeyPatch, limit: float) -> float:
    """Read on until the reader reports that all has ended; return after how many seconds."""
    clock = Clock()
    began = clock.now
    monkeypatch.setattr(logs, "time", clock)
    monkeypatch.setattr(logs, "batch_of", lambda directory: queue)
    reader = logs.Reader(directory)
    while not reader.ended() and clock.now - began < limit:
        clock.sleep(0.5)
    return clock.now - began


@pytest.mark.parametrize("queue", [Queue(JobState.COMPLETED), Queue(None, accounting=JobState.FAILED)])
def test_it_ends_at_once_where_the_queue_or_the_accounting_reports_that_the_jobs_have_ended(
    directory: ClusterDirectory, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow(directory, queue, monkeypatch, 3600) == 0


def test_a_job_that_nothing_shows_ends_it_after_the_grace_period(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 60 <= follow(directory, Queue(None), monkeypatch, 3600) <= 90


def test_an_answer_without_the_job_or_none_at_all_does_not_end_it(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(JobState.RUNNING, None, BatchUnavailable("down"), JobState.RUNNING)
    assert follow(directory, queue, monkeypatch, 3600) >= 3600
    assert queue.polls < 130, "it asks less often, as nothing changes"
