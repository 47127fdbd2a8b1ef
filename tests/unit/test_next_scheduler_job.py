"""The scheduler job that waits before the present one ends, with a queue, a scheduler and a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.errors import AmbiguousSubmit, LaunchError, SubmitRefused
from hpcgpu.jobs.job_phases import Submitting
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.manager.restart_scheduler import SchedulerRestarts
from hpcgpu.manager.scheduler_client import SchedulerClient
from hpcgpu.runtime import standby
from hpcgpu.runtime.scheduler_connection import ConnectionResult
from hpcgpu.scaling.scheduler_restarts import STANDBY
from hpcgpu.scaling.wanted_state import Detach
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import End
from tests.unit.simulated import HOUR, Queue, Site, taken_over

WALLTIME = 24 * HOUR


def restarts(site: Site, path: Path) -> SchedulerRestarts:
    """Let the scheduler of a site be restarted."""

    def new_job(name: str) -> SchedulerJob:
        return SchedulerJob(site.state.dispatcher, path / "scheduler", name, site.directory.logs, 60.0)

    async def connect(address: str) -> SchedulerClient:
        return cast(SchedulerClient, site.client)

    async def connected(client: SchedulerClient) -> None:
        site.state.runs()
        site.state.client = client

    return SchedulerRestarts(site.state, new_job, connect, connected)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    made.reconciler.restarts = restarts(made, tmp_path)
    made.state.starts()
    await made.begin(1)
    made.state.runs()
    made.says("demo-scheduler", JobState.RUNNING, start=made.now, end=made.now + WALLTIME)
    await made.polled()
    yield made
    await made.settled()


def live(site: Site) -> list[str]:
    """The names of all jobs in the queue."""
    return [status.name for status in site.queue.jobs.values() if not status.state.ended]


async def shortly_before_the_end(site: Site, seconds: float = 300.0) -> None:
    """Go on until so many seconds before the end of the walltime."""
    status = site.scheduler.queue_status
    site.now = (status.end or site.now + WALLTIME) - seconds
    await site.passes(10)


def told(site: Site) -> list[str]:
    """The warnings of a job that should follow and does not come."""
    return [text for text in site.warned if "should follow" in text]


async def test_it_is_submitted_once_and_only_when_it_is_time_to(site: Site) -> None:
    await shortly_before_the_end(site, 1000)
    assert live(site) == ["demo-scheduler", "demo-0"]
    await site.passes(600)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler2"]
    assert [submit.kind for submit in site.directory.submits()] == ["scheduler", "worker", "scheduler"]
    assert site.shown["demo-scheduler2"][0] == "pending"
    site.says("demo-scheduler2", JobState.RUNNING, start=site.now, end=site.now + WALLTIME)
    await site.polled()
    assert site.shown["demo-scheduler2"] == ("running", STANDBY)


async def test_it_is_submitted_earlier_if_jobs_have_waited_for_long(site: Site) -> None:
    site.group.waits.append(2 * HOUR)
    await shortly_before_the_end(site, 3.1 * HOUR)
    assert "demo-scheduler2" not in live(site)
    await shortly_before_the_end(site, 2.9 * HOUR)
    assert "demo-scheduler2" in live(site)


@pytest.mark.parametrize("case", ["detached", "suspended", "stopped", "leaving"])
async def test_it_is_not_submitted(site: Site, case: str) -> None:
    if case == "suspended":
        site.says("demo-scheduler", JobState.RUNNING, suspended=True, start=site.now, end=site.now + WALLTIME)
        await site.polled()
    site.state.leaving = case == "leaving"
    if case == "detached":
        site.reconciler.order(Detach())
    if case == "stopped":
        site.directory.begin_close()
    await shortly_before_the_end(site)
    assert "demo-scheduler2" not in live(site)


@pytest.mark.parametrize("end", [JobState.TIMEOUT, JobState.NODE_FAIL])
async def test_it_takes_over_and_only_a_failure_counts(site: Site, end: JobState) -> None:
    await shortly_before_the_end(site)
    site.client.listening = False
    site.says("demo-scheduler", end, start=site.now - HOUR, end=site.now)
    await site.polled()
    assert site.state.phase.restarting
    [ended] = [submit for submit in site.directory.submits() if submit.name == "demo-scheduler"]
    assert ended.how is not None and ended.how.state == end.value, "the job that waits reads it there"
    assert live(site) == ["demo-0", "demo-scheduler2"], "no third one is submitted"
    job = site.registry.jobs["demo-scheduler2"]
    assert job.job_id is not None
    site.says("demo-scheduler2", JobState.RUNNING, start=site.now, end=site.now + WALLTIME)
    site.client.listening = True
    site.directory.publish(
        Contact(token=site.directory.token(), job_id=job.job_id, workers="ucx://t", client="tls://t")
    )
    assert site.reconciler.restarts is not None and site.reconciler.restarts.task is not None
    await asyncio.wait_for(site.reconciler.restarts.task, 30)
    assert not site.state.phase.restarting and site.state.scheduler is job
    assert len(site.state.restarted) == (end is not JobState.TIMEOUT)
    assert site.reconciler.restarts.following is None


async def test_what_is_refused_is_told_once_and_tried_again_but_not_for_ever(site: Site) -> None:
    site.queue.refusal = SubmitRefused("no more jobs today")
    end = site.scheduler.queue_status.end
    assert end is not None
    site.says("demo-scheduler", JobState.RUNNING, start=end - 400 * HOUR, end=end + 10 * HOUR)
    await site.polled()
    site.group.waits.append(48 * HOUR)
    await site.passes(5000, step=5)
    [words] = told(site)
    assert words.startswith("scheduler job demo-scheduler2, which should follow the present one of cluster demo, does")
    assert "no more jobs today" in words and "hpcgpu submits another one" in words
    assert sum(submit.refused for submit in site.directory.submits()) == 11
    assert not any(job.name != "demo-scheduler" for job in site.registry.jobs.values() if job.kind == "scheduler")


async def test_one_that_a_person_cancels_is_told_and_another_one_is_submitted(site: Site) -> None:
    await shortly_before_the_end(site)
    site.says("demo-scheduler2", JobState.CANCELLED, end=site.now)
    await site.polled()
    [words] = told(site)
    assert "scheduler job demo-scheduler2, which should follow" in words and "cancelled" in words
    await site.passes(30)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler3"]
    site.says("demo-scheduler3", JobState.FAILED, end=site.now)
    await site.polled()
    await site.passes(60)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler4"]
    assert len(told(site)) == 1, "it is told once"


async def test_one_that_can_never_start_is_cancelled_and_told(site: Site) -> None:
    await shortly_before_the_end(site)
    site.says("demo-scheduler2", JobState.PENDING)
    job_id = str(site.registry.jobs["demo-scheduler2"].job_id)
    site.queue.jobs[job_id] = replace(site.queue.jobs[job_id], reason="PartitionTimeLimit")
    for _ in range(3):
        await site.polled()
    assert any("will never start" in text for text in told(site)), site.warned
    assert "demo-scheduler2" not in live(site)


async def test_a_submit_without_an_answer_is_looked_up(site: Site) -> None:
    site.queue.loses_answers = True
    await shortly_before_the_end(site)
    job = site.registry.jobs["demo-scheduler2"]
    assert job.job_id is None or site.queue.jobs[job.job_id].name == job.name
    await site.passes(20)
    assert job.job_id is not None, "the queue has it"
    assert [submit.name for submit in site.directory.submits()].count("demo-scheduler2") == 1
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler2"]


@pytest.mark.parametrize("case", ["waits", "without an answer", "not wanted"])
async def test_another_program_takes_over_a_cluster_whose_next_scheduler_job_waits(
    site: Site, tmp_path: Path, case: str
) -> None:
    if case == "without an answer":
        site.queue.refusal = AmbiguousSubmit("Slurm did not say whether it accepted job 'demo-scheduler2'")
    await shortly_before_the_end(site)
    if case == "not wanted":
        site.directory.cancel(["demo-scheduler2"])
    other = await taken_over(site, tmp_path)
    assert other.scheduler.name == "demo-scheduler", "the present one is that of the contact"
    following = [job for job in other.registry.jobs.values() if job.kind == "scheduler" and job is not other.scheduler]
    assert len(following) == (case != "not wanted")
    assert ("demo-scheduler2" in live(other)) == (case == "waits")
    for job in following:
        assert isinstance(job, SchedulerJob) and job.standby
        assert isinstance(job.phase, Submitting) == (case == "without an answer")


async def test_it_is_cancelled_when_the_program_leaves_the_cluster(site: Site) -> None:
    await shortly_before_the_end(site)
    assert site.reconciler.restarts is not None
    await site.reconciler.restarts.abandon()
    assert live(site) == ["demo-scheduler", "demo-0"]
    assert [submit.cancelled for submit in site.directory.submits()] == [False, False, True]


# In the job


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterDirectory:
    """A cluster whose second scheduler job waits, and whose first one answers."""
    directory = create_directory.claim(tmp_path / "clusters" / "demo", lambda submits: [])
    directory.tls.mkdir()
    for number in ("", "2"):
        directory.intend(f"demo-scheduler{number}", "scheduler")
        directory.submitted(f"demo-scheduler{number}", number or "1")
    directory.publish(Contact(token=directory.token(), job_id="1", workers="tls://a:1", client="tls://a:2"))
    monkeypatch.setattr(standby, "identify", lambda contact, directory: ConnectionResult.ACCEPTED)
    return directory


def test_a_job_that_follows_waits_until_the_journal_names_the_end(
    waiting: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            waiting.ended({"demo-scheduler": "1"}, {"demo-scheduler": End(state="timeout")})

    monkeypatch.setattr(standby.time, "sleep", look)
    assert standby.wait_until_alone(waiting, Queue(), "2")
    assert len(looks) == 3
    assert capsys.readouterr().err.count("has a scheduler in job 1. This job waits: it takes over when") == 1


@pytest.mark.parametrize("how", ["cancelled", "completed"])
def test_a_job_that_follows_ends_if_the_scheduler_has_ended_as_intended(waiting: ClusterDirectory, how: str) -> None:
    waiting.ended({"demo-scheduler": "1"}, {"demo-scheduler": End(state=how)})
    with pytest.raises(LaunchError, match="the scheduler job 1 has ended as intended"):
        standby.wait_until_alone(waiting, Queue(), "2")


def test_a_job_that_follows_ends_if_nobody_needs_it(waiting: ClusterDirectory) -> None:
    waiting.cancel(["demo-scheduler2"])
    with pytest.raises(LaunchError, match="does not need this scheduler job any more"):
        standby.wait_until_alone(waiting, Queue(), "2")
    waiting.keep(["demo-scheduler2"])
    waiting.tls.rmdir()  # the present scheduler removes the keys when it ends by `lease` or `idle_timeout`
    with pytest.raises(LaunchError, match="is closed: this job ends"):
        standby.wait_until_alone(waiting, Queue(), "2")
    waiting.tls.mkdir()
    waiting.begin_close()
    with pytest.raises(LaunchError, match="is closed: this job ends"):
        standby.wait_until_alone(waiting, Queue(), "2")


def test_a_job_that_was_submitted_by_hand_does_not_wait(waiting: ClusterDirectory) -> None:
    assert not standby.wait_until_alone(waiting, Queue(), "99")


def test_the_first_scheduler_job_and_one_that_is_run_again_do_not_wait(waiting: ClusterDirectory) -> None:
    assert standby.wait_until_alone(waiting, Queue(), "1")
    waiting.withdraw()
    assert standby.wait_until_alone(waiting, Queue(), "2")


@pytest.mark.parametrize("answer", ["ended", "runs", "no answer"])
@pytest.mark.parametrize("found", ConnectionResult)
def test_without_a_manager_the_queue_tells_a_job_that_follows(
    waiting: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, answer: str, found: ConnectionResult
) -> None:
    clock = [1000.0]

    class Waited(Exception):
        pass

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 1000 + HOUR:
            raise Waited

    monkeypatch.setattr(standby.time, "sleep", sleep)
    monkeypatch.setattr(standby.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(standby, "identify", lambda contact, directory: found)
    queue = Queue()
    queue.silent = answer == "no answer"
    state = JobState.NODE_FAIL if answer == "ended" else JobState.RUNNING
    queue.jobs["1"] = JobStatus(job_id="1", state=state, name="demo-scheduler")
    refused = found is ConnectionResult.REFUSED
    if found is not ConnectionResult.ACCEPTED and (answer == "ended" or (answer == "no answer" and refused)):
        assert standby.wait_until_alone(waiting, queue, "2")
        assert clock[0] < 1000 + 200
    else:  # a scheduler that is suspended does not answer either
        with pytest.raises(Waited):
            standby.wait_until_alone(waiting, queue, "2")
