"""The scheduler job that waits before the present one ends, with a queue, a scheduler and a clock of the test."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpcgpu.batch.base import JobState
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable, SubmitRefused
from hpcgpu.jobs.job_phases import Submitting
from hpcgpu.jobs.job_registry import Registry
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.manager.manager import Manager
from hpcgpu.manager.take_over import attach
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.orders import manager_in_scheduler_job
from hpcgpu.scaling.scheduler_restarts import STANDBY
from hpcgpu.scaling.wanted_state import Detach
from hpcgpu.state.cluster_phases import Ownership
from hpcgpu.state.cluster_state import ClusterState
from hpcgpu.store.contact import Contact
from tests.unit.simulated import HOUR, Site, restarts, taken_over

WALLTIME = 24 * HOUR


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


async def takes_over(site: Site) -> None:
    """Let the second scheduler job run, and its scheduler answer."""
    job = site.registry.jobs["demo-scheduler2"]
    assert job.job_id is not None
    site.says("demo-scheduler2", JobState.RUNNING, start=site.now, end=site.now + WALLTIME)
    site.client.listening = True
    site.directory.publish(
        Contact(token=site.directory.token(), job_id=job.job_id, workers="ucx://t", client="tls://t")
    )
    assert site.reconciler.restarts is not None
    await asyncio.wait_for(site.reconciler.restarts.wait_until_done(), 30)
    assert not site.state.phase.restarting and site.state.scheduler is job


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


@pytest.mark.parametrize("case", ["suspended", "stopped"])
async def test_it_is_not_submitted(site: Site, case: str) -> None:
    if case == "suspended":
        site.says("demo-scheduler", JobState.RUNNING, suspended=True, start=site.now, end=site.now + WALLTIME)
        await site.polled()
    if case == "stopped":
        site.directory.begin_close()
    await shortly_before_the_end(site)
    assert "demo-scheduler2" not in live(site)


@pytest.mark.parametrize("end", [JobState.TIMEOUT, JobState.NODE_FAIL])
async def test_it_takes_over_and_only_a_failure_counts(site: Site, tmp_path: Path, end: JobState) -> None:
    await shortly_before_the_end(site)
    site.client.listening = False
    site.says("demo-scheduler", end, start=site.now - HOUR, end=site.now)
    await site.polled()
    assert site.state.phase.restarting
    [ended] = [submit for submit in site.directory.submits() if submit.name == "demo-scheduler"]
    assert ended.how is not None and ended.how.state == end.value, "the job that waits reads it there"
    assert live(site) == ["demo-0", "demo-scheduler2"], "no third one is submitted"
    await takes_over(site)
    assert len(site.state.restarted) == (end is not JobState.TIMEOUT)
    assert site.reconciler.restarts is not None and site.reconciler.restarts.following is None
    other = await taken_over(site, tmp_path)
    assert len(other.state.restarted) == (end is not JobState.TIMEOUT), "also for the next program"


async def test_a_worker_job_that_ends_while_there_is_no_scheduler_is_no_failure_and_is_replaced(site: Site) -> None:
    await shortly_before_the_end(site)
    site.client.listening = False
    site.says("demo-scheduler", JobState.TIMEOUT, start=site.now - HOUR, end=site.now)
    await site.polled()
    await site.ends("demo-0", JobState.FAILED)
    await takes_over(site)
    await site.passes(10)
    assert not [text for text in site.warned if "demo-0" in text] and live(site) == ["demo-scheduler2", "demo-1"]


async def test_jobs_that_fail_at_their_start_follow_with_pauses(site: Site) -> None:
    async def comes(name: str) -> None:
        async with asyncio.timeout(30):
            while name not in live(site) or site.registry.jobs[name].job_id is None:
                site.reconciler.decide()
                await asyncio.sleep(0.05)

    site.client.listening = False
    for name in ("demo-scheduler", "demo-scheduler2", "demo-scheduler3"):
        await comes(name)
        await site.polled()
        site.says(name, JobState.FAILED, start=site.now - 1, end=site.now)
        await site.polled()
    async with asyncio.timeout(30):
        while not any("hpcgpu submits another job in 60 s" in text for text in site.warned):
            await asyncio.sleep(0.05)
    assert live(site) == ["demo-0"], "a full disk may have room again later"
    site.now += 61
    await comes("demo-scheduler4")
    await site.polled()
    site.says("demo-scheduler4", JobState.FAILED, start=site.now - 1, end=site.now)
    await site.polled()
    async with asyncio.timeout(30):
        while not site.state.phase.lost:
            site.reconciler.decide()
            await asyncio.sleep(0.05)
    assert "it was restarted 3 times within an hour" in site.state.phase.lost, "no GPU is spent without end"


async def test_one_that_is_cancelled_because_nobody_reached_its_scheduler_is_followed_by_another(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(address: str) -> SchedulerClient:
        raise OSError("the connection broke")

    assert site.reconciler.restarts is not None
    await shortly_before_the_end(site)
    with monkeypatch.context() as patch:
        patch.setattr(site.reconciler.restarts, "_connect", breaks)
        site.client.listening = False
        site.says("demo-scheduler", JobState.TIMEOUT, start=site.now - HOUR, end=site.now)
        await site.polled()
        job = site.registry.jobs["demo-scheduler2"]
        site.says("demo-scheduler2", JobState.RUNNING, start=site.now, end=site.now + WALLTIME)
        site.directory.publish(
            Contact(token=site.directory.token(), job_id=str(job.job_id), workers="ucx://t", client="tls://t")
        )
        async with asyncio.timeout(30):
            while "demo-scheduler2" in live(site):
                await asyncio.sleep(0.05)
        await asyncio.wait(site.reconciler.restarts.tasks, timeout=30) if site.reconciler.restarts.tasks else None
    await site.polled()
    async with asyncio.timeout(30):
        while "demo-scheduler3" not in live(site):
            assert not site.state.phase.lost, site.state.phase.lost
            site.reconciler.decide()
            await asyncio.sleep(0.05)


async def test_what_is_refused_is_reported_once_and_tried_again_more_and_more_seldom(site: Site) -> None:
    site.queue.refusal = SubmitRefused("no more jobs today")
    end = site.scheduler.queue_status.end
    assert end is not None
    site.says("demo-scheduler", JobState.RUNNING, start=end - 400 * HOUR, end=end + 10 * HOUR)
    await site.polled()
    site.group.waits.append(48 * HOUR)
    await site.passes(5000, step=5)
    assert sum(submit.refused for submit in site.directory.submits()) == 11
    await site.passes(2 * HOUR, step=60)
    [words] = told(site)
    assert words.startswith("scheduler job demo-scheduler2, which should follow the present one of cluster demo, does")
    assert "no more jobs today" in words and "hpcgpu submits another one" in words
    assert sum(submit.refused for submit in site.directory.submits()) == 13, "once in an hour"
    assert not any(job.name != "demo-scheduler" for job in site.registry.jobs.values() if job.kind == "scheduler")


async def test_one_that_a_person_cancels_is_reported_and_another_one_is_submitted(site: Site) -> None:
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


async def test_one_that_can_never_start_is_cancelled_and_reported(site: Site) -> None:
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


async def test_another_program_cancels_all_but_one_of_the_jobs_that_would_follow(site: Site, tmp_path: Path) -> None:
    await shortly_before_the_end(site)
    for number, unanswered in ((3, False), (4, True)):
        if unanswered:
            site.directory.intend(f"demo-scheduler{number}", "scheduler")
        else:
            site.queue.loses_answers = unanswered
            await site.state.dispatcher.submit(tmp_path, name=f"demo-scheduler{number}", kind="scheduler")
    other = await taken_over(site, tmp_path)
    assert [job.name for job in other.registry.jobs.values() if job.kind == "scheduler"] == [
        "demo-scheduler",
        "demo-scheduler2",
    ]
    assert live(other) == ["demo-scheduler", "demo-0", "demo-scheduler2"]
    wanted = [one.name for one in site.directory.submits() if one.kind == "scheduler" and not one.unwanted]
    assert wanted == ["demo-scheduler", "demo-scheduler2"], "the others end as soon as they read the journal"
    site.queue.submit(tmp_path, job_name="demo-scheduler4")
    await other.passes(20)
    assert live(other) == ["demo-scheduler", "demo-0", "demo-scheduler2"], "also one that comes into the queue later"


@pytest.mark.parametrize("inside", [False, True])
async def test_another_program_uses_a_job_that_waits_after_the_scheduler_has_removed_its_contact(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "orders" / "manager_in_scheduler_job.py")])  # a user's own
    await shortly_before_the_end(site)
    site.directory.withdraw()  # it ends in order: SIGTERM, or `idle_timeout`
    site.says("demo-scheduler", JobState.TIMEOUT, end=site.now)
    number = site.directory.take_over("another program").number
    dispatcher = Dispatcher(site.queue, site.directory, number, lambda: site.now)
    registry = Registry("demo", dispatcher, site.directory.logs, site.options.cluster.worker_restarts)
    registry.add_group(DEFAULT, site.options.worker, tmp_path / "worker")
    ownership = Ownership(True, True, in_scheduler_job=inside)
    state = ClusterState("demo", dispatcher, registry, ownership, site, lambda: site.now)

    def new_job(name: str) -> SchedulerJob:
        job = SchedulerJob(dispatcher, tmp_path / "scheduler", name, site.directory.logs, 60.0)
        job.restarts = True
        return job

    following = await attach(state, new_job)
    assert isinstance(state.scheduler, SchedulerJob) and state.scheduler.name == "demo-scheduler"
    assert state.scheduler.lost_too_early and following is not None and following.name == "demo-scheduler2"
    manager = site.directory.manager()
    assert manager is not None and manager.in_scheduler_job == inside
    assert str(manager).startswith("hpcgpu in the scheduler job" if inside else "manager_in_scheduler_job.py")


async def missing_for_two_minutes(site: Site, name: str) -> None:
    """Let the queue not show a job that lives."""
    site.forgets(name)
    await site.passes(150)
    assert site.registry.jobs[name].queue_status.state is JobState.FAILED


@pytest.fixture
def cancels(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that the queue is requested to cancel, by id."""
    told: list[str] = []
    cancel = site.queue.cancel

    def note(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        ids = list(job_ids)
        told.extend(ids)
        cancel(ids, only_pending=only_pending)

    monkeypatch.setattr(site.queue, "cancel", note)
    return told


async def test_one_that_only_counts_as_ended_is_cancelled_before_another_one_is_submitted(
    site: Site, cancels: list[str]
) -> None:
    await shortly_before_the_end(site)
    job_id = site.registry.jobs["demo-scheduler2"].job_id
    await missing_for_two_minutes(site, "demo-scheduler2")
    assert job_id in cancels
    submits = {submit.name: submit for submit in site.directory.submits()}
    assert submits["demo-scheduler2"].ended, "it ends as soon as it reads the journal"


async def test_a_scheduler_job_that_only_counts_as_ended_is_cancelled_before_another_one_takes_over(
    site: Site, cancels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await shortly_before_the_end(site)
    job_id = site.scheduler.job_id
    site.client.listening = False

    def refuse(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        raise BatchUnavailable("scancel does not answer")

    with monkeypatch.context() as silent:
        silent.setattr(site.queue, "cancel", refuse)
        await missing_for_two_minutes(site, "demo-scheduler")
        assert not site.state.phase.restarting, "it may still live"
        assert not site.directory.has_ended(str(job_id))
    await site.passes(120)
    assert cancels == [job_id]
    assert site.state.phase.restarting and site.directory.has_ended(str(job_id))
    assert any("the queue has not known it for" in text for text in site.warned), site.warned


@pytest.mark.parametrize("case", ["failed", "forgotten", "failed too often"])
async def test_a_scheduler_that_ends_while_a_program_takes_its_cluster_over_is_followed_as_any_other(
    site: Site, tmp_path: Path, cancels: list[str], case: str
) -> None:
    other = await taken_over(site, tmp_path)
    other.state.ownership.attached, other.state.client = True, None
    other.client.listening = False
    other.scheduler.record_answer(False)
    other.state.starts()
    if case == "forgotten":
        await missing_for_two_minutes(other, "demo-scheduler")
        assert cancels == [other.scheduler.job_id], "it may still live"
    else:
        other.state.restarted += [other.now] * 3 if case == "failed too often" else []
        other.says("demo-scheduler", JobState.FAILED, end=other.now)
        await other.polled()
    assert other.state.phase.restarting == (case != "failed too often")
    if other.state.phase.restarting:
        assert other.reconciler.restarts is not None
        async with asyncio.timeout(30):
            while not other.reconciler.restarts.submitted:
                await asyncio.sleep(0.01)
        await takes_over(other)
        assert live(other)[-2:] == ["demo-0", "demo-scheduler2"] and other.state.client is other.client
    else:
        assert "it was restarted 3 times within an hour" in other.state.phase.lost and live(other) == []


async def test_one_that_took_over_and_only_counts_as_ended_never_becomes_the_second(
    site: Site, cancels: list[str]
) -> None:
    await shortly_before_the_end(site)
    job_id = site.registry.jobs["demo-scheduler2"].job_id
    await missing_for_two_minutes_while_the_present_one_ends(site)
    assert job_id in cancels and site.directory.has_ended(str(job_id))
    assert "demo-scheduler3" in live(site)


async def missing_for_two_minutes_while_the_present_one_ends(site: Site) -> None:
    """Let the present job end, and the queue forget the one that follows it, before anybody has seen either."""
    site.forgets("demo-scheduler2")
    for _ in range(2):
        await site.state.dispatcher.poll()
        site.now += 100
    site.client.listening = False
    site.says("demo-scheduler", JobState.NODE_FAIL, end=site.now)
    await site.polled()
    await asyncio.sleep(0)
    for _ in range(1000):
        if "demo-scheduler3" in live(site):
            break
        await asyncio.sleep(0.01)


async def test_one_whose_submit_got_no_answer_and_that_comes_too_late_stays_unwanted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.queue.loses_answers = True
    with monkeypatch.context() as hidden:
        hidden.setattr(site.queue, "find", lambda name: [])
        await shortly_before_the_end(site)
        await site.passes(200)
    assert "demo-scheduler2" not in site.registry.jobs
    site.queue.loses_answers = False
    await site.passes(700)
    [late] = [one for one in site.directory.submits() if one.name == "demo-scheduler2"]
    assert late.job_id is not None and late.unwanted, "it ends as soon as it reads the journal"
    assert "demo-scheduler2" not in live(site)


def following(site: Site) -> SchedulerJob:
    assert site.reconciler.restarts is not None and site.reconciler.restarts.following is not None
    return site.reconciler.restarts.following


async def test_the_queue_holds_that_of_a_detached_cluster_until_it_is_time_to(site: Site) -> None:
    site.reconciler.order(Detach())
    assert site.state.wanted.manager_in_scheduler_job, "the scheduler job manages it"
    await site.passes(10)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler2"]
    assert site.shown["demo-scheduler2"][1] == "it starts once the present scheduler job has ended [Dependency]"
    await shortly_before_the_end(site)
    await site.passes(10)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler3"], "it waits in the queue like other jobs"
    assert [submit.after_end for submit in site.directory.submits()] == ["", "", "1", ""]
    assert following(site).name == "demo-scheduler3" and told(site) == []


async def test_none_is_kept_waiting_where_no_job_can_wait_for_the_end_of_another(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.queue, "waits_for_end", False)
    site.reconciler.order(Detach())
    for leaving in (True, False):
        site.state.leaves_when_done = leaving
        await site.passes(10)
        assert live(site) == ["demo-scheduler", "demo-0"]
    await shortly_before_the_end(site)
    await site.passes(10)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler2"], "it waits in the queue like other jobs"


async def test_one_that_the_queue_holds_stays_if_another_one_is_refused(site: Site) -> None:
    site.reconciler.order(Detach())
    await site.passes(10)
    site.queue.refusal = SubmitRefused("too many jobs")
    await shortly_before_the_end(site)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler2"] and len(told(site)) == 1
    assert following(site).name == "demo-scheduler2"
    site.queue.refusal = None
    await site.passes(200)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler4"]


async def test_one_that_the_queue_holds_stays_until_the_queue_has_the_other_one(site: Site) -> None:
    site.reconciler.order(Detach())
    await site.passes(10)
    site.queue.loses_answers = True
    find, site.queue.find = site.queue.find, lambda job_name: []  # type: ignore[method-assign]
    await shortly_before_the_end(site)
    assert "demo-scheduler2" in live(site) and following(site).name == "demo-scheduler3"
    site.queue.find, site.queue.loses_answers = find, False  # type: ignore[method-assign]
    await site.passes(120)
    assert "demo-scheduler2" not in live(site) and "demo-scheduler3" in live(site)


async def test_one_that_is_not_needed_any_more_is_cancelled_when_the_queue_shows_it_at_last(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.reconciler.order(Detach())
    await site.passes(10)
    site.queue.loses_answers = True
    with monkeypatch.context() as hidden:
        hidden.setattr(site.queue, "find", lambda name: [])
        await shortly_before_the_end(site)
        site.client.listening = False
        site.says("demo-scheduler", JobState.TIMEOUT, end=site.now)
        await site.polled()
        await takes_over(site)
    assert live(site) == ["demo-0", "demo-scheduler2", "demo-scheduler3"]
    await site.passes(20)
    assert "demo-scheduler3" not in live(site)


async def test_the_time_for_which_the_queue_held_a_job_is_no_wait(site: Site) -> None:
    site.scheduler.after_end = "0"
    site.says("demo-scheduler", JobState.RUNNING, start=site.now + 20 * HOUR, end=site.now + 44 * HOUR)
    site.now += 33 * HOUR
    await site.polled()
    await site.passes(10)
    assert live(site) == ["demo-scheduler", "demo-0"]


@pytest.mark.parametrize("due", [False, True])
async def test_it_stays_in_the_queue_when_the_program_leaves_the_cluster(site: Site, due: bool) -> None:
    if due:
        await shortly_before_the_end(site)
    assert site.reconciler.restarts is not None
    site.state.leaves_when_done = True
    await site.passes(20)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-scheduler2"]
    assert following(site).after_end == (None if due else "1")
    await site.reconciler.close_with_scheduler()
    assert live(site) == ["demo-scheduler", "demo-0"], "the cluster ends with its scheduler"
    assert [submit.unwanted for submit in site.directory.submits()] == [False, False, True]


async def test_a_program_that_leaves_the_cluster_submits_a_refused_one_with_pauses(site: Site) -> None:
    site.queue.refusal = SubmitRefused("too many jobs")
    site.state.leaves_when_done = True
    await site.passes(30)
    assert sum(submit.refused for submit in site.directory.submits()) == 2, "at once, and after ten seconds"


async def test_none_follows_one_that_has_ended_as_intended_and_the_reason_names_that(site: Site) -> None:
    site.directory.remove_secrets()  # it does so at its end
    site.client.listening = False
    site.says("demo-scheduler", JobState.COMPLETED, end=site.now)
    await site.polled()
    assert "It is not restarted, because it has ended as intended, or was cancelled" in site.state.phase.lost


async def test_workers_are_scaled_though_the_journal_cannot_be_read_for_a_while(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shortly_before_the_end(site, 620)

    def fails(self: object) -> Iterator[object]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr("hpcgpu.store.directory.ClusterDirectory._lines", fails)
        site.now += 20  # the next one is due
        await site.scale(2)
        assert live(site) == ["demo-scheduler", "demo-0", "demo-1"]
    await site.passes(1)
    assert live(site) == ["demo-scheduler", "demo-0", "demo-1", "demo-scheduler2"]


@pytest.mark.parametrize("over", [False, True])
async def test_it_leaves_the_queue_with_a_scheduler_that_ends_as_intended(site: Site, over: bool) -> None:
    await shortly_before_the_end(site)
    manager = cast(Manager, SimpleNamespace(reconciler=site.reconciler, state=site.state))
    await manager_in_scheduler_job._scheduler_ended(manager, over=over)
    assert ("demo-scheduler2" in live(site), site.directory.closing) == (not over, over)


@pytest.mark.parametrize("how", [JobState.NODE_FAIL, JobState.FAILED])
async def test_the_next_scheduler_avoids_the_node_that_failed_and_those_of_the_user(
    site: Site, tmp_path: Path, how: JobState
) -> None:
    made = restarts(site, tmp_path)
    new_job = made._new_job

    def with_directives(name: str) -> SchedulerJob:
        job = new_job(name)
        job.directives = ["--exclude=n7"]
        return job

    made._new_job = with_directives
    site.says("demo-scheduler", how, node="n1")
    await site.state.poll()
    await made.follow()
    assert "demo-scheduler2" in live(site)
    assert site.queue.excluded == (["n7", "n1"] if how is JobState.NODE_FAIL else [])


async def test_where_no_other_node_can_have_the_scheduler_it_may_run_on_the_one_that_failed(
    site: Site, tmp_path: Path
) -> None:
    made = restarts(site, tmp_path)
    site.queue.refuses_exclude = True
    site.says("demo-scheduler", JobState.NODE_FAIL, node="n1")
    await site.state.poll()
    await made.follow()
    assert "demo-scheduler2" in live(site) and site.queue.excluded == []
