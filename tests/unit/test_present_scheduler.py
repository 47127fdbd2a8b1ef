"""Which scheduler job of a cluster is the present one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.client import lost_scheduler
from hpcgpu.client.connect import wait_for_contact
from hpcgpu.display.job_info import JobInfo
from hpcgpu.errors import ClusterError, LaunchError
from hpcgpu.existing_clusters import snapshot
from hpcgpu.runtime import scheduler_connection
from hpcgpu.runtime.scheduler_connection import SchedulerWatch, wait_for_scheduler
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End, Submit
from hpcgpu.store.present_scheduler import present_scheduler, waits_to_follow
from tests.unit.simulated import Queue


def record(job_id: str, how: str = "", *, unwanted: bool = False, refused: bool = False) -> Submit:
    end = End(state=how) if how else None
    return Submit(
        f"demo-scheduler{job_id}",
        "scheduler",
        job_id=job_id,
        refused=refused,
        ended=bool(how),
        unwanted=unwanted,
        how=end,
    )


@pytest.mark.parametrize(
    ("submits", "served", "waits"),
    [
        ([], "", False),
        ([record("1")], "1", False),
        ([record("1"), record("2")], "1", True),
        ([record("1", "timeout"), record("2")], "1", True),
        ([record("1"), record("2")], "2", False),
        ([record("1"), record("2")], "", False),  # it has removed its contact, because it ends as intended
        ([record("1"), record("2", "failed")], "1", False),
        ([record("1"), record("2", unwanted=True), record("3")], "1", True),
        ([record("1"), record("2", refused=True)], "1", False),
    ],
)
def test_whether_a_job_waits_to_follow(submits: list[Submit], served: str, waits: bool) -> None:
    assert bool(waits_to_follow(submits, served)) is waits


@pytest.mark.parametrize(
    ("submits", "served", "present"),
    [
        ([], "", None),
        ([record("1")], "", "1"),
        ([record("1"), record("2")], "1", "1"),
        ([record("1"), record("2")], "2", "2"),
        ([record("1"), record("2")], "", "1"),  # it has removed its contact, because it ends
        ([record("1"), record("2", unwanted=True)], "1", "1"),
        ([record("1"), record("2", "failed"), record("3")], "1", "1"),
        ([record("1", "timeout"), record("2")], "1", "2"),  # a contact that is left
        ([record("1", "timeout"), record("2", "failed"), record("3")], "", "3"),
        ([record("1", "timeout"), record("2", unwanted=True)], "1", "1"),  # no other one is submitted yet
        ([record("1", "timeout"), record("2", unwanted=True)], "", "1"),
        ([record("1", "timeout"), record("2", "cancelled")], "", "1"),  # a person has cancelled the one that waited
        ([record("1", "unknown"), record("2", "cancelled")], "", "1"),
        ([record("1", "timeout"), record("2", refused=True)], "", "1"),
        ([record("1", "completed")], "", "1"),
        ([record("1"), record("2")], "77", "1"),  # somebody has submitted the script by hand
    ],
)
def test_it_is_that_of_the_contact_or_the_first_that_can_follow(
    submits: list[Submit], served: str, present: str | None
) -> None:
    found = present_scheduler([Submit("demo-0", "worker", job_id="9"), *submits], served)
    assert (found.job_id if found is not None else None) == present


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    """A cluster with a scheduler, whose manager has submitted the next scheduler job."""
    made = create_directory.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    made.tls.mkdir()
    for job_id, name in (("1", "demo-scheduler"), ("2", "demo-scheduler2")):
        made.intend(name, "scheduler")
        made.submitted(name, job_id)
    made.publish(Contact(token=made.token(), job_id="1", workers="tls://127.0.0.1:1", client="tls://127.0.0.1:1"))
    return made


def queue(**states: JobState) -> Queue:
    found = Queue()
    for name, job_id in (("demo-scheduler", "1"), ("demo-scheduler2", "2")):
        state = states["present" if job_id == "1" else "following"]
        found.jobs[job_id] = JobStatus(job_id=job_id, state=state, name=name)
    return found


@pytest.mark.parametrize("following", [JobState.CANCELLED, JobState.FAILED, JobState.COMPLETED])
def test_a_job_that_should_follow_and_ends_ends_no_worker_job(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, following: JobState
) -> None:
    monkeypatch.setattr(scheduler_connection, "FIRST_POLL", 0.0)
    monkeypatch.setattr(scheduler_connection.random, "random", lambda: 0.0)
    monkeypatch.setattr(scheduler_connection, "answers", lambda contact, directory: False)
    there = queue(present=JobState.RUNNING, following=following)
    with pytest.raises(LaunchError, match=r"no scheduler answered within 0\.5 s"):  # it is busy, but its job runs
        wait_for_scheduler(directory, there, 0.5, restart_wait=0.1)
    there = queue(present=JobState.CANCELLED, following=JobState.PENDING)
    with pytest.raises(LaunchError, match="the scheduler job 1 has ended"):
        wait_for_scheduler(directory, there, 0.5, restart_wait=0.1)


def test_a_client_waits_for_the_present_scheduler(directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    there = queue(present=JobState.RUNNING, following=JobState.CANCELLED)
    monkeypatch.setattr("hpcgpu.client.connect.batch_of", lambda directory: there)
    monkeypatch.setattr("hpcgpu.client.connect.check_queue", lambda directory, batch: None)
    monkeypatch.setattr("hpcgpu.client.connect.answers", lambda contact, directory: False)
    monkeypatch.setattr(lost_scheduler, "restarts_scheduler", lambda *_: True)
    with pytest.raises(TimeoutError):
        wait_for_contact(directory, timeout=0.5, quiet=True)
    there.jobs.update(queue(present=JobState.CANCELLED, following=JobState.PENDING).jobs)
    with pytest.raises(ClusterError, match="is gone"):
        wait_for_contact(directory, timeout=5, quiet=True)


def test_the_watch_goes_on_with_the_next_one_when_the_present_one_has_ended(directory: ClusterDirectory) -> None:
    there = queue(present=JobState.RUNNING, following=JobState.PENDING)
    watch = SchedulerWatch(directory, there)
    status = watch.poll(now=0.0)
    assert status is not None and status.job_id == "1"
    directory.ended({"demo-scheduler": "1"}, {"demo-scheduler": End(state="timeout")})
    watch.poll(now=1.0)
    status = watch.poll(now=1000.0)
    assert status is not None and status.job_id == "2"


def info(job_id: str, name: str, state: str, reason: str = "") -> JobInfo:
    return JobInfo(
        id=job_id,
        kind="scheduler",
        name=name,
        state=state,
        reason=reason,
        waited=0.0,
        node="n1",
        workers=0,
        log=Path("log"),
        submitted=float(job_id),
    )


@pytest.mark.parametrize("following", ["cancelled", "failed", "timeout"])
def test_a_cluster_is_not_shown_as_ended_because_the_job_that_should_follow_has(
    directory: ClusterDirectory, following: str
) -> None:
    jobs = [info("1", "demo-scheduler", "running"), info("2", "demo-scheduler2", following)]
    assert snapshot._state(directory, jobs, answers=False, problem=True) == "unreachable"
    jobs[0] = info("1", "demo-scheduler", "cancelled")
    jobs[1] = info("2", "demo-scheduler2", "running")
    assert snapshot._state(directory, jobs, answers=False, problem=True) == "ended"


def test_the_next_one_is_reported_as_waiting_also_if_the_present_one_does_not_answer(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = queue(present=JobState.RUNNING, following=JobState.RUNNING)
    monkeypatch.setattr(snapshot, "batch_of", lambda directory: there)
    monkeypatch.setattr(snapshot, "submitted", lambda *_: {one.job_id: one for one in directory.submits()})
    shown = snapshot.Observer(directory).snapshot()
    assert shown.state == "unreachable"
    assert [job.reason for job in shown.jobs] == ["", snapshot.STANDBY]


def test_the_time_left_is_that_of_the_present_scheduler_job() -> None:
    waits = info("2", "demo-scheduler2", "running", reason=snapshot.STANDBY)
    shown = snapshot.assemble([waits], [], [], now=0.0, name="demo", system="slurm", directory="", state="unreachable")
    assert shown.time_left is None
