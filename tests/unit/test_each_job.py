"""What the manager owes each job: none is left behind, none is taken away, none waits for the wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.batch.base import After, JobState, JobStatus
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable, ClusterError, SubmitLimited, SubmitRefused, Superseded
from hpcgpu.jobs import program_exit, scheduler_job
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.manager import closing as closing_of_cluster
from hpcgpu.manager import draining
from hpcgpu.manager.closing import Closing
from hpcgpu.manager.take_over import running_scheduler
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.polling.queue_monitor import View, observe
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.walltime_margin import margin
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Close, DeleteGroup, Scale, apply
from hpcgpu.state.cluster_phases import Kind, Ownership, Phase
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact
from tests.helpers import Clock
from tests.unit.simulated import HOUR, Site, closed, ended, taken_over
from tests.unit.test_reconciler import refuses


async def begun(path: Path) -> Site:
    """A cluster with two running worker jobs."""
    site = Site(path)
    await site.begin(2)
    return site


async def waiting(path: Path) -> Site:
    """A cluster whose scheduler job waits in the queue."""
    site = Site(path)
    site.registry.add(site.scheduler)
    site.state.scheduler = site.scheduler
    await site.scheduler.submit()
    return site


def contact(site: Site, job_id: str) -> Contact:
    return Contact(token=site.directory.token(), job_id=job_id, workers="ucx://s", client="tls://s")


def states(site: Site) -> list[JobState]:
    """Of the worker jobs, as the queue has them."""
    return [status.state for status in site.queue.jobs.values() if status.name != "demo-scheduler"]


async def test_a_running_job_that_the_queue_refused_to_cancel_is_cancelled_once_the_queue_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    with monkeypatch.context() as patch:
        refuses(site, patch)
        await site.scale(1)
        for closed in site.state.known_workers - site.client.there.keys():
            site.reconciler.worker_left(closed)
        await site.passes(10)
        assert states(site) == [JobState.RUNNING] * 2
    await site.passes(100)
    assert set(states(site)) == {JobState.CANCELLED, JobState.RUNNING}


async def test_submits_that_are_refused_now_and_then_do_not_pause_a_group(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    for _ in range(6):
        name = max(site.registry.active)
        site.queue.refusal = BatchUnavailable("the controller is busy")
        await site.ends(name, JobState.TIMEOUT)
        assert "was not submitted: the controller is busy\nhpcgpu tries again at once." in site.warned.pop()
        site.queue.refusal = None
        await site.passes(20)
        assert len(site.registry.active) == 2 and not site.group.failures.paused
        await site.starts(max(site.registry.active))
        site.state.check()  # whoever waits for workers receives no failure


async def test_worker_jobs_wait_in_the_queue_for_the_scheduler_job_until_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, after = await waiting(tmp_path), list[After | None]()
    submit = site.queue.submit

    def noted(*arguments: Any, **named: Any) -> str:
        after.append(named["after"])
        return submit(*arguments, **named)

    monkeypatch.setattr(site.queue, "submit", noted)
    await site.scale(1)
    assert site.scheduler.job_id is not None and after == [After(site.scheduler.job_id)]
    site.directory.publish(contact(site, site.scheduler.job_id))
    await site.scheduler.wait_until_reachable()
    await site.scale(2)
    assert after == [After(site.scheduler.job_id), None]


async def test_the_contact_of_an_earlier_scheduler_job_is_not_taken_for_that_of_the_new_one(tmp_path: Path) -> None:
    site = await waiting(tmp_path)
    site.directory.publish(contact(site, "earlier"))
    site.says("demo-scheduler", JobState.FAILED)
    await site.state.dispatcher.poll()
    with pytest.raises(ClusterError):  # it searches for a contact first
        await site.scheduler.wait_until_reachable()
    assert site.scheduler.contact is None


async def test_a_scheduler_job_that_waited_long_in_the_queue_has_all_its_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, clock = await waiting(tmp_path), Clock()
    steps = iter(["waits"] * 10 + ["runs", "starts", "publishes"])

    async def passes(pause: float) -> None:
        clock.sleep(site.scheduler.timeout / 3)
        if (step := next(steps)) == "runs":
            site.says("demo-scheduler", JobState.RUNNING, start=site.now)
        elif step == "publishes":
            site.directory.publish(contact(site, str(site.scheduler.job_id)))
        await site.state.dispatcher.poll()

    monkeypatch.setattr(scheduler_job, "time", clock)
    monkeypatch.setattr(scheduler_job, "asyncio", SimpleNamespace(sleep=passes))
    await site.scheduler.wait_until_reachable()
    assert site.scheduler.contact is not None and not list(steps)


@pytest.mark.parametrize("moment", ["before the queue has the job", "while the queue takes the job"])
async def test_no_job_is_left_in_the_queue_when_another_program_takes_over_during_a_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    site = Site(tmp_path)
    owner, name = (site.directory, "intend") if moment.startswith("before") else (site.queue, "submit")
    step = getattr(owner, name)

    def overtaken(*arguments: Any, **named: Any) -> Any:
        done = step(*arguments, **named)
        site.directory.take_over("another program")
        return done

    monkeypatch.setattr(owner, name, overtaken)
    with pytest.raises(Superseded, match="was taken over by another program"):
        await site.state.dispatcher.submit(tmp_path / "worker", name="demo-0", kind="worker")
    [submit] = site.directory.submits()
    if moment.startswith("before"):
        assert states(site) == [] and submit.refused
    else:
        assert states(site) == [JobState.CANCELLED]
        assert (submit.job_id, submit.unwanted) == ("1", True), "the journal says so to the other program"


def live(site: Site) -> list[str]:
    """Names of the worker jobs that the queue has."""
    jobs = site.queue.jobs.values()
    return sorted(job.name for job in jobs if not job.state.ended and job.name != "demo-scheduler")


async def unanswered(site: Site) -> None:
    """Ask for a third job, demo-2; the queue does not answer its submit, and does not have the job yet."""
    site.queue.refusal = AmbiguousSubmit("the queue does not say whether it has the job")
    await site.scale(3)
    site.queue.refusal = None


async def test_a_job_whose_submit_got_no_answer_is_a_job_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    site.queue.loses_answers = True
    await site.scale(3)
    assert site.shown["demo-2"] == ("pending", "it is not known yet whether the queue has it")
    site.queue.loses_answers = False
    await site.passes(100)
    assert live(site) == ["demo-0", "demo-1", "demo-2"]
    await site.starts("demo-2")
    site.now += HOUR
    await site.polled()
    assert site.group.gpu_seconds(now=site.now) == pytest.approx(3 * HOUR, abs=300)
    await site.scale(0)
    await site.passes(100)
    assert live(site) == []


async def test_several_jobs_of_a_submit_without_an_answer_are_looked_up_until_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await begun(tmp_path)
    await unanswered(site)
    for _ in range(2):
        site.queue.submit(tmp_path / "script", job_name="demo-2")
    cancel = site.queue.cancel
    refuses = [True]

    def refused(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        if refuses:
            refuses.pop()
            raise BatchUnavailable("scancel does not answer")
        cancel(job_ids, only_pending=only_pending)

    monkeypatch.setattr(site.queue, "cancel", refused)
    await site.passes(100)
    assert not refuses and live(site) == ["demo-0", "demo-1", "demo-2"]
    assert site.queue.find("demo-2") == [site.job("demo-2").job_id]


async def test_a_job_that_the_queue_shows_late_is_not_submitted_twice(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    await unanswered(site)
    await site.passes(50)
    site.queue.submit(tmp_path / "worker", job_name="demo-2")
    await site.passes(100)
    assert live(site) == sorted(site.registry.active) == ["demo-0", "demo-1", "demo-2"]


async def test_no_job_takes_the_place_of_one_that_cannot_be_looked_up(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    await unanswered(site)
    site.queue.silent = True
    await site.passes(HOUR, step=10)
    assert len(site.directory.submits()) == 4, "the scheduler and three workers"
    site.queue.silent = False
    site.queue.submit(tmp_path / "worker", job_name="demo-2")
    await site.passes(100)
    assert live(site) == ["demo-0", "demo-1", "demo-2"]


async def test_a_job_that_the_queue_does_not_have_a_minute_later_is_submitted_under_another_name(
    tmp_path: Path,
) -> None:
    site = await begun(tmp_path)
    await unanswered(site)
    await site.passes(150)
    assert live(site) == ["demo-0", "demo-1", "demo-3"]
    other = await taken_over(site, tmp_path)
    site.queue.submit(tmp_path / "worker", job_name="demo-2")  # after all
    await other.passes(20)
    assert live(other) == ["demo-0", "demo-1", "demo-3"], "the next manager ends it"


@pytest.mark.parametrize(
    ("place", "state", "last"),
    [
        ("taken", JobState.PENDING, "demo-3"),
        ("taken", JobState.RUNNING, "demo-2"),  # the other one still waits
        ("free", JobState.PENDING, "demo-2"),
        ("free", JobState.RUNNING, "demo-2"),
    ],
)
async def test_of_a_job_that_comes_after_all_and_the_one_in_its_place_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, state: JobState, last: str
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    await unanswered(site)
    refusal = SubmitLimited("QOSMaxSubmitJobPerUserLimit") if place == "free" else None
    site.queue.refusal = refusal
    await site.passes(1800)
    site.queue.refusal = None
    late = site.queue.submit(tmp_path / "worker", job_name="demo-2")
    site.queue.jobs[late] = replace(site.queue.jobs[late], state=state)
    site.queue.refusal = refusal
    await site.passes(400)
    assert live(site) == sorted(site.registry.active) == ["demo-0", "demo-1", last]
    other = await taken_over(site, tmp_path)
    await other.passes(20)
    assert live(other) == sorted(other.registry.active) == ["demo-0", "demo-1", last], "the next manager keeps it"


async def test_a_job_that_the_queue_never_had_is_looked_up_for_an_hour_and_seldom(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    await unanswered(site)
    await site.passes(100)
    finds, find = list[float](), site.queue.find
    site.queue.find = lambda name: (finds.append(site.now), find(name))[1]  # type: ignore[method-assign]
    await site.passes(2 * HOUR)
    assert len(finds) == 12 and finds[-1] - finds[0] == pytest.approx(HOUR, rel=0.2)


async def test_a_job_that_is_not_wanted_any_more_when_it_is_found_ends(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    await unanswered(site)
    await site.scale(2)
    site.queue.submit(tmp_path / "worker", job_name="demo-2")
    await site.passes(20)
    assert live(site) == ["demo-0", "demo-1"] and not any(job.draining for job in site.registry.worker_jobs)


@pytest.mark.parametrize("kind", ["worker", "scheduler"])
async def test_the_close_finds_the_job_of_a_submit_that_the_queue_did_not_answer(tmp_path: Path, kind: str) -> None:
    site = Site(tmp_path)
    dispatcher, name = site.state.dispatcher, f"demo-{kind}"
    site.queue.refusal = AmbiguousSubmit("the queue does not say whether it has the job")
    with pytest.raises(AmbiguousSubmit):
        await dispatcher.submit(tmp_path / kind, name=name, kind=kind)
    site.queue.refusal = None
    dispatcher.cancel_all(0.0)
    assert dispatcher.left() == [name], "the queue may show it late"
    job_id = site.queue.submit(tmp_path / kind, job_name=name)
    await dispatcher.look_up(name)
    assert site.queue.jobs[job_id].state is JobState.CANCELLED
    await dispatcher.poll()
    assert dispatcher.left() == []


async def test_a_program_that_ends_cancels_the_job_of_a_submit_that_the_queue_did_not_answer(tmp_path: Path) -> None:
    site = Site(tmp_path)
    dispatcher, site.queue.loses_answers = site.state.dispatcher, True
    with pytest.raises(AmbiguousSubmit):
        await dispatcher.submit(tmp_path / "worker", name="demo-0", kind="worker")
    dispatcher.cancel_all(0.0)
    assert states(site) == [JobState.CANCELLED]


async def test_a_close_does_not_wait_long_for_a_job_that_the_queue_never_had(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.state.dispatcher.expect("demo-0")
    site.state.dispatcher.cancel_all(0.0)
    site.now += 11
    await site.state.dispatcher.look_up("demo-0")
    assert site.state.dispatcher.left() == []


async def test_a_job_whose_submit_outlives_its_program_is_a_job_of_the_next_manager(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    site.directory.want(apply(site.state.wanted, Scale(DEFAULT, 3)))
    site.directory.intend("demo-2", "worker")  # then the program is killed
    other = await taken_over(site, tmp_path)
    other.reconciler.decide()
    await other.settled()
    site.queue.submit(tmp_path / "worker", job_name="demo-2")
    await other.passes(60)
    assert live(other) == sorted(other.registry.active) == ["demo-0", "demo-1", "demo-2"]
    other.state.dispatcher.cancel_all(0.0)
    assert live(other) == []


async def test_a_job_that_its_manager_cancels_when_another_program_takes_over_is_no_failure(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    site.directory.want(apply(site.state.wanted, Scale(DEFAULT, 3)))
    site.directory.intend("demo-2", "worker")
    other = await taken_over(site, tmp_path)
    other.reconciler.decide()
    await other.settled()
    job_id = site.queue.submit(tmp_path / "worker", job_name="demo-2")
    site.directory.submitted("demo-2", job_id)
    site.directory.cancel(["demo-2"])
    site.queue.cancel([job_id])
    await other.passes(60)
    assert live(other) == ["demo-0", "demo-1", "demo-3"] and other.warned == []


async def test_a_cluster_whose_scheduler_job_is_just_being_submitted_is_left_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    manager = site.directory.manager()
    site.directory.intend("demo-scheduler", "scheduler")
    with pytest.raises(ClusterError, match=r"it is not known yet whether the queue has its scheduler job"):
        await running_scheduler(site.state, security=False)
    assert not site.directory.closing and site.directory.dashboard_token()
    assert site.directory.manager() == manager, "the program that submits it goes on"


async def test_a_cluster_that_lost_its_name_cancels_no_job_of_the_other_cluster(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.queue.refusal = AmbiguousSubmit("the queue does not say whether it has the job")
    with pytest.raises(AmbiguousSubmit):
        await site.state.dispatcher.submit(tmp_path / "worker", name="demo-0", kind="worker")
    site.queue.refusal = None
    identity = site.directory.path / "cluster.json"
    identity.write_text(identity.read_text().replace(site.directory.token(), "another"))
    site.queue.submit(tmp_path / "worker", job_name="demo-0")
    site.state.dispatcher.cancel_all(0.0)
    assert states(site) == [JobState.PENDING]
    assert site.directory.dashboard_token(), "the credentials are the other cluster's"


@pytest.mark.parametrize(("walltime", "seconds"), [(40.0, 20.0), (120.0, 30.0), (1200.0, 120.0), (2 * HOUR, 300.0)])
def test_workers_retire_a_tenth_of_the_walltime_before_its_end_30_seconds_at_least_and_5_minutes_at_most(
    walltime: float, seconds: float
) -> None:
    assert margin(walltime) == seconds


def test_data_that_takes_long_to_move_makes_the_workers_of_a_job_retire_earlier() -> None:
    assert margin(48 * HOUR) == margin(48 * HOUR, nbytes=30 * 10**9) == 300
    assert margin(48 * HOUR, nbytes=10**12) == margin(48 * HOUR, 600, 10**12) == 10_000
    assert margin(48 * HOUR, 600, 10**9) == 600
    assert margin(HOUR, nbytes=10**12) == HOUR / 2, "a job works for half of its time at least"


async def test_a_job_that_holds_much_data_is_drained_earlier_before_its_walltime_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    load = site.client.load

    async def much_of_one() -> Any:
        told = await load()
        workers = {name: {**of, "nbytes": 10**12} if name == "demo-0" else of for name, of in told["workers"].items()}
        return {**told, "workers": workers}

    site.now += 48 * HOUR - 5000
    await site.loaded()
    assert {"demo-0", "demo-1"} <= set(site.registry.active)
    monkeypatch.setattr(site.client, "load", much_of_one)
    await site.loaded()
    assert "demo-0" not in site.registry.active and "demo-1" in site.registry.active


@pytest.mark.parametrize("attached", [True, False])
async def test_all_jobs_of_a_cluster_end_with_its_scheduler_also_if_another_program_started_it(
    tmp_path: Path, attached: bool
) -> None:
    """Worker jobs without a scheduler would do nothing until their walltime."""
    site = await begun(tmp_path)
    site.state.ownership.attached = attached
    site.says("demo-scheduler", JobState.FAILED, end=site.now)
    site.client.listening = False
    await site.polled()
    assert site.state.phase.lost and site.directory.closing
    assert all(job.state.ended for job in site.queue.jobs.values())
    assert site.state.ownership.leaves_jobs(site.state.phase, cancelled=True) is False


@pytest.mark.parametrize("attached", [True, False])
def test_a_cluster_that_cannot_be_taken_over_keeps_its_jobs(attached: bool) -> None:
    ownership = Ownership(ends_jobs=True, ends_at_exit=True, attached=attached)
    lost = Phase(Kind.LOST, "the scheduler job ended", before=Phase(Kind.RUNNING))
    assert ownership.leaves_jobs(lost, cancelled=False) is attached
    assert not ownership.leaves_jobs(lost, cancelled=True)
    assert ownership.leaves_jobs(Phase(Kind.SUPERSEDED, before=lost), cancelled=True)


def test_the_close_of_a_detached_cluster_ends_no_job() -> None:
    detached = Phase(Kind.DETACHED, before=Phase(Kind.RUNNING))
    assert Ownership(ends_jobs=True, ends_at_exit=False).leaves_jobs(detached, cancelled=False)


def test_a_job_that_the_queue_forgot_does_not_run_though_the_accounting_has_missed_its_end() -> None:
    views = {"7": View(JobStatus(job_id="7", name="demo-0", state=JobState.RUNNING), submitted=0.0)}
    recorded = {"7": JobStatus(job_id="7", name="demo-0", state=JobState.RUNNING)}
    seen = []
    for now in (1000.0, 1059.0, 1061.0):
        views = observe(views, {}, recorded, now=now, grace=60.0)
        seen.append(views["7"].status.state)
    assert seen == [JobState.UNKNOWN, JobState.UNKNOWN, JobState.FAILED]


async def test_a_group_that_is_added_again_gets_jobs_while_one_of_the_deleted_group_still_runs(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    site.client.full = True  # the data of the deleted group fits nowhere
    site.reconciler.order(DeleteGroup(DEFAULT))
    await asyncio.sleep(0)
    again = site.registry.add_group(DEFAULT, site.options.worker, tmp_path / "worker")
    site.reconciler.order(AddGroup(DEFAULT, 3))
    await asyncio.sleep(0)
    site.reconciler.decide()
    assert sum(job.active for job in again.jobs) == 3
    assert sum(job.draining for job in site.registry.worker_jobs) == 2
    site.client.full = False
    await site.settled()


async def test_a_job_that_can_start_after_all_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = await begun(tmp_path)
    await site.scale(0)
    await site.passes(10)
    limits = Limits(minimum=1, maximum=1)
    site.reconciler.order(Adapt(DEFAULT, limits, 5.0))
    await site.settled()
    [name] = site.registry.active
    site.says(name, JobState.PENDING, reason="PartitionTimeLimit")
    with monkeypatch.context() as patch:
        refuses(site, patch)
        for _ in range(3):
            await site.polled()
    assert "will never start" in site.warned[0] and name in site.registry.active, "the queue did not cancel it"
    site.says(name, JobState.PENDING, reason="Priority")  # an operator has raised the limit
    await site.polled()
    await site.passes(100)
    assert name in site.registry.active


async def test_a_worker_of_a_deleted_group_that_is_released_changes_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    with monkeypatch.context() as patch:
        refuses(site, patch)
        site.reconciler.order(DeleteGroup(DEFAULT))
        await site.settled()
    assert len(site.registry.active) == 2, "the queue did not cancel them"
    [name, _] = site.registry.active
    site.registry.add_group(DEFAULT, site.options.worker, tmp_path / "worker")
    site.reconciler.order(AddGroup(DEFAULT, 2))
    site.reconciler.scale_down({name})
    assert site.state.wanted.groups[DEFAULT].limits.maximum == 2
    await site.settled()


async def test_a_cluster_whose_jobs_the_queue_does_not_cancel_at_the_close_ends_with_its_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, ended = await begun(tmp_path), list[int]()

    async def end(manager: int) -> None:
        ended.append(manager)

    monkeypatch.setattr(site.client, "end", end)
    site.loses("demo-0")
    site.forgets("demo-0")
    await site.polled()  # one answer without the job does not prove that it has ended
    refuses(site, monkeypatch)
    monkeypatch.setattr(program_exit, "_guarded", {site.state.dispatcher})
    closing = await closed(site)
    assert ended == [site.state.dispatcher.manager]
    assert program_exit._guarded == {site.state.dispatcher}, "the end of the program cancels them again"
    [told] = [text for text in site.warned if "may still be in the queue" in text]
    assert "Access/permission denied" in told and "cancels what is left" in told
    assert set(closing.left) == {job.job_id for job in site.registry.jobs.values()}
    assert not site.directory.closed


@pytest.mark.parametrize("raised", [False, True])
async def test_the_close_warns_of_each_failure_that_no_call_has_raised(tmp_path: Path, raised: bool) -> None:
    site = await begun(tmp_path)
    site.queue.refusal = SubmitRefused("Slurm refused job 'demo-2': invalid account")
    await site.scale(3)
    if raised:
        with pytest.raises(ClusterError, match="invalid account"):
            site.state.check()
    site.warned.clear()
    await ended(site)
    assert sum("invalid account" in text for text in site.warned) == int(not raised)


async def test_zero_jobs_of_a_group_keep_results_that_fit_nowhere_while_the_cluster_has_another_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    site.client.there["tls://other"] = {"name": "other"}
    site.reconciler.worker_joined("tls://other", "other")
    site.client.full = True
    await site.scale(0)
    assert states(site) == [JobState.RUNNING] * 2
    assert any("continues: its data does not fit on other workers" in text for text in site.warned)


async def test_a_job_that_the_queue_has_not_known_for_long_is_cancelled_at_the_close(tmp_path: Path) -> None:
    """A queue may leave out a job that runs: who takes it as failed must cancel it all the same."""
    site = Site(tmp_path)
    dispatcher = site.state.dispatcher
    job_id = await dispatcher.submit(tmp_path / "worker", name="demo-0", kind="worker")
    there = site.queue.jobs[job_id]
    site.queue.jobs[job_id] = replace(there, name="")
    for _ in range(3):
        await dispatcher.poll()
        site.now += 600
    assert dispatcher.monitor.views[job_id].status.state is JobState.FAILED
    site.queue.jobs[job_id] = there
    dispatcher.cancel_all(0.0)
    assert states(site) == [JobState.CANCELLED]


@pytest.mark.parametrize(
    ("then", "end", "failures"),
    [
        (None, JobState.FAILED, 1),
        (None, JobState.CANCELLED, 0),
        (JobState.COMPLETING, JobState.CANCELLED, 0),
        (JobState.RUNNING, JobState.CANCELLED, 1),
    ],
)
async def test_a_job_whose_cancel_got_no_answer_has_failed_unless_the_cancel_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: JobState | None, end: JobState, failures: int
) -> None:
    site = await begun(tmp_path)
    await site.scale(3)
    [name] = [name for name, job in site.registry.active.items() if job.pending]
    with monkeypatch.context() as patch:
        refuses(site, patch)
        await site.scale(2)
    await site.scale(3)
    assert name in site.registry.active
    for state in [then, end] if then else [end]:
        site.says(name, state, start=site.now if then is JobState.RUNNING else None)
        await site.polled()
    assert sum(f"({name}) {end.value}" in text for text in site.warned) == failures


async def test_a_job_that_somebody_cancels_is_a_failure_though_an_earlier_cancel_got_no_answer_and_the_queue_forgot_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await begun(tmp_path)
    await site.scale(3)
    with monkeypatch.context() as patch:
        refuses(site, patch)
        await site.scale(2)
    await site.scale(3)
    site.forgets("demo-2")
    await site.passes(150)
    assert site.shown["demo-2"][0] == "cancelled", "as far as is known"
    site.says("demo-2", JobState.RUNNING, name="demo-2")
    await site.starts("demo-2")
    site.warned.clear()
    await site.ends("demo-2", JobState.CANCELLED)
    assert any("(demo-2) cancelled" in text for text in site.warned)


async def test_no_start_is_expected_of_a_pending_job_that_was_cancelled(tmp_path: Path) -> None:
    site = await waiting(tmp_path)
    job_id = site.scheduler.job_id
    assert job_id is not None
    site.queue.jobs[job_id] = replace(site.queue.jobs[job_id], expected_start=site.now + 60)
    await site.state.poll()
    assert site.scheduler.info(now=site.now).expected_start == site.now + 60
    site.state.dispatcher.will_cancel([site.scheduler.name])
    await site.state.dispatcher.cancel([job_id])
    shown = site.scheduler.info(now=site.now)
    assert (shown.state, shown.expected_start) == ("completing", None)


async def test_the_time_of_a_job_that_was_cancelled_is_not_counted_although_the_queue_still_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    site.now += HOUR
    monkeypatch.setattr(site.queue, "cancel", lambda ids, *, only_pending=False: None)  # it takes its time
    await site.scale(0)
    used = site.group.gpu_seconds(now=site.now)
    await site.passes(600)
    assert set(states(site)) == {JobState.RUNNING}
    assert 2 * HOUR <= used <= site.group.gpu_seconds(now=site.now) <= used + 60


async def test_workers_have_the_same_time_to_retire_when_an_operator_shortens_the_walltime(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    await site.loaded()
    site.says("demo-0", JobState.RUNNING, start=site.now, end=site.now + 500)
    await site.polled()
    await site.passes(190)
    assert "demo-0" in site.registry.active
    await site.passes(20)
    assert "demo-0" not in site.registry.active, "300 s before the end, as with 48 hours"


async def test_only_a_job_all_of_whose_workers_are_named_is_released(tmp_path: Path) -> None:
    site = Site(tmp_path, gpus=4)
    await site.begin(2)
    workers = worker_names.workers_of("demo-0", site.options.worker)
    site.reconciler.scale_down(set(workers[:1]))
    await site.settled()
    assert set(site.registry.active) == {"demo-0", "demo-1"}
    site.reconciler.scale_down(set(workers))
    assert set(site.registry.active) == {"demo-1"}
    await site.settled()


async def test_no_job_comes_in_the_place_of_one_that_is_released_with_one_of_another_group(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    site.registry.add_group("cpu", site.options.worker, tmp_path / "worker")
    site.reconciler.order(AddGroup("cpu", 1))
    await site.settled()
    await site.starts("demo-2")
    site.reconciler.scale_down({"demo-0", "demo-2"})
    await site.settled()
    assert set(site.registry.active) == {"demo-1"} and "demo-3" not in {one.name for one in site.queue.jobs.values()}
    assert [group.limits.maximum for group in site.state.wanted.groups.values()] == [1, 0]


async def test_a_cancel_that_the_queue_refused_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    dispatcher = site.state.dispatcher
    job_id = await dispatcher.submit(tmp_path / "worker", name="demo-0", kind="worker")
    with monkeypatch.context() as patch, pytest.raises(BatchUnavailable, match="permission denied"):
        refuses(site, patch)
        await dispatcher.cancel([job_id])
    await dispatcher.cancel([job_id])
    assert states(site) == [JobState.CANCELLED]


async def test_a_job_whose_submit_is_under_way_at_the_close_is_cancelled_when_its_id_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    dispatcher, submit = site.state.dispatcher, site.queue.submit

    def closed_meanwhile(*arguments: Any, **named: Any) -> str:
        job_id = submit(*arguments, **named)
        with pytest.raises(BatchUnavailable, match="the submission of demo-0 is still under way"):
            dispatcher.cancel_all(0.0)
        return job_id

    monkeypatch.setattr(site.queue, "submit", closed_meanwhile)
    job_id = await dispatcher.submit(tmp_path / "worker", name="demo-0", kind="worker")
    assert states(site) == [JobState.CANCELLED]
    site.queue.jobs[job_id] = replace(site.queue.jobs[job_id], name="")  # a queue without a history forgets it
    await dispatcher.poll()
    assert dispatcher.left() == []


async def test_a_job_that_starts_just_before_its_cancel_is_released_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    site = await begun(tmp_path)
    await site.scale(3)
    [name] = [name for name, job in site.registry.active.items() if job.pending]
    cancel = site.queue.cancel

    def too_late(job_ids: Any, *, only_pending: bool = False) -> None:
        if only_pending:
            site.says(name, JobState.RUNNING, start=site.now)
        cancel(job_ids, only_pending=only_pending)

    monkeypatch.setattr(site.queue, "cancel", too_late)
    await site.scale(2)
    await site.passes(100)
    assert states(site).count(JobState.RUNNING) == 2 and not any(job.draining for job in site.registry.worker_jobs)


async def test_a_cluster_whose_jobs_still_end_at_the_close_does_not_count_as_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await begun(tmp_path)
    monkeypatch.setattr(closing_of_cluster, "CLOSE_TIMEOUT", 0.9)  # the first pause is longer
    monkeypatch.setattr(site.queue, "cancel", lambda job_ids, *, only_pending=False: None)  # it takes its time
    closing = await closed(site)
    assert closing.left and not site.directory.closed
    assert any("may still be in the queue" in text for text in site.warned)


@pytest.mark.parametrize("lost", ["the cluster", "its name"])
async def test_a_close_does_nothing_to_a_cluster_that_another_program_has_or_to_a_later_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    site = await begun(tmp_path)
    monkeypatch.setattr(closing_of_cluster, "CLOSE_TIMEOUT", 0.9)  # the first pause is longer
    site.reconciler.order(Close())
    site.state.closes()
    closing, directory = Closing(site.reconciler, quiet=True), site.directory
    if lost == "the cluster":
        directory.take_over("another program")
    else:
        directory = create_directory.claim(directory.path, None, system="slurm")
    await closing.cancel()
    await closing.wait()
    closing.finish()
    assert directory.dashboard_token() and not directory.closing
    assert not any("hpcgpu stop" in text for text in site.warned), "that would end the other program's cluster"
    assert states(site) == [JobState.RUNNING if lost == "the cluster" else JobState.CANCELLED] * 2


async def test_the_tasks_of_a_job_that_somebody_cancelled_are_not_blamed(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    await site.ends("demo-0", JobState.CANCELLED)
    await site.ends("demo-1", JobState.FAILED, exit_code=1)
    assert {"demo-0", "demo-1"} == set(site.client.over) and site.client.blamed == ["demo-1"]


async def test_the_hours_of_an_earlier_job_count_for_each_of_its_gpus(tmp_path: Path) -> None:
    site = Site(tmp_path, gpus=4)
    await site.begin(1)
    site.now += HOUR
    await site.ends("demo-0", JobState.TIMEOUT)
    other = await taken_over(site, tmp_path)
    assert other.group.gpu_seconds(now=site.now) == pytest.approx(4 * HOUR, abs=60)


async def test_a_job_whose_end_is_seen_late_ended_when_the_queue_reports(tmp_path: Path) -> None:
    site = await begun(tmp_path)
    job, ended = site.job("demo-0"), site.state.now + 10
    site.loses("demo-0")
    site.says("demo-0", JobState.FAILED, end=ended)
    site.now += 3600  # as of a laptop that slept
    await site.polled()
    assert isinstance(job.phase, Ended) and job.phase.at == ended
