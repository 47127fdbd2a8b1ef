"""What `hpcgpu status` shows of jobs: queue and scheduler joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.dask_scheduler.rpc_types import GPUState, GroupState
from hpcgpu.display.job_info import JobInfo
from hpcgpu.existing_clusters import query_jobs, snapshot
from hpcgpu.existing_clusters.describe_jobs import as_the_journal_records, described
from hpcgpu.store import create_directory
from hpcgpu.store.journal import Submit


@pytest.mark.parametrize(
    ("queue", "proven", "state"),
    [
        (JobState.PENDING, True, "running"),
        (None, True, "running"),
        (JobState.PENDING, False, "pending"),
        (None, False, "unknown"),
        (JobState.CANCELLED, True, "cancelled"),
    ],
)
def test_a_process_that_is_connected_proves_that_its_job_runs(queue: JobState | None, proven: bool, state: str) -> None:
    submit = Submit(kind="worker", name="demo-0", time=0.0, job_id="7")
    known = JobStatus(job_id="7", state=queue, name=submit.name) if queue is not None else None
    job = described(submit, known, proven=proven, now=100.0)
    assert job.state == state and (job.reason == "") is (state == "running")


def test_a_running_job_has_a_reason_only_if_it_may_do_nothing() -> None:
    submit = Submit(kind="scheduler", name="demo-scheduler", time=0.0, job_id="7")
    usual = JobStatus(job_id="7", state=JobState.RUNNING, name=submit.name, reason="Job run at Sat")
    lost = replace(usual, out_of_reach=True, reason="no contact since 14:00")
    shown = [described(submit, known, now=100.0) for known in (usual, lost)]
    assert [job.state for job in shown] == ["running", "running"] and shown[0].reason == ""
    assert shown[1].reason.startswith("the batch system has lost contact with its node: wait until the node is back")


def test_a_job_that_the_queue_does_not_show_a_minute_after_its_submit_may_have_been_dropped() -> None:
    submit = Submit(kind="worker", name="demo-0", time=0.0, job_id="7")
    early, late = (described(submit, None, now=now) for now in (10.0, 100.0))
    assert early.reason == "the queue does not know it"
    assert "it has ended, or a queue that passes jobs on dropped it" in late.reason


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
    directory = create_directory.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    submit = Submit(kind="scheduler", name="demo-scheduler", time=0.0, job_id="7")
    known = JobStatus(job_id="7", state=queue, name=submit.name)
    job = described(submit, known, now=100.0)
    assert snapshot._state(directory, [job], False, problem) == state


def _job(name: str, **facts: object) -> JobInfo:
    about = {"id": "1", "kind": "worker", "state": "running", "reason": "", "waited": 0.0, "node": "n1", "workers": 1}
    return JobInfo(**(about | {"name": name, "log": Path("log"), "gpus": 2} | facts))  # type: ignore[arg-type]


def _group(**facts: object) -> GroupState:
    about = dict.fromkeys(("target", "minimum", "maximum", "maximum_gpu_hours", "usual_wait"), None)
    return {**about, "name": "default", "reason": "", "paused": "", "gpu_hours": 0.0} | facts  # type: ignore[return-value,typeddict-item]


def test_a_snapshot_counts_gpus_and_gpu_hours_and_names_the_job_of_each_gpu() -> None:
    jobs = [
        _job("demo-scheduler", kind="scheduler", gpus=1, started=0.0, time_left=900.0),
        _job("demo-0", started=0.0),
        _job("demo-1", started=1800.0, state="completed", ended=3600.0),
        _job("demo-2", state="pending"),
    ]
    gpu = GPUState(
        worker="demo-0-1", node="n1", model="A100", utilization=0.0, memory_used=1, memory_total=2, power=None,
        idle_since=7.0,
    )  # fmt: skip
    alone = snapshot.assemble(jobs, [gpu], [], now=7200.0, name="demo", system="slurm", directory="", state="running")
    assert (alone.gpus, alone.time_left, alone.gpu_hours) == (2, 900.0, 1 * 2 + 2 * 2 + 2 * 0.5)
    assert [(found.job, found.worker, found.idle_since) for found in alone.devices] == [("demo-0", "demo-0-1", 7.0)]
    # a manager counts the jobs of its groups itself, also those that it has forgotten
    managed = snapshot.assemble(
        jobs, [], [_group(gpu_hours=40.0)], now=7200.0, name="demo", system="slurm", directory="", state="running"
    )
    assert managed.gpu_hours == 42.0


def test_the_start_that_the_queue_expects_is_not_taken_for_a_start() -> None:
    submit = Submit(kind="worker", name="demo-0", time=10.0, job_id="7")
    known = JobStatus(job_id="7", state=JobState.PENDING, name="demo-0", start=500.0, end=900.0, expected_start=500.0)
    waits = described(submit, known, now=100.0)
    assert (waits.expected_start, waits.started, waits.ended, waits.time_left) == (500.0, None, None, None)
    connected = described(submit, known, proven=True, now=100.0)
    assert (connected.state, connected.expected_start, connected.started) == ("running", None, None)


def test_a_job_whose_end_has_no_record_costs_no_more_with_time() -> None:
    ended = replace(_job("demo-0", state="completed", started=100.0), gpus=4)
    assert snapshot.gpu_seconds(ended, now=3700.0) == snapshot.gpu_seconds(ended, now=36100.0) == 0.0
    assert snapshot.gpu_seconds(replace(ended, ended=1100.0), now=36100.0) == 4000.0
    assert snapshot.gpu_seconds(replace(ended, state="running"), now=1100.0) == 4000.0


def test_a_job_of_somebody_else_that_has_the_id_by_now_is_not_shown() -> None:
    of = Submit(kind="worker", name="demo-0", time=0.0, job_id="7")
    theirs = JobStatus(job_id="7", state=JobState.RUNNING, name="somebody-else")
    batch = SimpleNamespace(poll=lambda ids: {"7": theirs}, ended=lambda ids: {"7": theirs})
    assert query_jobs.query_with_accounting({"7": of}, batch) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "state", "ended", "over", "ours"),
    [
        ("demo-0", "cancelled", 90.0, None, True),  # a manager had decided to end it
        ("demo-1", "cancelled", 90.0, None, False),
        ("demo-1", "cancelled", 90.0, 200.0, False),  # somebody else cancelled it, long before the cluster was stopped
        ("demo-1", "cancelled", 201.0, 200.0, True),
        ("demo-0", "failed", 90.0, None, True),  # a queue may call it so: its process ended with an error on SIGTERM
        ("demo-0", "completed", 90.0, None, True),
        ("demo-1", "failed", 201.0, 200.0, True),
        ("demo-1", "failed", 199.0, 200.0, False),  # that may be why the cluster was closed
        ("demo-0", "out_of_memory", 90.0, 80.0, False),
        ("demo-2", "cancelled", 199.0, 200.0, False),  # it was seen to end before the cluster was stopped
    ],
)
def test_a_cancel_of_our_own_is_not_blamed_on_others(
    name: str, state: str, ended: float | None, over: float | None, ours: bool
) -> None:
    job = JobInfo(
        id="7", kind="worker", name=name, state=state, reason="others", waited=0.0, node="", workers=0, log=Path("log"),
        ended=ended,
    )  # fmt: skip
    submit = Submit(kind="worker", name=name, unwanted=name == "demo-0", before_close=name == "demo-2")
    shown = as_the_journal_records(job, submit, over)
    assert (shown.state, shown.reason) == (("cancelled", "hpcgpu cancelled it") if ours else (state, "others"))


@pytest.mark.parametrize(
    ("state", "workers", "decided", "over", "shown"),
    [
        ("running", 0, True, None, "completing"),  # as the last poll had it
        ("running", 1, True, None, "running"),  # its data moves first
        ("completing", 0, True, None, "completing"),
        ("pending", 0, True, None, "pending"),  # it is cancelled only while it is pending
        ("running", 0, False, None, "running"),
        ("running", 0, False, 80.0, "completing"),
        ("pending", 0, False, 80.0, "completing"),
        ("timeout", 0, True, 80.0, "timeout"),
    ],
)
def test_a_job_that_hpcgpu_ends_is_not_shown_as_running_until_the_next_poll(
    state: str, workers: int, decided: bool, over: float | None, shown: str
) -> None:
    job = _job("demo-0", state=state, workers=workers, reason="others", time_left=60.0)
    now = as_the_journal_records(job, Submit(kind="worker", name="demo-0", unwanted=decided), over)
    assert now.state == shown and (now.reason == "hpcgpu cancelled it") is (shown == "completing")


@pytest.mark.parametrize(("age", "soon"), [(2.0, True), (300.0, False)])
def test_who_begins_to_watch_just_after_a_start_polls_again_soon(tmp_path: Path, age: float, soon: bool) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="local")
    directory.intend("demo-scheduler", "scheduler")
    observer = snapshot.Observer(directory)
    now = max(directory.times()) + age
    batch = SimpleNamespace(find=lambda name: ["7"], poll=lambda ids: {}, ended=lambda ids: {})
    observer._poll(batch, now=now)  # type: ignore[arg-type]
    assert (observer._cadence.next_poll < now + 2) is soon


def test_a_cluster_whose_jobs_were_just_cancelled_does_not_wait(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", None, system="local")
    directory.intend("demo-scheduler", "scheduler")
    scheduler = _job("demo-scheduler", kind="scheduler", state="completing")
    assert snapshot._state(directory, [scheduler], answers=False, problem=False) == "waiting"
    directory.begin_close()
    assert snapshot._state(directory, [scheduler], answers=False, problem=False) == "ended"
