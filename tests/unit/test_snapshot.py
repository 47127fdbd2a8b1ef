"""What `hpcgpu status` shows of jobs: queue and scheduler joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.remote import snapshot
from hpcgpu.store import claims
from hpcgpu.store.journal import Submit


@pytest.mark.parametrize(
    ("kind", "queue", "workers", "answers", "state"),
    [
        ("worker", JobState.PENDING, ["demo-0"], True, "running"),
        ("worker", None, ["demo-0"], True, "running"),
        ("worker", JobState.PENDING, [], True, "pending"),
        ("worker", None, [], True, "unknown"),
        ("worker", JobState.CANCELLED, ["demo-0"], True, "cancelled"),
        ("scheduler", JobState.PENDING, [], True, "running"),
        ("scheduler", JobState.PENDING, [], False, "pending"),
    ],
)
def test_a_process_that_is_connected_proves_that_its_job_runs(
    kind: str, queue: JobState | None, workers: list[str], answers: bool, state: str
) -> None:
    submit = Submit(kind=kind, name="demo-scheduler" if kind == "scheduler" else "demo-0", time=0.0, job_id="7")
    known = JobStatus(job_id="7", state=queue, name=submit.name) if queue is not None else None
    job = snapshot._info(submit, "7", known, len(workers), answers, Path("log"))
    assert job.state == state and (job.reason == "") is (state == "running")


@pytest.mark.parametrize(
    ("queue", "problem", "state"),
    [
        (JobState.TIMEOUT, True, "ended"),  # killed hard: its contact is left
        (JobState.FAILED, True, "ended"),
        (JobState.CANCELLED, False, "ended"),
        (JobState.RUNNING, True, "unreachable"),
        (JobState.UNKNOWN, True, "unreachable"),  # the queue gave no answer
        (JobState.PENDING, False, "waiting"),
    ],
)
def test_a_cluster_whose_scheduler_job_has_ended_has_ended_whatever_it_left(
    tmp_path: Path, queue: JobState, problem: bool, state: str
) -> None:
    directory = claims.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    submit = Submit(kind="scheduler", name="demo-scheduler", time=0.0, job_id="7")
    known = JobStatus(job_id="7", state=queue, name=submit.name)
    job = snapshot._info(submit, "7", known, 0, False, Path("log"))
    assert snapshot._state(directory, [job], False, problem) == state
