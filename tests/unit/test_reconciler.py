"""What the manager of a cluster does about each failure, with a queue, a scheduler and a clock that the test drives."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from distributed.exceptions import WorkerStartTimeoutError
from distributed.security import Security

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.client import lost_scheduler
from hpcgpu.cluster.adaptive_state import GPUAdaptive
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable, ClusterError, SubmitLimited, SubmitRefused
from hpcgpu.jobs.job_phases import Draining, Ended, Queued, Running
from hpcgpu.manager import answer_clients, draining
from hpcgpu.manager import periodic_tasks as periodic_module
from hpcgpu.manager import reconciler as reconciler_module
from hpcgpu.manager.periodic_tasks import Periodic
from hpcgpu.manager.start_cluster import Starter
from hpcgpu.manager.submit_planned import wait_for_submits
from hpcgpu.manager.wait_for_workers import HoldWait, wait_for_workers, what_drains_wait_for
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.scaling import worker_names
from hpcgpu.scaling.decide_actions import Drain
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Close, DeleteGroup, Detach, Scale, WantedGroup, to_json
from hpcgpu.state.cluster_phases import Kind, Ownership
from hpcgpu.store import create_directory, saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.journal import End
from tests.unit.simulated import HOUR, Site, closed, ended, taken_over


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    monkeypatch.setattr(draining, "_STUCK_INTERVAL", 0.0)
    made = Site(tmp_path)
    await made.begin(2)
    yield made
    await made.settled()


# Jobs that end


async def test_a_job_that_dies_before_its_worker_connects_is_reported_and_replaced(site: Site) -> None:
    await site.scale(3)
    await site.ends("demo-2", JobState.FAILED, exit_code=3)
    [told] = site.warned
    assert (
        told.startswith("worker job 4 (demo-2) failed: ")
        and "exit code 3; none of its workers had connected. Log: " in told
    )
    assert told.endswith("hpcgpu replaces it.")
    assert set(site.registry.active) == {"demo-0", "demo-1", "demo-3"}
    assert site.group.failures.failed == 1


async def test_a_job_that_somebody_else_cancelled_is_reported_once(site: Site) -> None:
    await site.ends("demo-0", JobState.CANCELLED)
    assert site.warned[0].startswith(f"worker job {site.job('demo-0').job_id} (demo-0) cancelled: ")
    await site.passes(30)
    assert len(site.warned) == 1


async def test_a_job_whose_walltime_is_over_is_replaced_and_is_no_failure(site: Site) -> None:
    await site.passes(60, step=10)
    await site.ends("demo-0", JobState.TIMEOUT)
    assert site.group.failures.failed == 0 and not site.client.blamed
    assert set(site.registry.active) == {"demo-1", "demo-2"}


async def test_no_job_is_submitted_into_a_reservation_that_ends(site: Site) -> None:
    """It would end with the one that it replaces."""
    closes = site.now + 2 * HOUR
    for name in ("demo-0", "demo-1"):
        site.says(name, JobState.RUNNING, start=site.now, end=closes, closes=closes)
    site.group.waits.extend([HOUR] * 5)  # another is wanted an hour before
    await site.passes(2 * HOUR - 400, step=60)
    assert set(site.registry.active) == {"demo-0", "demo-1"}
    await site.passes(200, step=20)
    await site.ends("demo-0", JobState.CANCELLED)
    await site.passes(60, step=10)
    assert set(site.registry.active) <= {"demo-1"} and "the reservation ends at" in site.group.reason
    await site.passes(closes + 30 - site.now, step=10)
    assert set(site.registry.active) <= {"demo-1"}, "nor just after its end: its queue is closed"


async def test_a_scheduler_job_that_the_queue_only_calls_failed_was_killed_for_memory(site: Site) -> None:
    """As Slurm 22.05 without control groups reports it: in the log alone."""
    told = "hpcgpu: unpacking /env.tar into /dev/shm/env, which is memory\n"
    site.scheduler.log.parent.mkdir(parents=True, exist_ok=True)
    site.scheduler.log.write_text(f"{told}slurmstepd: error: Exceeded job memory limit\n")
    site.says("demo-scheduler", JobState.FAILED, exit_code=1)
    await site.polled()
    report = site.scheduler.failure_report()
    assert "used more memory than it requested: increase `scheduler={'memory': ...}`" in report
    assert "/dev/shm/env, where its environment is, is memory too: set `local_directory` to a disk" in report


async def test_a_report_begins_with_the_error_of_the_scheduler_s_extension_however_much_follows_it(site: Site) -> None:
    error = "no heartbeat from the cluster's manager for 600 s (option lease): this scheduler ends"
    lines = [f"distributed.hpcgpu - ERROR - hpcgpu: {error}", *["distributed.core - INFO - closes a connection"] * 100]
    site.scheduler.log.parent.mkdir(parents=True, exist_ok=True)
    site.scheduler.log.write_text("\n".join(lines))
    site.says("demo-scheduler", JobState.FAILED, exit_code=1)
    await site.polled()
    report = site.scheduler.failure_report().splitlines()
    assert f"; {error}. Log: {site.scheduler.log}" in report[0]
    assert report[1] == lines[0] and len(report) == 22


async def test_of_a_job_of_several_nodes_the_log_of_the_node_that_failed_is_shown(site: Site) -> None:
    job, failed = site.job("demo-0"), ["1: no driver here", "srun: error: n1: task 1: Exited with exit code 3"]
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.log.write_text("\n".join(["0: starts", *failed, "0: works, for 1: it has a driver"]))
    assert job.log_tail(node=1).splitlines() == failed
    job.log.write_text("no labels\n\x1b[2Jhere\n")
    assert job.log_tail(node=1).splitlines() == ["no labels", r"\x1b[2Jhere"]


async def test_the_gpus_of_all_nodes_of_a_job_are_paid(site: Site) -> None:
    site.group.options = replace(site.group.options, nodes_per_job=3, gpus_per_node=4)
    before = site.group.gpu_seconds(now=site.now)
    assert site.group.gpu_seconds(now=site.now + 100) - before == 100 * 2 * 3 * 4, "two jobs run"


async def test_the_tasks_of_a_job_that_crashes_are_charged(site: Site) -> None:
    await site.passes(60, step=10)
    await site.ends("demo-0", JobState.OUT_OF_MEMORY)
    assert site.client.blamed == ["demo-0"]
    assert "it used more memory than it requested (the default of the queue)" in site.warned[0]


async def test_a_crash_that_the_scheduler_did_not_receive_is_charged_as_soon_as_it_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, errors = site.client.ended, [TimeoutError(), OSError("Connection reset by peer")]

    async def late(names: Iterable[str], crashed: Iterable[str]) -> None:
        if errors:
            raise errors.pop()
        await ended(names, crashed)

    monkeypatch.setattr(site.client, "ended", late)
    await site.passes(60, step=10)
    await site.ends("demo-0", JobState.OUT_OF_MEMORY)
    await site.polled()
    assert not errors and not site.client.blamed
    await site.polled()
    await site.polled()
    assert site.client.blamed == ["demo-0"], "and only once"


@pytest.mark.parametrize("given", [None, "--exclude=n7", "--exclude n7", "-x n7"])
async def test_a_node_that_fails_is_avoided_with_those_that_the_user_excludes(site: Site, given: str | None) -> None:
    """The batch system follows the last such option only."""
    own = [given] if given is not None else []
    site.group.options = replace(site.group.options, job_extra_directives=["--mem=0", *own])
    await site.ends("demo-0", JobState.NODE_FAIL)
    await site.passes(11)
    assert list(site.group.failures.excluded) == ["n-demo-0"]
    assert site.queue.excluded == [*["n7" for _ in own], "n-demo-0"]
    assert site.group.failures.failed == 0


async def test_a_node_that_fails_is_avoided_also_if_the_queue_does_not_name_it_at_the_end(site: Site) -> None:
    await site.ends("demo-0", JobState.NODE_FAIL, node="")
    await site.passes(11)
    assert site.queue.excluded == ["n-demo-0"]


async def test_a_worker_job_that_is_killed_for_memory_before_its_worker_connects_is_reported_as_that(
    site: Site,
) -> None:
    await site.scale(3)
    log = site.job("demo-2").log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("slurmstepd: error: Exceeded job memory limit\n")
    await site.ends("demo-2", JobState.FAILED, exit_code=1)
    assert "failed: it used more memory than it requested (the default of the queue)" in site.warned[0]


async def test_after_too_many_failures_nothing_is_replaced_until_the_user_asks(site: Site) -> None:
    for _ in range(site.options.cluster.worker_restarts + 1):
        await site.passes(120, step=10)
        await site.ends(max(site.registry.active), JobState.FAILED)
    assert site.group.failures.paused.startswith(
        "3 worker jobs failed in a row; they are not replaced until you scale or adapt the group again, "
        "or run `hpcgpu resume` (worker_restarts=2)"
    )
    await site.passes(HOUR, step=10)
    assert set(site.registry.active) == {"demo-0"}
    with pytest.raises(ClusterError, match="3 worker jobs failed in a row"):
        site.state.check()
    site.state.check()  # it was reported
    await site.scale(2)
    assert len(site.registry.active) == 2


async def test_a_paused_adaptive_group_reports_how_it_is_resumed_and_then_has_no_failure_left(site: Site) -> None:
    limits = Limits(minimum=2, maximum=2)
    adaptive = site.adapt(limits)
    for _ in range(site.options.cluster.worker_restarts + 1):
        await site.passes(120, step=10)
        await site.ends(max(site.registry.active), JobState.FAILED)
    again = (
        "they are not replaced until you scale or adapt the group again, call cluster.adaptive.resume(), "
        "or run `hpcgpu resume`"
    )
    assert again in adaptive.state.paused and again in site.warned[-1]
    adaptive.resume()
    await site.settled()
    site.state.check()  # what failed was before
    assert len(site.registry.active) == 2, "at once"
    assert adaptive.log[-1][1] != "resumed by the user" and "resumed by the user" in [text for _, text in adaptive.log]


async def test_the_size_at_which_adaptive_scaling_stops_is_recorded(site: Site) -> None:
    limits = Limits(minimum=1, maximum=5)
    adaptive = site.adapt(limits)
    assert site.directory.wanted().sizes == {}
    adaptive.stop()
    await site.settled()
    assert site.directory.wanted().sizes == {"default": 2} and len(site.registry.active) == 2
    assert not adaptive.running


async def test_groups_can_be_read_in_other_threads_while_some_are_added_and_deleted(site: Site) -> None:
    for _ in site.registry.groups.values():
        added = site.registry.add_group("more", site.options.worker, Path("worker-more"))
    assert list(site.registry.groups) == ["default", "more"]
    for _ in site.registry.groups.values():
        if added in site.registry.groups.values():
            site.registry.delete_group(added)
    assert list(site.registry.groups) == ["default"]


async def test_a_job_that_failed_is_not_replaced_before_it_counts_as_a_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = site.client.workers

    async def decided_meanwhile() -> Mapping[str, Mapping[str, Any]]:
        site.reconciler.decide()  # as it does each second
        return await workers()

    monkeypatch.setattr(site.client, "workers", decided_meanwhile)
    for _ in range(site.options.cluster.worker_restarts + 1):
        await site.passes(120, step=10)
        await site.ends(max(site.registry.active), JobState.FAILED)
    assert site.group.failures.paused
    assert set(site.registry.active) == {"demo-0"}, "the last one was replaced, though the group is paused"


async def test_a_job_that_vanishes_is_waited_for_before_it_counts_as_ended(site: Site) -> None:
    site.loses("demo-0")
    site.forgets("demo-0")
    await site.passes(50)
    assert site.shown["demo-0"][0] == "unknown"
    assert "demo-0" in site.registry.active and not site.warned
    await site.passes(300)
    assert "demo-0" not in site.registry.active and "the queue has not known it for" in site.warned[0]


async def test_a_connected_worker_proves_that_its_job_runs_whatever_the_queue_reports(site: Site) -> None:
    site.forgets("demo-0")
    await site.passes(600, step=10)
    assert site.shown["demo-0"] == ("running", "") and "demo-0" in site.registry.active
    site.loses("demo-0")
    await site.polled()
    assert isinstance(site.job("demo-0").phase, Ended)


# Submits


async def test_a_refused_submit_reaches_the_user_once_and_is_not_tried_again(site: Site) -> None:
    site.queue.refusal = SubmitRefused("Invalid account")
    await site.scale(3)
    await site.passes(HOUR, step=10)
    assert len(site.registry.active) == 2
    assert site.warned == ["worker job demo-2 was not submitted: Invalid account"]
    assert site.reconciler.warnings() == site.warned, "other programs show it, too"
    with pytest.raises(ClusterError, match="Invalid account"):
        site.state.check()


async def test_a_site_that_allows_no_more_jobs_is_asked_again_later(site: Site) -> None:
    site.queue.refusal = SubmitLimited("QOSMaxSubmitJobPerUserLimit")
    await site.scale(3)
    assert not site.warned and "The site accepts no more jobs of yours now" in site.logged[-1]
    site.queue.refusal = None
    await site.passes(290, step=10)
    assert len(site.registry.active) == 2
    await site.passes(20)
    assert len(site.registry.active) == 3


async def test_a_site_that_allows_no_job_at_all_is_a_failure(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(0)
    site.queue.refusal = SubmitLimited("QOSMaxSubmitJobPerUserLimit")
    await site.scale(1)
    assert site.warned == ["worker job demo-0 was not submitted: QOSMaxSubmitJobPerUserLimit"]
    with pytest.raises(ClusterError, match="QOSMaxSubmitJobPerUserLimit"):
        site.state.check()


async def test_of_many_jobs_that_the_queue_refuses_a_few_are_tried(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(2)
    for refusal in (SubmitLimited("QOSMaxSubmitJobPerUserLimit"), SubmitRefused("Invalid account")):
        site.queue.refusal, tried = refusal, len(site.directory.submits())
        await site.scale(200)
        await site.passes(290, step=10)
        assert len(site.directory.submits()) - tried <= 4, "as many as are submitted at a time"
        assert len(site.registry.active) == 2
    site.queue.refusal = None
    await site.scale(30)
    await site.passes(20)
    assert len(site.registry.active) == 30


async def test_a_submit_that_may_have_been_accepted_is_reported(site: Site) -> None:
    site.queue.refusal = AmbiguousSubmit("Slurm did not say whether it accepted job 'demo-2'")
    await site.scale(3)
    assert site.warned[0].startswith("Slurm did not say whether it accepted job 'demo-2'")
    assert site.state.dispatcher.left()[-1] == "demo-2", "it is looked up when the cluster is closed"


async def test_a_job_whose_submit_was_not_confirmed_and_that_cannot_be_looked_up_is_reported_at_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(job_name: str) -> list[str]:
        raise BatchUnavailable("squeue does not answer")

    site.queue.refusal = AmbiguousSubmit("Slurm did not say whether it accepted job 'demo-2'")
    await site.scale(3)
    monkeypatch.setattr(site.queue, "find", silent)
    await closed(site)
    assert any("it is not known whether job 'demo-2' exists: squeue does not answer" in text for text in site.warned)
    assert not site.directory.closed, "`hpcgpu stop` still finds it"


async def test_a_submit_that_finds_its_name_lost_writes_nothing_into_the_journal_of_the_other_cluster(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    intend, identity = site.directory.intend, site.directory.path / "cluster.json"

    def lost(*arguments: str) -> None:
        intend(*arguments)
        identity.write_text(identity.read_text().replace(site.directory.token(), "1"))

    monkeypatch.setattr(site.directory, "intend", lost)
    await site.scale(3)
    assert len(site.queue.jobs) == 3, "nothing is submitted"
    assert not any(one.refused for one in site.directory.submits()), "the other cluster may just submit this job"


async def test_a_cluster_whose_directory_was_removed_cancels_its_jobs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(site.directory.path)
    for _ in range(2):
        site.state.dispatcher.check_manager()  # the filesystem may fail for a moment
        site.now += 200
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_queue()
    site.state.poll_now.set()
    await asyncio.wait(periodic.tasks, timeout=60)
    assert f"its directory {site.directory.path} was removed" in site.warned[0]
    assert {status.state for status in site.queue.jobs.values()} == {JobState.CANCELLED}


# The queue and the scheduler


async def test_a_queue_that_does_not_answer_changes_nothing(site: Site) -> None:
    site.queue.silent = True
    before = site.shown
    await site.passes(HOUR, step=10)
    assert site.shown == before and site.state.dispatcher.monitor.error == "squeue does not answer"
    assert not site.warned


async def test_the_end_of_the_scheduler_job_ends_the_cluster(site: Site) -> None:
    site.says("demo-scheduler", JobState.TIMEOUT)
    site.client.listening = False
    await site.polled()
    assert site.state.phase.lost.startswith(
        "the scheduler of cluster demo is gone, and its worker jobs are cancelled: scheduler job 1"
    )
    assert {state for state, _ in site.shown.values()} <= {"timeout", "completing", "cancelled"}
    assert site.registry.active == {} and not site.state.managed
    assert not site.directory.dashboard_token() and site.directory.closing, "nobody reaches what is left of it"
    for _ in range(2):
        with pytest.raises(ClusterError, match="is gone"):
            site.state.check()


async def test_a_silent_scheduler_whose_node_the_batch_system_has_lost_is_reported_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.says("demo-scheduler", JobState.RUNNING, out_of_reach=True, reason="no contact since 14:00, waits until 14:40")
    site.client.listening = False
    site.loses("demo-0")
    await site.polled()
    for _ in range(100):
        site.now += 1
        site.reconciler.observe_answer(False)
    words = "the batch system has lost contact with its node: wait until the node is back, or stop the cluster"
    [told] = site.warned
    assert f"has not answered for 60 s: {words}" in told and "[no contact since 14:00, waits until 14:40]" in told
    scheduler = site.scheduler.info(now=site.now)
    assert scheduler.state == "running" and scheduler.reason.startswith(words)
    with pytest.raises(WorkerStartTimeoutError) as caught:
        await wait_for_workers(site.state, None, 0.1, quiet=True)
    assert words in caught.value.__notes__[0]
    # and its clients, those of this program and others
    monkeypatch.setattr(lost_scheduler, "END_REPORTED", 0.2)
    monkeypatch.setattr(lost_scheduler, "batch_of", lambda directory: site.queue)
    why = await answer_clients._why_lost(weakref.ref(site.state), site.directory, "tls://scheduler", "1")
    assert why.startswith(f"the scheduler of cluster demo does not answer: scheduler job 1 runs, but {words}")
    assert await lost_scheduler.end_in_queue(site.directory, "1") == why


async def test_a_scheduler_that_is_silent_though_its_job_runs_is_reported_once(site: Site) -> None:
    site.client.listening = False
    for _ in range(300):
        site.now += 1
        site.reconciler.observe_answer(False)
    [told] = site.warned
    assert told.startswith(
        "the scheduler at tls://scheduler has not answered for 60 s, though its job runs; hpcgpu keeps trying. Log: "
    )
    await site.ends("demo-0", JobState.FAILED)
    assert len(site.warned) == 1, "workers that end now may only have lost their scheduler"
    site.client.listening = True
    site.reconciler.observe_answer(True)
    await site.polled()
    assert "demo-0" in site.warned[1]


async def test_the_scheduler_of_a_lost_cluster_is_not_expected_to_answer(site: Site) -> None:
    await site.reconciler.fail("scheduler job 1 completed")
    for _ in range(300):
        site.now += 1
        site.reconciler.observe_answer(False)
    assert site.warned == ["scheduler job 1 completed"]


async def test_a_scheduler_that_does_not_answer_though_its_connection_stays_open_is_reported_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel answers for a process that is suspended, or whose event loop is blocked."""
    answers, answered = [False] * 15 + [True], asyncio.Event()

    async def heartbeat(manager: int, *report: object) -> int:
        site.now += 20
        site.state.heartbeat_now.set()
        if answers.pop(0):
            return manager
        raise TimeoutError

    async def describe(name: str, system: str) -> None:
        answered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(site.client, "heartbeat", heartbeat)
    monkeypatch.setattr(site.client, "describe", describe)
    monkeypatch.setattr(site.client, "stream_ended", asyncio.Event().wait, raising=False)
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    await asyncio.wait_for(answered.wait(), 60)
    for task in periodic.tasks:
        task.cancel()
    [told] = site.warned
    assert told.startswith("the scheduler at tls://scheduler has not answered for 60 s, though its job runs; hpcgpu")
    assert site.logged[-1] == "the scheduler answers again"
    site.state.check()  # no later call fails because of it


async def test_another_manager_is_left_alone_with_the_cluster(site: Site) -> None:
    site.directory.take_over("another program")
    with pytest.raises(ClusterError, match="was taken over by another program; this program no longer scales it"):
        site.reconciler.order(Scale(DEFAULT, 5))
    await site.settled()
    assert site.state.phase.kind is Kind.SUPERSEDED and len(site.queue.jobs) == 3
    assert site.warned[0].startswith("cluster demo was taken over by another program; this program no longer scales it")
    await site.passes(100, step=10)
    assert len(site.queue.jobs) == 3
    assert site.state.ownership.leaves_jobs(site.state.phase, cancelled=False)


@pytest.mark.parametrize("whose", ["its own", "a later cluster's"])
async def test_a_program_whose_cluster_was_taken_over_reads_of_its_own_next_scheduler_only(
    site: Site, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    moved, directory = list[str](), site.directory
    monkeypatch.setattr(site.client, "move", moved.append, raising=False)
    site.state.supersede("cluster demo was taken over by another program")
    if whose != "its own":
        directory.close()
        directory = create_directory.claim(directory.path, None, system="slurm")
    directory.publish(Contact(token=directory.token(), job_id="9", workers="tls://next", client="tls://next"))
    assert site.state.present_client() is not None
    assert moved == (["tls://next"] if whose == "its own" else [])


async def test_a_cluster_that_lost_its_name_cancels_its_jobs(site: Site) -> None:
    (site.directory.path / "cluster.json").write_text(
        (site.directory.path / "cluster.json").read_text().replace(site.directory.token(), "1")
    )
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_queue()
    site.state.poll_now.set()
    await asyncio.wait(periodic.tasks, timeout=60)
    assert "another cluster now has its name and its directory" in site.state.phase.lost
    assert site.state.dispatcher.advice() == "Cancel them with the batch system's own command", (
        "not the other one's jobs"
    )
    assert {status.state for status in site.queue.jobs.values()} == {JobState.CANCELLED}
    journal = (site.directory.path / "journal.jsonl").read_text()
    site.state.dispatcher.note_ends({"demo-0": site.job("demo-0").job_id})
    assert (site.directory.path / "journal.jsonl").read_text() == journal, "the journal belongs to the other cluster"


async def test_a_cluster_that_lost_its_name_reports_it_and_nothing_else(site: Site) -> None:
    site.group.want(WantedGroup(limits=Limits(maximum=1, fixed=True)))
    identity = site.directory.path / "cluster.json"
    identity.write_text(identity.read_text().replace(site.directory.token(), "1"))
    site.client.stream_ended = asyncio.Event().wait  # type: ignore[attr-defined]
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    site.state.decide_now.set()
    await asyncio.wait_for(site.state.poll_now.wait(), 60)
    periodic.watch_queue()
    while not site.state.phase.lost:
        await asyncio.sleep(0.01)
    for task in periodic.tasks:
        task.cancel()
    assert all("another cluster now has its name and its directory" in text for text in site.warned)
    assert not any("internal error" in text for text in site.warned)


# Draining


async def test_a_job_of_a_deleted_group_that_comes_back_is_drained(site: Site) -> None:
    site.loses("demo-0")
    site.forgets("demo-0")
    await site.passes(100)
    site.job("demo-0").group = site.registry.add_group("other", site.options.worker, Path("worker"))
    site.registry.delete_group(site.job("demo-0").group)
    await site.passes(10)
    assert site.registry.deleted == []
    site.says("demo-0", JobState.RUNNING, name="demo-0")
    site.client.there["tls://demo-0"] = {"name": "demo-0"}
    site.reconciler.worker_joined("tls://demo-0", "demo-0")
    assert [group.name for group in site.registry.deleted] == ["other"]
    await site.passes(10)
    assert "demo-0" not in site.registry.active


async def test_a_program_whose_cluster_is_taken_over_while_it_drains_cancels_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def taken_over(names: Iterable[str]) -> Mapping[str, int]:
        site.directory.take_over("another program")
        return {}

    monkeypatch.setattr(site.client, "unfinished", taken_over)
    await site.scale(1)
    assert site.state.phase.superseded and len(site.warned) == 1
    assert JobState.CANCELLED not in {status.state for status in site.queue.jobs.values()}
    assert [submit.unwanted for submit in site.directory.submits()].count(True) == 1, "the other one completes it"


async def test_a_job_whose_data_fits_nowhere_else_stays_and_counts(site: Site) -> None:
    site.client.full = True
    await site.scale(1)
    assert [text for text in site.warned if "does not fit on other workers. Free some of it, and scale again" in text]
    assert len(site.registry.active) == 2 and site.group.limits.maximum == 2
    assert site.client.resumed == [next(name for name in ("demo-0", "demo-1") if name in site.warned[0])]
    assert [submit.unwanted for submit in site.directory.submits()] == [False] * 3
    site.client.full = False
    await site.passes(4)
    await site.scale(1)
    assert len(site.registry.active) == 1


async def passes_until(site: Site, until: Callable[[], object]) -> None:
    """Let time pass while jobs drain: a second each time that the workers are asked, however long the queue takes."""
    began = site.now
    while not until():
        assert site.now - began < HOUR, f"what the test waits for has not happened for an hour: {site.shown}"
        site.now += 1
        asked = site.client.asked
        while site.client.asked == asked and not until():
            assert site.state.tasks, f"no job drains any more, and what the test waits for did not happen: {site.shown}"
            await asyncio.sleep(0)


async def test_a_call_that_does_not_end_is_waited_for_ten_minutes_and_the_user_reads_which(site: Site) -> None:
    began = site.now
    site.client.working = {name: {"calls": ["train"], "tasks": []} for name in ("demo-0", "demo-1")}
    site.reconciler.order(Scale(DEFAULT, 1))
    await passes_until(site, lambda: site.warned)
    assert 600 <= site.now - began < 610
    [job] = [job for job in site.registry.worker_jobs if job.draining]
    assert site.warned == [
        f"worker job {job.job_id} ({job.name}) ends although work runs on it after 10 min: "
        f"a call of `train` on worker {job.name}. Calls fail"
    ]
    await site.settled()
    assert not job.workers and len(site.warned) == 1


@pytest.mark.parametrize("named", [False, True])
async def test_workers_that_a_program_holds_are_waited_for_without_a_limit_until_the_walltime_ends(
    site: Site, named: bool
) -> None:
    end = site.now + 48 * HOUR
    site.says("demo-0", JobState.RUNNING, start=site.now, end=end, node="n")
    site.says("demo-1", JobState.RUNNING, start=site.now, end=end, node="n")
    await site.reconciler.observe_queue()
    site.client.working = {name: {"calls": ["train"], "tasks": []} for name in ("demo-0", "demo-1")}
    site.client.held = {"demo-0", "demo-1"}
    if named:
        site.reconciler.scale_down({"demo-0"})
    else:
        site.reconciler.order(Scale(DEFAULT, 1))
    began = site.now
    await passes_until(site, lambda: site.now > began + 100)
    site.state.poll_now.clear()
    await passes_until(site, lambda: site.now > began + 3000)
    [job] = [job for job in site.registry.worker_jobs if job.draining]
    assert job.workers and not site.warned and not site.client.retired, "its drain has not begun"
    assert not site.state.poll_now.is_set(), "the queue is not polled for it"
    assert job.info(now=site.now).reason == "it ends when a program that holds its workers lets them go"
    assert what_drains_wait_for([job]) == f"a program that holds workers of {job.name}"
    end = site.now + 240
    site.says(job.name, JobState.RUNNING, start=site.now, end=end, node="n")
    await site.reconciler.observe_queue()
    await passes_until(site, lambda: not job.draining)
    site.reconciler.decide()
    await passes_until(site, lambda: site.warned)
    assert site.now < end and site.client.retired == {job.name}
    assert site.warned[0].endswith(
        f"as its walltime ends: a call of `train` on worker {job.name}, worker {job.name} that a program holds. "
        "Calls fail. The program gets an error"
    )
    await site.settled()


async def test_a_drain_waits_until_the_scheduler_answers_whether_a_program_holds_the_workers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(names: Iterable[str]) -> Collection[str]:
        site.client.asked += 1
        raise OSError("the scheduler is busy")

    with monkeypatch.context() as busy:
        busy.setattr(site.client, "will_leave", no_answer)
        site.reconciler.order(Scale(DEFAULT, 1))
        began = site.now
        await passes_until(site, lambda: site.now > began + 60)
        [job] = [job for job in site.registry.worker_jobs if job.draining]
        assert job.workers and not site.client.retired, "perhaps a program holds them"
    await site.settled()
    assert site.client.retired == {job.name}


async def test_a_job_with_held_workers_ends_with_the_budget_though_its_drain_waited_for_the_program(site: Site) -> None:
    site.adapt(Limits(minimum=2, maximum=2, gpu_seconds=60 * HOUR))
    site.client.held = {"demo-0", "demo-1"}
    site.client.working = {"demo-0": {"calls": ["train"], "tasks": []}}
    site.reconciler.scale_down({"demo-0"})
    began = site.now
    await passes_until(site, lambda: site.now > began + 60)
    assert site.job("demo-0").draining and site.job("demo-1").active
    site.now += 40 * HOUR
    site.reconciler.decide()
    await passes_until(site, lambda: not site.job("demo-0").draining)
    site.reconciler.decide()
    await passes_until(site, lambda: site.job("demo-0").cancelled_at is not None)
    assert "as the budget of GPU hours is used up: a call of `train` on worker demo-0" in site.warned[-1]
    await site.settled()
    assert site.client.retired == {"demo-0", "demo-1"} and not site.registry.active


async def test_a_job_that_stays_after_all_can_be_held_again_with_a_worker_that_is_away(tmp_path: Path) -> None:
    site = Site(tmp_path, gpus=2)
    await site.begin(2)
    site.client.full = True
    away = next(iter(site.job("demo-0").workers))
    site.client.there.pop(away)
    site.job("demo-0").workers.pop(away)
    site.reconciler.drainer.drain(["demo-0"], Drain.UNWANTED)
    await passes_until(site, lambda: site.job("demo-0").active)
    assert {"demo-0-0", "demo-0-1"} <= set(site.client.resumed)
    await site.settled()


async def test_a_failure_that_passes_does_not_end_the_wait_for_workers_to_hold(site: Site) -> None:
    site.state.report("could not cancel demo-7: the queue is busy. hpcgpu tries again")
    assert await HoldWait(site.state, 1, {}, []).check() == ""
    with pytest.raises(ClusterError, match="demo-7"):
        site.state.check()


async def test_a_job_that_is_not_held_drains_while_another_waits_for_its_program(site: Site) -> None:
    site.client.held = {"demo-0"}
    site.reconciler.order(Scale(DEFAULT, 0))
    while site.job("demo-1").cancelled_at is None:  # the cancel runs in a thread: simulated time may outrun it
        await asyncio.sleep(0)
    assert site.job("demo-0").draining and site.client.retired == {"demo-1"}
    site.client.held = set()
    await site.settled()
    assert site.client.retired == {"demo-0", "demo-1"}


async def test_a_task_is_waited_for_until_the_walltime_ends_and_the_user_reads_which(site: Site) -> None:
    site.client.working = {"demo-0": {"calls": ["train", ""], "tasks": ["sum-1", "sum-2", "sum-3", "sum-4"]}}
    end = site.now + 48 * HOUR
    site.says("demo-0", JobState.RUNNING, start=site.now, end=end, node="n")
    site.says("demo-1", JobState.RUNNING, start=site.now, end=end + HOUR, node="n")
    site.now = end - 300.0
    await site.reconciler.observe_queue()
    site.reconciler.decide()
    assert site.job("demo-0").draining
    await passes_until(site, lambda: site.warned)
    assert 70 <= end - site.now <= 75, "the last quarter of 5 min is for its results"
    assert site.warned == [
        f"worker job {site.job('demo-0').job_id} (demo-0) ends although work runs on it, as its walltime ends: a call "
        "of `train` on worker demo-0, a call on worker demo-0, task sum-1, task sum-2, task sum-3, 1 more. Calls fail. "
        "Tasks run again on other workers"
    ]


async def test_work_has_most_of_the_time_that_is_left_when_the_queue_reports_late_that_a_job_ends(site: Site) -> None:
    site.client.working = {"demo-0": {"calls": ["train"], "tasks": []}}
    began = site.now
    site.says("demo-0", JobState.RUNNING, start=began - HOUR, end=began + 48 * HOUR, node="n")
    site.says("demo-1", JobState.RUNNING, start=began - HOUR, end=began + 48 * HOUR, node="n")
    await site.reconciler.observe_queue()
    site.says("demo-0", JobState.RUNNING, start=began - HOUR, end=began + 60, node="n")  # it is preempted
    await site.reconciler.observe_queue()
    site.reconciler.decide()
    assert site.job("demo-0").draining and not site.job("demo-1").draining
    await passes_until(site, lambda: site.warned)
    assert 44 <= site.now - began <= 48 and "ends although work runs on it, as its walltime ends" in site.warned[0]


async def test_a_job_of_a_deleted_group_takes_no_tasks_while_its_data_fits_nowhere_else(site: Site) -> None:
    site.client.full = True
    site.reconciler.order(DeleteGroup(DEFAULT))
    await passes_until(site, lambda: len(site.warned) == 2)
    assert all(job.draining for job in site.registry.worker_jobs)
    assert set(site.client.refusing) == {"demo-0", "demo-1"} and not site.client.resumed
    assert site.warned[0] == (
        "job demo-0 of the deleted group default continues until its data is released, because it does not fit on "
        "other workers. It takes no new tasks"
    )
    site.client.full = False
    await passes_until(site, lambda: not site.client.there)
    await site.settled()
    assert len(site.warned) == 2 and not site.registry.active


async def test_a_budget_ends_its_jobs_in_time_also_if_the_scheduler_does_not_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*names: object, **options: object) -> None:
        site.client.asked += 1
        raise OSError("the scheduler is busy")

    for name in ("retire", "unfinished", "runs", "lose"):
        monkeypatch.setattr(site.client, name, no_answer)
    deadline = site.now + 60
    site.reconciler.drainer.drain(["demo-0"], Drain.BUDGET, deadline=deadline)
    await passes_until(site, lambda: site.now > deadline - 10)
    assert site.job("demo-0").workers
    await passes_until(site, lambda: not site.job("demo-0").workers)
    assert site.now < deadline + 10
    await site.settled()
    assert site.queue.jobs[str(site.job("demo-0").job_id)].state is JobState.CANCELLED


@pytest.mark.parametrize("zero", [True, False])
async def test_jobs_that_lose_their_data_end_when_their_work_has_ended_and_take_no_tasks_until_then(
    site: Site, zero: bool
) -> None:
    site.client.full = True
    site.client.working = {name: {"calls": ["train"], "tasks": []} for name in ("demo-0", "demo-1")}
    if zero:
        site.reconciler.order(Scale(DEFAULT, 0))
    else:
        site.reconciler.drainer.drain(["demo-0", "demo-1"], Drain.BUDGET, deadline=site.now + 60)
    began = site.now
    await passes_until(site, lambda: site.now > began + 30)
    assert all(job.workers for job in site.registry.worker_jobs)
    assert set(site.client.refusing) == {"demo-0", "demo-1"} and not site.client.resumed
    del site.client.working["demo-0"]
    await passes_until(site, lambda: not site.job("demo-0").workers)
    assert site.job("demo-1").workers and not site.warned
    del site.client.working["demo-1"]
    await site.settled()
    assert not site.registry.active and site.group.limits.maximum == (0 if zero else 2)
    assert [name for name, _ in site.client.lost] == ([] if zero else ["demo-0", "demo-1"])


async def test_jobs_that_would_have_lost_their_data_take_tasks_again_when_the_queue_does_not_cancel_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.client.full = True
    refuses(site, monkeypatch)
    await site.scale(0)
    assert set(site.client.refusing) == set(site.client.resumed) == {"demo-0", "demo-1"}
    assert len(site.registry.active) == 2


async def test_a_drained_job_is_never_shown_as_running(site: Site) -> None:
    await site.scale(1)
    [drained] = site.registry.draining
    site.says(drained.name, JobState.RUNNING)  # the queue takes its time
    assert site.shown[drained.name] == ("completing", "hpcgpu cancelled it")
    assert drained.info(now=site.now).workers == 0
    await site.polled()
    assert site.shown[drained.name] == ("completing", "hpcgpu cancelled it")
    site.says(drained.name, JobState.CANCELLED)
    await site.polled()
    assert site.shown[drained.name][0] == "cancelled" and not site.warned


async def test_a_job_that_starts_just_before_it_is_cancelled_counts_again(site: Site) -> None:
    await site.scale(3)
    site.says("demo-2", JobState.RUNNING, start=site.now)  # the last poll did not list it
    site.reconciler.order(Scale(DEFAULT, 2))
    phase = site.job("demo-2").phase
    assert isinstance(phase, Draining) and isinstance(phase.before, Queued)
    await site.settled()
    assert isinstance(site.job("demo-2").phase, Running | Draining)
    await site.passes(20)
    assert len(site.registry.active) == 2


async def test_a_job_that_can_never_start_pauses_adaptive_scaling(site: Site) -> None:
    limits = Limits(minimum=3, maximum=3)
    site.adapt(limits)
    await site.settled()
    site.says("demo-2", JobState.PENDING, reason="QOSMaxWallDurationPerJobLimit")
    await site.passes(30)
    assert "demo-2" not in site.registry.active
    [told] = [text for text in site.warned if "will never start: its walltime is above your limit" in text]
    assert "Adaptive scaling is paused until you scale or adapt the group again, call cluster" in told
    assert site.group.failures.paused and len(site.registry.active) == 2


async def test_a_start_ends_with_an_error_if_its_scheduler_job_can_never_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    poll = site.queue.poll

    def never(job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {
            job_id: replace(status, reason="QOSMaxWallDurationPerJobLimit") for job_id, status in poll(job_ids).items()
        }

    monkeypatch.setattr(site.queue, "poll", never)
    periodic = Periodic(site.reconciler, site.options)
    start = asyncio.ensure_future(Starter(site.reconciler, periodic, site.options, Security()).start(AsyncMock()))
    await asyncio.wait([start], timeout=60)
    still_waits = start.cancel()
    for task in periodic.tasks:
        task.cancel()
    assert not still_waits, "the start waits for a scheduler job that can never start"
    with pytest.raises(ClusterError, match=r"scheduler job 1 \(demo-scheduler\) will never start"):
        await start


# What is shown


async def test_a_contact_proves_that_the_scheduler_job_runs_before_the_queue_was_asked(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.registry.add(site.scheduler)
    await site.scheduler.submit()
    assert site.shown["demo-scheduler"] == ("pending", "the queue has not reported it yet")
    site.now += 8
    site.directory.publish(Contact(token=site.directory.token(), job_id="1", workers="ucx://s", client="tls://s"))
    await site.scheduler.wait_until_reachable()
    site.now += 600
    assert site.shown["demo-scheduler"] == ("running", "")
    assert site.scheduler.info(now=site.now).waited == 8
    site.scheduler.record_answer(False)
    assert site.shown["demo-scheduler"] == ("running", ""), "this program has left, and the queue has reported nothing"


async def test_a_job_whose_workers_left_is_not_shown_as_pending_by_an_older_answer_of_the_queue(site: Site) -> None:
    await site.scale(3)
    site.client.there["tls://demo-2"] = {"name": "demo-2"}
    site.reconciler.worker_joined("tls://demo-2", "demo-2")
    assert site.shown["demo-2"] == ("running", "")
    del site.client.there["tls://demo-2"]
    site.reconciler.worker_left("tls://demo-2")
    state, reason = site.shown["demo-2"]
    assert state == "running" and "the queue" not in reason


# What happens between two observations


async def test_a_job_that_crashes_before_the_queue_reports_that_it_runs_is_charged(site: Site) -> None:
    await site.scale(3)
    await site.polled()  # it waits
    site.client.there["tls://demo-2"] = {"name": "demo-2"}
    site.reconciler.worker_joined("tls://demo-2", "demo-2")
    site.now += 5
    await site.ends("demo-2", JobState.FAILED, exit_code=1)
    assert "none of its workers had connected" not in site.warned[0]
    assert site.client.blamed == ["demo-2"]


async def test_a_job_that_is_requeued_waits_as_a_new_one(site: Site) -> None:
    site.loses("demo-0")
    await site.polled()
    assert isinstance(site.job("demo-0").phase, Running)
    site.says("demo-0", JobState.PENDING, reason="BeginTime", node="", start=None, end=None)
    await site.polled()
    assert isinstance(site.job("demo-0").phase, Queued)
    await site.passes(site.options.worker.death_timeout * 2, step=10)
    assert not site.job("demo-0").lost_workers and not site.warned, "workers of a job that waits are not lost"


async def test_a_job_that_failed_keeps_its_place_when_another_had_ended_before_this_program_came(site: Site) -> None:
    await site.scale(3)
    for name in ("demo-1", "demo-2"):
        site.says(name, JobState.FAILED)
        site.loses(name) if site.job(name).workers else None
    phase = site.job("demo-2").phase
    assert isinstance(phase, Queued)
    phase.presumed_ended = True  # as of a manager that attaches
    await site.polled()
    assert [text.split(": ")[0] for text in site.warned] == [f"worker job {site.job('demo-1').job_id} (demo-1) failed"]
    assert len(site.registry.active) == site.group.limits.maximum == 2


async def test_a_job_that_was_taken_for_ended_and_comes_back_counts_and_is_drained(site: Site) -> None:
    site.loses("demo-0")
    site.forgets("demo-0")
    await site.passes(300)
    assert set(site.registry.active) == {"demo-1", "demo-2"}
    await site.starts("demo-2")
    site.client.there["tls://demo-0"] = {"name": "demo-0"}  # its node was cut off for some minutes
    site.says("demo-0", JobState.RUNNING, name="demo-0")  # and so was the queue's view of it
    site.reconciler.worker_joined("tls://demo-0", "demo-0")
    assert site.shown["demo-0"][0] == "running" and len(site.registry.active) == 3
    await site.passes(20)
    assert len(site.registry.active) == 2, "there is one more than the user wants"
    await site.scale(0)
    await site.polled()
    assert {status.state for status in list(site.queue.jobs.values())[1:]} == {JobState.CANCELLED}


async def test_a_worker_of_a_job_that_was_cancelled_does_not_bring_it_back(site: Site) -> None:
    await site.scale(1)
    [drained] = site.registry.draining
    await site.polled()
    site.reconciler.worker_joined(f"tls://{drained.name}", drained.name)
    assert not drained.workers and drained.name not in site.registry.active


async def test_an_error_in_the_queue_s_answer_does_not_make_it_asked_without_a_pause(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()

    async def woken(event: asyncio.Event, timeout: float) -> bool:
        pauses.append(timeout)
        if len(pauses) > 5:
            await asyncio.Event().wait()
        return False

    def nonsense(job_ids: Iterable[str]) -> dict[str, JobStatus]:
        raise ValueError("no such field")

    monkeypatch.setattr(periodic_module, "_woken", woken)
    monkeypatch.setattr(site.queue, "poll", nonsense)
    site.now += HOUR
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_queue()
    while len(pauses) <= 5:
        await asyncio.sleep(0)
    [task] = periodic.tasks
    task.cancel()
    interval = site.options.cluster.poll_interval
    assert all(pause > interval for pause in pauses[1:]), "the queue is asked again at once, for ever"


async def test_scaling_goes_on_after_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    decide, errors = site.reconciler.decide, [OSError("Stale file handle"), OSError("Stale file handle")]
    decided = asyncio.Event()

    def flaky() -> None:
        if errors:
            site.state.decide_now.set()
            raise errors.pop()
        decide()
        decided.set()

    monkeypatch.setattr(site.reconciler, "decide", flaky)
    monkeypatch.setattr(site.client, "stream_ended", asyncio.Event().wait, raising=False)
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    site.state.decide_now.set()
    await asyncio.wait_for(decided.wait(), 60)
    for task in periodic.tasks:
        task.cancel()
    assert len(site.warned) == 1 and "Stale file handle" in site.warned[0], "the same error is told once"


async def test_the_scheduler_receives_heartbeats_of_this_program_also_after_an_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, errors = asyncio.Event(), [KeyError("a group"), KeyError("a group")]

    async def heartbeat(manager: int, *report: object) -> int:
        if errors:
            site.state.heartbeat_now.set()
            raise errors.pop()
        heard.set()
        return manager

    monkeypatch.setattr(site.client, "heartbeat", heartbeat)
    monkeypatch.setattr(site.client, "stream_ended", asyncio.Event().wait, raising=False)
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    await asyncio.wait_for(heard.wait(), 60)
    for task in periodic.tasks:
        task.cancel()
    assert [text.split(": ")[0] for text in site.warned] == [
        "internal error while sending a heartbeat, hpcgpu tries again"
    ]


async def test_an_error_that_nobody_waits_for_reaches_the_user(site: Site) -> None:
    async def fails() -> None:
        raise KeyError("a job")

    await asyncio.wait([site.state.spawn(fails())])
    await asyncio.sleep(0)
    with pytest.raises(ClusterError, match=r"internal error: KeyError\('a job'\)"):
        site.state.check()


@pytest.mark.parametrize("steps", range(6))
async def test_nothing_goes_on_after_the_end_though_it_wakes_just_then(site: Site, steps: int) -> None:
    periodic, state = Periodic(site.reconciler, site.options), site.state
    never = asyncio.Event()
    site.client.stream_ended = never.wait  # type: ignore[attr-defined]
    periodic.watch_queue()
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    for event in (state.poll_now, state.decide_now, state.heartbeat_now):
        event.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    site.reconciler.order(Close())
    state.closes()
    tasks = [*periodic.tasks]
    for task in tasks:
        task.cancel()
    _, pending = await asyncio.wait(tasks, timeout=30)
    assert not pending


async def test_jobs_are_drained_while_one_that_failed_cannot_be_reported_yet(site: Site) -> None:
    await site.scale(3)
    site.client.listening = False  # the network fails for a moment
    await site.ends("demo-0", JobState.FAILED)
    await site.passes(30)
    assert len(site.queue.jobs) == 4, "it may only have lost its scheduler: nothing takes its place yet"
    await site.scale(0)
    assert not site.registry.active
    site.says("demo-1", JobState.CANCELLED)
    site.client.listening = True
    await site.polled()
    assert "(demo-0) failed" in site.warned[0] and not site.registry.active


async def test_a_job_that_fails_while_the_scheduler_waits_is_replaced_when_the_user_scales(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.registry.add(site.scheduler)
    site.state.scheduler = site.scheduler
    await site.scheduler.submit()
    await site.scale(1)
    site.says("demo-0", JobState.CANCELLED)
    await site.polled()
    assert not site.registry.active
    await site.scale(2)
    assert set(site.registry.active) == {"demo-1", "demo-2"}


async def test_a_job_that_was_cancelled_while_the_queue_fell_silent_is_no_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.scale(3)
    cancel = site.queue.cancel

    def last_answer(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        cancel(job_ids, only_pending=only_pending)
        site.queue.silent = site.now < 1e9 + 10

    monkeypatch.setattr(site.queue, "cancel", last_answer)
    await site.scale(2)
    site.now += 20
    assert site.warned == ["could not cancel demo-2: squeue does not answer. hpcgpu tries again"]
    site.queue.silent = False
    await site.passes(30)
    assert site.shown["demo-2"][0] == "cancelled"
    assert len(site.warned) == 1 and not site.group.failures.failed, "hpcgpu cancelled it, and nobody else"


async def test_workers_take_tasks_again_when_their_job_could_not_be_drained_after_all(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(names: Iterable[str]) -> Mapping[str, int]:
        raise RuntimeError("an error of the scheduler")

    monkeypatch.setattr(site.client, "unfinished", busy)
    await site.scale(1)
    assert len(site.registry.active) == 2 and len(site.client.resumed) == 1


async def test_a_job_that_ends_while_its_data_cannot_move_does_not_stay(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire = site.client.retire

    async def ends_meanwhile(names: Iterable[str], *, close: bool) -> Collection[str]:
        name = next(iter(names))
        site.says(name, JobState.TIMEOUT, end=site.now)
        await site.state.poll()
        return await retire([name], close=close)

    site.client.full = True
    monkeypatch.setattr(site.client, "retire", ends_meanwhile)
    await site.scale(1)
    assert site.group.limits.maximum == 1 and not site.warned
    assert len(site.registry.active) == 1


async def test_a_job_whose_submit_is_cut_short_by_the_end_is_not_shown_as_being_submitted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, begun, may_submit = site.queue.submit, threading.Event(), threading.Event()

    def slow(script: Path, **arguments: Any) -> str:
        begun.set()
        may_submit.wait(60)
        return submit(script, **arguments)

    monkeypatch.setattr(site.queue, "submit", slow)
    site.reconciler.order(Scale(DEFAULT, 3))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    site.reconciler.order(Close())
    site.state.closes()
    for task in site.state.tasks:
        task.cancel()
    may_submit.set()
    await ended(site)
    assert {state for state, _ in site.shown.values()} <= {"cancelled", "completing"}
    assert {status.state for status in site.queue.jobs.values()} == {JobState.CANCELLED}
    assert not site.registry.active


async def test_a_wait_for_submits_that_is_given_up_ends_none_of_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, may_submit = site.queue.submit, threading.Event()

    def slow(script: Path, **arguments: Any) -> str:
        may_submit.wait(60)
        return submit(script, **arguments)

    monkeypatch.setattr(site.queue, "submit", slow)
    site.reconciler.order(Scale(DEFAULT, 8))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_for_submits(site.registry.worker_jobs), 0.01)
    may_submit.set()
    await wait_for_submits(site.registry.worker_jobs)
    assert [job.job_id is not None for job in site.registry.worker_jobs] == [True] * 8


async def test_a_job_that_the_queue_forgot_has_its_end_in_the_journal_of_a_closed_cluster(site: Site) -> None:
    """A PBS without job history: it had ended, no record has how, and was not cancelled with the cluster."""
    site.loses("demo-0")
    site.forgets("demo-0")
    await site.passes(300)
    await closed(site)
    how = {submit.name: submit.how for submit in site.state.dispatcher.directory.submits()}
    assert how["demo-0"] is not None and how["demo-0"].state == "unknown"
    assert how["demo-0"].end is not None and how["demo-0"].end < site.state.now - 200


# Running jobs that lose workers together, as by a network that fails for a moment

JOBS, GPUS = 8, 4


class Losing(Site):
    """Eight jobs of four workers each."""

    fewest = JOBS * GPUS

    async def passes(self, seconds: float, step: float = 5.0) -> None:
        for _ in range(int(seconds / step)):
            await super().passes(step, step)
            self.fewest = min(self.fewest, sum(len(job.workers) for job in self.registry.active.values()))

    def lose_one(self, name: str) -> None:
        self.loses(f"{name}-{GPUS - 1}")

    @property
    def drained(self) -> list[str]:
        return [job.name for job in self.registry.worker_jobs if not job.active]

    @property
    def waiting(self) -> list[str]:
        return [name for name, job in self.registry.active.items() if job.pending]


@pytest.fixture
async def losing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Losing:
    monkeypatch.setattr(draining, "_FINISHING_INTERVAL", 0.0)
    monkeypatch.setattr(draining, "_STUCK_INTERVAL", 0.0)
    made = Losing(tmp_path, GPUS)
    await made.begin(JOBS)
    await made.passes(10)
    return made


async def test_a_job_without_any_worker_left_is_replaced_within_a_minute_though_the_queue_calls_it_running(
    losing: Losing,
) -> None:
    ghost, short = list(losing.registry.active)[:2]
    losing.lose_one(short)
    for gpu in range(GPUS):
        losing.loses(f"{ghost}-{gpu}")
    await losing.passes(50)
    assert ghost in losing.registry.active, "its node may come back"
    await losing.passes(20)
    assert losing.drained == [ghost] and short in losing.registry.active
    [words] = losing.warned
    assert f"({ghost})" in words and "lost 4 of 4 workers" in words and "none is left: another job replaces it" in words
    assert len(losing.waiting) == 1


async def test_jobs_that_lose_workers_together_work_on_until_others_are_there_and_all_are_replaced(
    losing: Losing,
) -> None:
    first = list(losing.registry.active)
    for name in first:
        losing.lose_one(name)
        await losing.passes(5)  # not all at the same moment
    await losing.passes(HOUR, step=30)
    assert losing.group.failures.failed == 0, "it is one event"
    assert not losing.group.failures.paused
    assert len(losing.waiting) == JOBS, "one is asked for in place of each"
    assert losing.drained == first[:1], "only one makes room; the others work on for the hours that the queue takes"
    assert (
        all("it works until another job takes its place" in words for words in losing.warned)
        and len(losing.warned) == JOBS
    )
    for name in losing.waiting:
        await losing.starts(name)
        await losing.passes(60)
    assert sorted(losing.drained) == sorted(first)
    assert len(losing.registry.active) == JOBS and not losing.waiting
    assert losing.fewest >= (JOBS - 1) * (GPUS - 1)


async def test_after_too_many_losses_the_jobs_go_on_without_and_nothing_is_drained_until_the_user_asks(
    losing: Losing,
) -> None:
    names = list(losing.registry.active)
    losing.group.failures.submit_refused(
        "no", for_good=False, now=losing.now + 3600
    )  # no other job can be asked for meanwhile
    for name in names[:4]:
        losing.lose_one(name)
        await losing.passes(400)  # each is an event of its own
    assert [job.lost_workers for job in losing.registry.active.values()].count(True) == 4
    assert losing.group.failures.failed > losing.group.failures.restarts
    paused = losing.group.failures.paused
    assert paused.startswith("3 worker jobs failed in a row")
    await losing.passes(2 * HOUR, step=30)
    assert list(losing.registry.active) == names, (
        "those that lost workers before the pause stay too, and nothing is asked for"
    )
    for name in names[:4]:
        assert losing.job(name).shortage(now=losing.now).endswith(f"it continues with the others, because {paused}")
    losing.group.failures.start_anew()
    await losing.passes(10)
    assert len(losing.waiting) == 4, "the user asked again: they are replaced now"
    assert losing.drained == names[:1]


async def test_nothing_is_drained_while_no_other_job_waits(losing: Losing) -> None:
    losing.group.failures.next_try = losing.now + 3600
    names = list(losing.registry.active)
    losing.lose_one(names[0])
    await losing.passes(3000, step=30)
    assert losing.drained == []
    await losing.passes(3600, step=30)
    assert losing.drained == names[:1] and losing.waiting == [f"demo-{JOBS}"]


async def test_a_job_whose_workers_come_back_is_kept_and_the_one_that_still_waits_goes(losing: Losing) -> None:
    first, second = list(losing.registry.active)[:2]
    losing.lose_one(first)
    losing.lose_one(second)
    await losing.passes(400)
    assert losing.drained == [first] and len(losing.waiting) == 2
    await losing.starts(second)
    await losing.passes(10)
    assert len(losing.waiting) == 1 and second in losing.registry.active


# A manager that takes the cluster over


async def test_the_gpu_hours_of_jobs_that_have_ended_count_for_the_next_manager_too(site: Site, tmp_path: Path) -> None:
    await site.scale(1)
    site.directory.intend("demo-9", "worker")
    site.directory.submitted("demo-9", "99")
    site.directory.ended({"demo-9": "99"}, {"demo-9": End(state="completed", start=100.0, end=3700.0)})
    before = site.group.gpu_seconds(now=site.now)
    other = await taken_over(site, tmp_path)
    assert other.group.gpu_seconds(now=site.now) == before + 3600 * site.group.gpus_per_job


async def test_the_next_manager_goes_on_with_what_the_user_wants(tmp_path: Path) -> None:
    first = Site(tmp_path)
    await first.begin(3)
    limits = Limits(minimum=1, maximum=5, idle_timeout=60.0)
    first.adapt(limits)
    second = await taken_over(first, tmp_path)
    assert second.group.adaptive is not None and not second.group.adaptive.lost
    assert (second.group.limits.minimum, second.group.limits.maximum) == (1, 5)
    second.reconciler.order(Scale(DEFAULT, 4))
    await second.settled()
    assert len(second.registry.active) == 4
    lost = max(second.registry.active)
    second.says(lost, JobState.CANCELLED)  # while nobody manages the cluster
    third = await taken_over(second, tmp_path)
    third.reconciler.decide()
    await third.settled()
    assert len(third.registry.active) == 4 and lost not in third.registry.active, "one is submitted in its place"


async def test_a_job_that_started_just_before_its_cancellation_is_kept_by_the_next_manager(
    site: Site, tmp_path: Path
) -> None:
    await site.scale(3)
    site.says("demo-2", JobState.RUNNING, start=site.now)  # cancelled only while it waits, it stays
    marks = lambda: [submit.unwanted for submit in site.directory.submits() if submit.name == "demo-2"]  # noqa: E731
    site.reconciler.drainer.drain(["demo-2"], Drain.UNWANTED)
    assert marks() == [True]
    await site.settled()
    assert marks() == [False], "the journal still says that nobody wants it"
    other = await taken_over(site, tmp_path)
    await other.polled()
    assert set(other.registry.active) == {"demo-0", "demo-1", "demo-2"}


async def test_a_manager_learns_nothing_of_the_wait_from_jobs_that_ran_before_it_came(
    tmp_path: Path,
) -> None:
    first = Site(tmp_path)
    first.now = time.time()  # the journal has the time of each submit
    await first.begin(4)
    for name in first.registry.active:
        first.says(name, JobState.RUNNING, start=first.now, end=first.now + 24 * HOUR)
    await first.polled()
    first.now += 13 * HOUR
    site = await taken_over(first, tmp_path)
    for _ in range(5):
        site.now += 10
        await site.polled()
    assert site.group.waits == [] == site.group.startups
    assert len(site.registry.active) == 4, "the jobs still have 11 hours: none is replaced"


async def test_a_job_that_was_requeued_teaches_no_wait(site: Site) -> None:
    waits = list(site.group.waits)
    site.loses("demo-0")
    site.now += 13 * HOUR
    site.says("demo-0", JobState.PENDING, reason="BeginTime", node="", start=None, end=None)
    await site.polled()
    await site.starts("demo-0")
    assert isinstance(site.job("demo-0").phase, Running)
    assert site.group.waits == waits


async def test_a_group_keeps_its_jobs_if_the_record_of_its_size_is_lost(site: Site, tmp_path: Path) -> None:
    (site.directory.path / "wanted.json").unlink()
    other = await taken_over(site, tmp_path)
    await other.passes(20)
    assert set(other.registry.active) == {"demo-0", "demo-1"} and len(site.queue.jobs) == 3


async def test_a_manager_completes_what_the_last_one_drained_when_it_reaches_the_scheduler(
    site: Site, tmp_path: Path
) -> None:
    site.directory.cancel(["demo-1"])
    other = await taken_over(site, tmp_path)
    other.state.client = None
    other.reconciler.drainer.continue_drains()
    await other.settled()
    assert not any(status.state.ended for status in site.queue.jobs.values()), "it may have data"
    other.state.client = other.client  # type: ignore[assignment]
    retired = list[list[str]]()
    retire = other.client.retire

    async def noted(names: Iterable[str], *, close: bool) -> Collection[str]:
        retired.append(list(names))
        return await retire(retired[-1], close=close)

    other.client.retire = noted  # type: ignore[method-assign]
    for name in ("demo-0", "demo-1"):
        other.reconciler.worker_joined(f"tls://{name}", name)
    for _ in range(2):
        other.reconciler.drainer.continue_drains()
    await other.settled()
    assert retired == [["demo-1"], ["demo-1"]], "its data moves, then its worker ends; and this happens once"
    assert [status.name for status in site.queue.jobs.values() if status.state.ended] == ["demo-1"]


async def test_a_job_of_a_group_that_is_not_there_any_more_is_drained_by_the_next_manager(
    site: Site, tmp_path: Path
) -> None:
    site.directory.intend("demo-7", "worker", "gone")
    site.directory.submitted("demo-7", site.queue.submit(Path("worker-gone"), job_name="demo-7"))
    other = await taken_over(site, tmp_path)
    other.reconciler.drainer.continue_drains()
    await other.settled()
    assert [status.name for status in site.queue.jobs.values() if status.state.ended] == ["demo-7"]
    await other.scale(3)
    assert set(other.registry.active) == {"demo-0", "demo-1", "demo-8"}, "no name is used again"


# Requests of other programs, and heartbeats


async def test_a_request_that_is_no_command_is_refused_and_changes_nothing(site: Site) -> None:
    periodic = Periodic(site.reconciler, site.options)
    for command, words in (
        ({"command": "explode"}, "does not know the command"),
        ({"command": "scale", "group": "default", "jobs": "many"}, "jobs"),
        ({"command": "scale", "group": "none", "jobs": 1}, "no worker group named 'none'"),
        ({"command": "deletegroup", "group": "default"}, "the default group cannot be deleted"),
        ({"command": "addgroup", "group": "default", "jobs": 1}, "there is a worker group named 'default' already"),
        ({"command": "addgroup", "group": "../big", "jobs": 1}, "worker group"),
        ({"command": "addgroup", "group": "big", "jobs": 1}, "has no job script"),
        ({"command": "addgroup", "group": "big", "jobs": 1, "options": {"future": 1}}, "does not know (future)"),
        ({"command": "addgroup", "group": "big", "jobs": 1, "options": {"cores": "many"}}, "cores"),
    ):
        assert words in periodic._serve({"number": 1, "command": command})
        assert "a request of another program is refused" in site.logged[-1]
    assert site.group.limits.maximum == 2
    assert periodic._serve({"number": 2, "command": {"command": "scale", "group": "default", "jobs": 3}}) == ""
    await site.settled()
    assert len(site.registry.active) == 3


def adds(site: Site, script: str, cores: int) -> dict[str, Any]:
    """A request of another program: to add the group big, which has this script."""
    worker = replace(site.options.worker, cores=cores, job_script_prologue=Path("/only/on/the/login/node"))
    return to_json(AddGroup("big", 0, saved_options.group_to_json(worker), script))


async def test_of_two_programs_that_add_a_group_of_one_name_the_first_one_decides_its_script(site: Site) -> None:
    periodic = Periodic(site.reconciler, site.options)
    assert periodic._serve({"number": 1, "command": adds(site, "first", 2)}) == ""
    assert "'big' already" in periodic._serve({"number": 2, "command": adds(site, "second", 3)})
    assert site.registry.groups["big"].script.read_text() == "first", "as the program that asked has rendered it"
    assert saved_options.read(site.directory).groups["big"].cores == 2


async def test_a_program_whose_cluster_was_taken_over_replaces_no_script_of_a_group(site: Site) -> None:
    periodic = Periodic(site.reconciler, site.options)
    site.directory.take_over("another program")
    script = site.directory.write("worker-big.sbatch", "of the new manager")
    assert "was taken over" in periodic._serve({"number": 1, "command": adds(site, "late", 2)})
    assert script.read_text() == "of the new manager" and list(site.registry.groups) == [DEFAULT]


async def test_a_program_learns_by_its_heartbeat_that_another_one_manages_the_cluster(site: Site) -> None:
    beats = list[int]()

    async def heartbeat(manager: int, *report: object) -> int:
        beats.append(manager)
        return manager + 1

    site.client.heartbeat = heartbeat  # type: ignore[method-assign]
    site.client.stream_ended = asyncio.Event().wait  # type: ignore[attr-defined]
    site.directory.take_over("another program")
    site.state.poll_now.clear()
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    await asyncio.wait_for(site.state.poll_now.wait(), 60)
    periodic.watch_queue()
    while not site.state.phase.superseded:
        await asyncio.sleep(0.01)
    for task in periodic.tasks:
        task.cancel()
    assert beats and site.warned[0].startswith("cluster demo was taken over by another program")


@pytest.mark.parametrize(("lease", "pause"), [(10.0, 2.0), (600.0, 10.0), (None, 10.0)])
async def test_several_heartbeats_fit_into_a_lease(
    site: Site, monkeypatch: pytest.MonkeyPatch, lease: float | None, pause: float
) -> None:
    pauses = list[float]()

    async def woken(event: asyncio.Event, timeout: float) -> bool:
        if event is site.state.heartbeat_now:
            pauses.append(timeout)
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(periodic_module, "_woken", woken)
    site.client.stream_ended = asyncio.Event().wait  # type: ignore[attr-defined]
    cluster = replace(site.options.cluster, lease=lease)
    periodic = Periodic(site.reconciler, replace(site.options, cluster=cluster))
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    while not pauses:
        await asyncio.sleep(0)
    for task in periodic.tasks:
        task.cancel()
    assert pauses == [pause]


# A scheduler that does not answer for a moment


async def adapts(site: Site, maximum: int) -> GPUAdaptive:
    """Let the group scale adaptively; the scheduler answers once."""
    limits = Limits(maximum=maximum)
    adaptive = site.adapt(limits)
    await site.loaded()
    return adaptive


async def test_no_job_is_released_while_the_scheduler_does_not_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive = await adapts(site, 2)
    load = site.client.load

    async def silent() -> Mapping[str, Any]:
        site.now += 10
        raise TimeoutError

    monkeypatch.setattr(site.client, "load", silent)  # it receives a large graph
    for _ in range(5):
        await site.loaded()
    assert len(site.registry.active) == 2
    assert "none is released, because the scheduler does not answer" in adaptive.state.reason
    monkeypatch.setattr(site.client, "load", load)
    await site.loaded()
    assert len(site.registry.active) == 2, "only since this answer it is known that there is no work"
    for _ in range(5):
        site.now += 1
        await site.loaded()
    assert not site.registry.active


async def test_a_pending_job_is_not_cancelled_while_the_scheduler_does_not_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.scale(3)
    await adapts(site, 3)

    async def silent() -> Mapping[str, Any]:
        site.now += 10
        raise OSError

    monkeypatch.setattr(site.client, "load", silent)
    for _ in range(5):
        await site.loaded()
    assert len(site.registry.active) == 3


# A queue that refuses to cancel


def refuses(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the queue refuse every cancel; return when it is asked to, from now on."""
    asked = list[float]()

    def cancel(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        asked.append(site.now)
        raise BatchUnavailable("`scancel` failed: Access/permission denied")

    monkeypatch.setattr(site.queue, "cancel", cancel)
    return asked


async def test_a_refused_cancel_is_reported_once_and_tried_again_ever_more_rarely(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.scale(5)
    cancel = site.queue.cancel
    asked = refuses(site, monkeypatch)
    await site.scale(2)
    await site.passes(250)
    assert site.warned == [
        "could not cancel demo-2, demo-3, demo-4: `scancel` failed: Access/permission denied. hpcgpu tries again"
    ]
    assert site.state.failures.unreported == site.warned
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses[0] >= 3 and pauses == sorted(pauses) and 50 < pauses[-1] < 70
    monkeypatch.setattr(site.queue, "cancel", cancel)
    await site.passes(70)
    assert len(site.registry.active) == 2, "the queue accepts it now"
    await site.scale(3)
    refuses(site, monkeypatch)
    await site.scale(2)
    assert len(site.warned) == 2, "it is another refusal"


async def test_a_running_job_that_the_queue_refuses_to_cancel_is_reported_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = refuses(site, monkeypatch)
    await site.scale(1)
    await site.passes(60)
    assert len([text for text in site.warned if "could not cancel" in text]) == 1 and len(asked) < 10


async def test_a_job_that_can_never_start_and_is_not_cancelled_is_reported_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(minimum=3, maximum=3)
    site.adapt(limits)
    await site.settled()
    site.says("demo-2", JobState.PENDING, reason="QOSMaxWallDurationPerJobLimit")
    refuses(site, monkeypatch)
    await site.passes(200)
    assert len([text for text in site.warned if "will never start" in text]) == 1
    assert len(site.warned) == 2


async def test_a_wait_for_workers_ends_if_a_job_can_never_start(site: Site) -> None:
    await site.scale(3)
    site.says("demo-2", JobState.PENDING, reason="QOSMaxWallDurationPerJobLimit")
    await site.passes(30)
    with pytest.raises(
        ClusterError, match=r"worker job \d+ \(demo-2\) will never start: its walltime is above your limit"
    ):
        await wait_for_workers(site.state, None, 30, quiet=True)


async def test_a_wait_for_workers_to_hold_ends_with_the_cluster(site: Site) -> None:
    await site.reconciler.fail("the scheduler is gone")
    with pytest.raises(ClusterError, match="the scheduler is gone"):
        await HoldWait(site.state, 1, {}, []).check()


async def test_a_cancelled_job_that_the_queue_shows_as_ending_first_is_no_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.scale(3)
    refuses(site, monkeypatch)  # the answer is lost: the queue does cancel it
    site.reconciler.drainer.drain(["demo-2"], Drain.BUDGET, deadline=site.now)
    await site.settled()
    for state in (JobState.COMPLETING, JobState.CANCELLED):
        site.says("demo-2", state)
        await site.polled()
    phase = site.job("demo-2").phase
    assert isinstance(phase, Ended) and phase.drained
    assert not site.group.failures.failed and len(site.warned) == 1


# A queue that forgets a job as soon as it is cancelled, as PBS without a history


@pytest.fixture
def forgetful(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    cancel = site.queue.cancel

    def cancelled(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        ids = list(job_ids)
        cancel(ids, only_pending=only_pending)
        for job_id in ids:
            if site.queue.jobs[job_id].state is JobState.CANCELLED:
                site.queue.jobs[job_id] = replace(site.queue.jobs[job_id], name="")

    monkeypatch.setattr(site.queue, "cancel", cancelled)
    return site


async def test_a_pending_job_that_is_cancelled_and_forgotten_fills_no_place(forgetful: Site) -> None:
    site = forgetful
    await site.scale(5)
    await site.scale(2)
    await site.scale(5)
    assert set(site.registry.active) == {"demo-0", "demo-1", "demo-5", "demo-6", "demo-7"}
    await site.passes(120, step=5)
    assert not site.group.failures.failed and not site.warned
    assert len(site.registry.active) == 5


async def test_a_cancelled_job_is_no_failure_where_the_answer_was_lost_and_the_queue_forgot_it(
    forgetful: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = forgetful
    await site.scale(3)
    cancel = site.queue.cancel

    def lost(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        cancel(job_ids, only_pending=only_pending)
        raise BatchUnavailable("qdel timed out")

    monkeypatch.setattr(site.queue, "cancel", lost)
    await site.scale(2)
    monkeypatch.setattr(site.queue, "cancel", cancel)
    await site.scale(3)  # so it is wanted again
    await site.passes(120, step=2)
    assert not site.group.failures.failed and set(site.registry.active) == {"demo-0", "demo-1", "demo-3"}
    assert site.warned == ["could not cancel demo-2: qdel timed out. hpcgpu tries again"]


# Jobs of which some workers never come


async def test_a_job_of_which_a_worker_never_came_is_released_without_work_though_nothing_is_replaced(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, gpus=4)
    await site.begin(0)
    await site.scale(1)
    site.says("demo-0", JobState.RUNNING, start=site.now, end=site.now + 48 * HOUR, node="n-demo-0")
    for worker in worker_names.workers_of("demo-0", site.options.worker)[:3]:
        site.client.there[f"tls://{worker}"] = {"name": worker}
        site.reconciler.worker_joined(f"tls://{worker}", worker)
    await adapts(site, 1)
    site.group.failures.submit_refused("no", for_good=True, now=site.now)
    assert site.group.failures.paused
    timeout = site.options.worker.death_timeout
    for _ in range(int(timeout) - 1):
        site.now += 1
        await site.loaded()
    assert set(site.registry.active) == {"demo-0"}, "its fourth worker may still come, and there may be work then"
    for _ in range(60):
        site.now += 1
        await site.loaded()
    assert not site.registry.active


# The stream of the scheduler's events


async def test_workers_are_reported_again_also_after_an_error_that_nobody_expected(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.client.listening = False
    errors: list[Exception] = [KeyError("workers"), KeyError("workers"), KeyError("workers"), OSError("refused")]
    pauses, sleep, there = list[float](), asyncio.sleep, asyncio.Event()

    async def stream_ended() -> None:
        while site.client.listening:
            await there.wait()
            await sleep(0.01)

    async def listen() -> Mapping[str, Mapping[str, Any]]:
        if errors:
            raise errors.pop(0)
        site.client.listening = True
        there.set()
        return site.client.there

    async def quick(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(site.client, "stream_ended", stream_ended, raising=False)
    monkeypatch.setattr(site.client, "listen", listen, raising=False)
    monkeypatch.setattr(asyncio, "sleep", quick)
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_scheduler(site.client)  # type: ignore[arg-type]
    await asyncio.wait_for(there.wait(), 60)
    for task in periodic.tasks:
        task.cancel()
    assert site.state.listening and not errors
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0] and pauses[4] == 1.0, "longer after each such error"
    assert [text.split(": ")[0] for text in site.warned] == [
        "internal error while opening the scheduler's stream of events, hpcgpu tries again"
    ]


# How often the queue is polled


async def polls_in_an_hour(site: Site, monkeypatch: pytest.MonkeyPatch, events: Iterable[int]) -> list[float]:
    """Return when the manager polls, if it is woken at these seconds. Time passes only while it waits."""
    polled, began, poll, sleep, over = list[float](), site.now, site.queue.poll, asyncio.sleep, asyncio.Event()

    def counted(job_ids: Iterable[str]) -> dict[str, JobStatus]:
        polled.append(site.now - began)
        return poll(job_ids)

    async def passes(seconds: float) -> None:
        await sleep(0)
        site.now += seconds
        if site.now - began > HOUR:
            over.set()
            await asyncio.Event().wait()

    async def woken(event: asyncio.Event, timeout: float) -> bool:
        now = site.now - began
        pause = min(next((at - now for at in events if at > now), HOUR), timeout)
        await passes(pause)
        return pause < timeout

    with monkeypatch.context() as patch:
        patch.setattr(site.queue, "poll", counted)
        patch.setattr(asyncio, "sleep", passes)
        patch.setattr(periodic_module, "_woken", woken)
        cluster = replace(site.options.cluster, poll_interval=10.0)
        periodic = Periodic(site.reconciler, replace(site.options, cluster=cluster))
        periodic.watch_queue()
        await asyncio.wait_for(over.wait(), 60)
        for task in periodic.tasks:
            task.cancel()
    return polled


async def test_the_queue_is_polled_a_second_after_an_event_and_rarely_without_any(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = await polls_in_an_hour(site, monkeypatch, [2000])
    assert any(at == pytest.approx(2001) for at in polled)
    assert len(polled) < 110


async def test_events_without_end_cost_the_queue_a_few_polls_more_and_hold_none_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled = await polls_in_an_hour(site, monkeypatch, range(3600))
    assert len(polled) < HOUR / 10 * 4
    assert max(later - earlier for earlier, later in itertools.pairwise(polled)) < 13


async def test_a_queue_that_does_not_answer_is_polled_ever_more_rarely_whatever_happens(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.queue.silent, site.client.listening = True, False
    polled = await polls_in_an_hour(site, monkeypatch, range(3600))
    gaps = [later - earlier for earlier, later in itertools.pairwise(polled)]
    assert min(gaps[2:]) > 70


# A cluster that is lost while the queue does not answer


async def cancels_at_last(site: Site, monkeypatch: pytest.MonkeyPatch, answers: Iterable[Exception | None]) -> Periodic:
    """Let the queue give these answers to a cancel, before it does as requested; watch it until the program stops."""
    cancel, coming = site.queue.cancel, iter(answers)

    def flaky(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        if (error := next(coming, None)) is not None:
            raise error
        cancel(job_ids, only_pending=only_pending)

    monkeypatch.setattr(site.queue, "cancel", flaky)
    site.state.clock = time.time  # it waits until it tries again
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_queue()
    site.state.poll_now.set()
    await asyncio.wait(periodic.tasks, timeout=60)
    return periodic


async def test_a_lost_cluster_cancels_its_jobs_when_the_queue_answers_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.scale(4)
    site.says("demo-scheduler", JobState.TIMEOUT)
    site.client.listening = False
    refusal = BatchUnavailable("Unable to contact slurm controller")
    periodic = await cancels_at_last(site, monkeypatch, [refusal, refusal, ValueError("an error of a plugin"), refusal])
    assert not periodic.tasks, "nothing is left to do"
    assert {state for state, _ in site.shown.values()} <= {"timeout", "completing", "cancelled"}
    assert {status.state for status in site.queue.jobs.values()} == {JobState.TIMEOUT, JobState.CANCELLED}
    [lost, told] = site.warned
    assert "is gone" in lost
    assert told == (
        "could not cancel 2 3 4 5: Unable to contact slurm controller. hpcgpu tries again until the queue has "
        "cancelled them. "
        f"`hpcgpu stop {site.state.dispatcher.directory.in_shell}` cancels what is left"
    )


async def test_a_waiting_job_that_is_given_up_is_not_reported_as_cancelled_by_others(site: Site) -> None:
    await site.scale(3)
    await site.scale(2)
    assert site.shown["demo-2"] == ("cancelled", "hpcgpu cancelled it")


async def test_a_worker_is_not_called_lost_in_the_second_after_it_came(site: Site) -> None:
    site.group.options = replace(site.group.options, gpus_per_node=2)
    await site.scale(3)
    site.says("demo-2", JobState.RUNNING)
    await site.polled()
    site.reconciler.worker_joined("tls://a", "demo-2-0")
    await site.passes(1)
    assert "1 of 2 workers missing" in site.shown["demo-2"][1]
    site.reconciler.worker_joined("tls://b", "demo-2-1")
    assert site.shown["demo-2"] == ("running", "")


async def test_jobs_of_a_lost_cluster_that_the_queue_did_not_cancel_are_not_shown_as_cancelled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.scale(3)
    refuses(site, monkeypatch)
    site.says("demo-scheduler", JobState.TIMEOUT)
    site.client.listening = False
    await site.polled()
    assert site.shown["demo-2"][0] == "pending"


async def test_a_cluster_that_lost_its_name_cancels_its_jobs_when_the_queue_answers_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = site.directory.path / "cluster.json"
    identity.write_text(identity.read_text().replace(site.directory.token(), "1"))
    await cancels_at_last(site, monkeypatch, [BatchUnavailable("Unable to contact slurm controller")])
    assert {status.state for status in site.queue.jobs.values()} == {JobState.CANCELLED}
    assert len(site.warned) == 2 and "another cluster now has its name" in site.warned[0]
    assert site.warned[1].endswith("Cancel them with the batch system's own command")


async def test_a_cancel_of_a_lost_cluster_that_is_refused_is_tried_again_ever_more_rarely(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = refuses(site, monkeypatch)
    await site.reconciler.fail("its scheduler is gone")
    for _ in range(60):
        site.now += 1
        await site.reconciler.end_all()
    assert 2 <= len(asked) < 15


async def test_a_close_does_not_wait_until_a_refused_cancel_is_due_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = site.queue.cancel
    refuses(site, monkeypatch)
    await site.reconciler.fail("its scheduler is gone")
    monkeypatch.setattr(site.queue, "cancel", cancel)
    site.reconciler.order(Close())
    site.state.closes()
    await site.reconciler.end_all()
    assert {status.state for status in site.queue.jobs.values()} == {JobState.CANCELLED}


async def test_a_lost_cluster_that_is_closed_cancels_no_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuses(site, monkeypatch)
    site.state.clock = time.time  # it waits until it tries again
    site.says("demo-scheduler", JobState.TIMEOUT)
    site.client.listening = False
    periodic = Periodic(site.reconciler, site.options)
    periodic.watch_queue()
    site.state.poll_now.set()
    async with asyncio.timeout(60):
        while len(asked) < 3:
            await asyncio.sleep(0.01)
    site.reconciler.order(Close())
    site.state.closes()
    await asyncio.wait(periodic.tasks, timeout=60)
    assert not periodic.tasks


# Readings of the load from before the user's last call


def load_of(site: Site, *, processing: int = 0, waiting: int = 0) -> Mapping[str, Any]:
    """Return what the scheduler answers: tasks on each worker, and tasks that no worker has."""
    worker = {
        "processing": processing,
        "calls": 0,
        "computes": False,
        "held": False,
        "occupancy": 100.0 * processing,
        "nbytes": 0,
        "wanted": 0,
        "actors": 0,
        "nthreads": 1,
        "at_once": 1,
        "paused": False,
        "memory_limit": 0,
    }
    kinds = [{"resources": {}, "tasks": waiting, "seconds": 100.0 * waiting}] if waiting else []
    return {"workers": {there["name"]: worker for there in site.client.there.values()}, "waiting": kinds, "holds": []}


async def test_adapt_releases_no_job_because_there_was_no_work_before_it_was_called(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.polled()  # there is no work

    async def busy() -> Mapping[str, Any]:
        return load_of(site, processing=3)

    monkeypatch.setattr(site.client, "load", busy)  # now there is
    limits = Limits(maximum=2, idle_timeout=0.0)
    adaptive = site.adapt(limits)
    await site.settled()
    assert len(site.registry.active) == 2
    assert adaptive.state.reason == (
        "it is not known yet whether there is work; 2 jobs exist; "
        "none is released before the scheduler reports its load"
    )
    await site.loaded()
    assert len(site.registry.active) == 2 and adaptive.state.reason.startswith("there is work for 6 jobs")


async def test_adapt_submits_no_job_for_work_that_was_there_before_it_was_called(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = site.client.load

    async def busy() -> Mapping[str, Any]:
        return load_of(site, waiting=100)

    monkeypatch.setattr(site.client, "load", busy)
    await site.polled()
    monkeypatch.setattr(site.client, "load", load)  # it was quickly done
    limits = Limits(minimum=3, maximum=8)
    site.adapt(limits)
    await site.settled()
    assert len(site.registry.active) == 3, "the minimum counts at once"
    await site.loaded()
    assert len(site.registry.active) == 3


async def test_results_are_held_by_few_jobs_also_if_workers_have_no_memory_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_of(site)
    for worker in load["workers"].values():
        worker |= {"nbytes": 10**9, "wanted": 10**9, "memory_limit": 0}

    async def holds() -> Mapping[str, Any]:
        return load

    monkeypatch.setattr(site.client, "load", holds)
    site.adapt(Limits(maximum=2, idle_timeout=0.0))
    for _ in range(5):
        site.now += 1
        await site.loaded()
    assert len(site.registry.active) == 1, "one job can hold both"


async def test_an_answer_to_a_query_from_before_adapt_was_called_does_not_count(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    load = site.client.load

    async def slow() -> Mapping[str, Any]:
        before = load_of(site, waiting=100)
        asked.set()
        await answer.wait()
        return before

    monkeypatch.setattr(site.client, "load", slow)
    query = asyncio.ensure_future(site.loaded())
    await asked.wait()
    limits = Limits(maximum=8)
    site.adapt(limits)
    answer.set()
    await query
    assert len(site.registry.active) == 2
    assert site.state.decide_now.is_set(), "the scheduler is queried again at once"
    monkeypatch.setattr(site.client, "load", load)
    await site.loaded()
    assert len(site.registry.active) == 2


async def test_tasks_that_wait_because_their_group_was_deleted_are_reported_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {**load_of(site), "waiting": [{"resources": {"BIG": 1.0}, "tasks": 2, "seconds": 1.0}]}

    async def waits() -> Mapping[str, Any]:
        return load

    monkeypatch.setattr(site.client, "load", waits)
    options = replace(site.options.worker, resources={"BIG": 1.0})
    for name in ("big", "other"):
        other = site.registry.add_group(name, options, Path(f"worker-{name}"))
        site.reconciler.order(AddGroup(name, 0))
    site.reconciler.order(DeleteGroup("big"))
    await site.loaded()
    assert not site.warned, "the other group may get a job for them"
    site.registry.remove_group(other)
    for _ in range(3):
        await site.loaded()
    [told] = site.warned
    assert told.startswith("tasks that need 1 BIG wait: only the workers of group big had that")


# Many jobs


async def test_of_many_jobs_that_lack_workers_a_few_are_named(tmp_path: Path) -> None:
    site = Site(tmp_path, gpus=2)
    await site.begin(25)
    for name in list(site.registry.active):
        site.loses(f"{name}-1")
    await site.passes(5)
    told = site.reconciler.lost_jobs.shortages()
    assert len(told) == 4 and re.match(r"worker job \d+ \(demo-0\) lost 1 of 2 workers", told[0])
    assert told[-1] == "22 more worker jobs lack workers"
    assert len(site.reconciler.about()) < 500, "the scheduler is told this with each heartbeat"
    await site.settled()


async def test_jobs_that_the_queue_does_not_cancel_are_counted_if_they_are_many(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(0)
    await site.scale(30)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise BatchUnavailable("`scancel` failed: Access/permission denied")

    site.queue.cancel = refuse  # type: ignore[method-assign]
    await site.scale(0)
    [told] = [text for text in site.warned if "could not cancel" in text]
    names = "demo-0, demo-1, demo-2, demo-3, demo-4 and 25 more"
    assert told == f"could not cancel {names}: `scancel` failed: Access/permission denied. hpcgpu tries again"


async def test_workers_that_join_and_leave_cost_no_pass_over_all_jobs(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(3)
    looked: list[str] = []
    jobs = type(site.registry).worker_jobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(site.registry), "worker_jobs", property(lambda self: looked.append("") or jobs.fget(self)))
        site.loses("demo-1")
        site.client.there["tls://demo-1"] = {"name": "demo-1"}
        site.reconciler.worker_joined("tls://demo-1", "demo-1")
        site.reconciler.worker_left("tls://stranger")
    assert not looked and site.job("demo-1").workers == {"tls://demo-1": "demo-1"}


async def test_the_oldest_jobs_that_have_ended_are_forgotten_but_not_what_they_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler_module, "KEPT_ENDS", 2)
    for number in range(6):
        await site.passes(60, step=10)
        await site.ends(f"demo-{number}", JobState.TIMEOUT)
        await site.polled()
        for name in set(site.registry.active) - {job.name for job in site.registry.worker_jobs if job.workers}:
            await site.starts(name)
    assert list(site.registry.jobs) == ["demo-scheduler", "demo-4", "demo-5", "demo-6", "demo-7"]
    assert site.group.gpu_seconds(now=site.now) == pytest.approx(2 * 360, abs=20), "two jobs ran all the time"
    dispatcher = site.state.dispatcher
    assert len(dispatcher.left()) == 3 and len(dispatcher.monitor.views) == 5 and not dispatcher.cancels
    ended = {submit.name for submit in site.directory.submits() if submit.ended}
    assert ended == {f"demo-{number}" for number in range(6)}, "the journal knows them"


async def test_a_job_that_the_queue_only_forgot_is_not_forgotten(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "KEPT_ENDS", 0)
    site.forgets("demo-0")
    site.loses("demo-0")
    await site.passes(200)
    assert isinstance(site.job("demo-0").phase, Ended), "it may come back"


async def test_of_many_jobs_that_end_together_a_few_are_reported_and_the_rest_is_summarised(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(30)
    calls: list[tuple[list[str], list[str]]] = []

    async def ended(names: Iterable[str], crashed: Iterable[str]) -> None:
        calls.append((list(names), list(crashed)))

    site.client.ended = ended  # type: ignore[method-assign]
    names = list(site.registry.active)
    for name in names:
        site.says(name, JobState.FAILED if name == "demo-0" else JobState.NODE_FAIL, end=site.now)
        site.loses(name)
    await site.polled()
    assert len(site.warned) == 4 and all(re.match(r"worker job \d+ \(demo-\d\) ", text) for text in site.warned[:3])
    assert site.warned[3] == "27 more worker jobs ended: 27 node_fail: its node failed (27)"
    [(over, charged)] = calls  # one for all
    assert sorted(over) == sorted(names) and charged == ["demo-0"]
    assert len([text for text in site.logged if "node_fail" in text]) == 27, "the cluster's log has each"


async def test_after_many_jobs_end_together_the_user_learns_that_they_are_not_replaced(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(30)
    for number, name in enumerate(list(site.registry.active)):
        site.says(name, JobState.NODE_FAIL if number < 3 else JobState.FAILED, end=site.now)
        site.loses(name)
    await site.polled()
    assert not any("replaces it" in text for text in site.warned)
    with pytest.raises(ClusterError, match="27 worker jobs failed in a row; they are not replaced until you scale"):
        site.state.check()


async def test_the_jobs_that_are_forgotten_are_those_that_ended_first(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler_module, "KEPT_ENDS", 1)
    for name in ("demo-1", "demo-0"):
        await site.ends(name, JobState.TIMEOUT)
        await site.passes(10)
    assert "demo-1" not in site.registry.jobs and "demo-0" in site.registry.jobs


async def test_many_jobs_that_can_never_start_are_cancelled_by_one_command(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(0)
    limits = Limits(minimum=30, maximum=30)
    site.adapt(limits)
    await site.settled()
    cancelled: list[int] = []
    cancel = site.queue.cancel

    def noted(job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        ids = list(job_ids)
        cancelled.append(len(ids))
        cancel(ids, only_pending=only_pending)

    site.queue.cancel = noted  # type: ignore[method-assign]
    for name in list(site.registry.active):
        site.says(name, JobState.PENDING, reason="PartitionTimeLimit")
    for _ in range(3):
        await site.polled()
    assert cancelled[0] == 30 and len(site.warned) == 4
    assert site.warned[3].startswith("27 more worker jobs will never start either: 27 ")


@pytest.mark.parametrize(
    ("walltime", "warns_at"),
    [(600.0, [480.0]), (900.0, [720.0]), (3600.0, [2880.0]), (8 * 3600.0, [0.8 * 8 * 3600, 8 * 3600 - 900.0])],
)
async def test_the_end_of_the_walltime_is_reported_by_the_share_that_is_left(
    site: Site, walltime: float, warns_at: list[float]
) -> None:
    start = site.now
    site.says("demo-scheduler", JobState.RUNNING, start=start, end=start + walltime)
    await site.state.poll()
    told = [at for at in range(0, int(walltime), 10) if site.scheduler.end_is_near(now=start + at)]
    assert told == [pytest.approx(at, abs=10) for at in warns_at]


async def test_a_walltime_that_an_operator_shortens_is_reported(site: Site) -> None:
    start = site.now
    for left, told in (
        (None, ""),  # without a limit
        (36000.0, "was shortened: it ends in 600 min"),
        (36010.0, ""),
        (36000.0, ""),  # the queue rounds
        (7200.0, "was shortened: it ends in 120 min"),
        (7200.0, ""),
        (30.0, "ends in less than a minute"),
    ):
        site.says("demo-scheduler", JobState.RUNNING, start=start, end=None if left is None else start + left)
        await site.state.poll()
        said = site.scheduler.end_is_near(now=start)
        assert told in said and bool(told) is bool(said)


async def test_the_end_of_a_suspended_job_is_not_known_until_it_is_resumed(site: Site) -> None:
    """Slurm reports the old end until then."""
    start, hours, jobs = site.now, 36000.0, site.registry.jobs
    for suspended, later in ((False, 0.0), (True, 0.0), (False, 50000.0)):
        for name in jobs:
            site.says(name, JobState.RUNNING, start=start, end=start + hours + later, suspended=suspended)
        site.now = start + later + suspended * (hours + 10)
        await site.polled()
        left = {job.info(now=site.now).time_left for job in jobs.values()}
        assert left == {None if suspended else hours}
    assert not site.warned and list(site.registry.active) == ["demo-0", "demo-1"], "no end was near"


async def test_a_cluster_that_hpcgpu_stop_has_stopped_ends_without_a_log(site: Site) -> None:
    site.directory.begin_close()
    site.says("demo-scheduler", JobState.CANCELLED, end=site.now)
    site.client.listening = False
    await site.polled()
    assert site.warned == ["cluster demo was stopped by another program, such as `hpcgpu stop`"]


async def test_until_the_scheduler_is_there_the_reason_counts_the_jobs_that_were_just_submitted(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.registry.add(site.scheduler)
    site.state.scheduler = site.scheduler
    await site.scheduler.submit()
    await site.scale(2)
    assert site.group.reason == "the size is set to 2 jobs; 2 jobs exist"


async def test_a_cluster_that_hpcgpu_stop_has_just_stopped_is_not_made_larger(site: Site) -> None:
    site.directory.begin_close()
    before = dict(site.queue.jobs)
    with pytest.raises(ClusterError, match="was closed, by its program or by `hpcgpu stop`"):
        site.reconciler.order(Scale(DEFAULT, 5))
    await site.settled()
    assert site.queue.jobs == before and site.directory.wanted().sizes == {DEFAULT: 2}


async def test_a_detach_that_cannot_be_recorded_is_an_error_and_the_cluster_keeps_its_manager(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("hpcgpu.store.directory.ClusterDirectory.write", no_room)
        with pytest.raises(
            ClusterError, match=r"cannot be detached, because \S+/demo cannot be written: No space .* Make room there"
        ):
            site.reconciler.order(Detach())
    assert site.state.managed and not site.state.wanted.detached and not site.directory.detached
    site.reconciler.order(Detach())
    assert site.directory.detached and site.directory.wanted() == site.state.wanted


async def test_a_detach_for_which_there_was_no_room_is_recorded_with_a_later_submit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.state.ownership = Ownership(ends_jobs=False, ends_at_exit=False)
    with monkeypatch.context() as full:
        full.setattr("hpcgpu.store.directory.ClusterDirectory.write", no_room)
        site.reconciler.submitter.detach_when_complete()
    assert "cannot be detached" in site.warned[-1] and not site.directory.detached
    site.reconciler.order(Scale(DEFAULT, 3))
    await site.settled()
    assert site.directory.detached and site.state.wanted.detached


async def test_a_cluster_on_a_full_disk_is_scaled_and_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcgpu.store.directory.ClusterDirectory.write", no_room)
    monkeypatch.setattr("hpcgpu.store.directory.ClusterDirectory._append", no_room)
    site.reconciler.order(Scale(DEFAULT, 1))
    await site.settled()
    assert sum(not job.state.ended for job in site.queue.jobs.values()) == 2
    closing = await closed(site)
    assert all(job.state.ended for job in site.queue.jobs.values()) and not closing.problem
    with pytest.raises(ClusterError, match="is closed"):
        site.reconciler.order(Scale(DEFAULT, 2))


@pytest.mark.parametrize("leave", ["detaches", "supersede"])
async def test_a_program_that_has_left_a_cluster_does_not_cancel_it_when_the_cluster_is_lost(
    site: Site, leave: str
) -> None:
    site.state.detaches() if leave == "detaches" else site.state.supersede("another program has it")
    await site.reconciler.fail("its scheduler does not answer")
    assert not any(job.state.ended for job in site.queue.jobs.values()) and not site.directory.closing


async def test_a_cluster_whose_journal_cannot_be_read_for_a_while_is_scaled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object) -> Iterator[Any]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hpcgpu.store.directory.ClusterDirectory._lines", fails)
    site.reconciler.order(Scale(DEFAULT, 1))
    await site.settled()
    assert sum(not job.state.ended for job in site.queue.jobs.values()) == 2


def no_room(self: object, *arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_worker_jobs_that_hpcgpu_stop_ended_first_are_no_failures_and_are_not_replaced(site: Site) -> None:
    site.directory.begin_close()
    await site.ends("demo-0", JobState.CANCELLED)
    assert site.warned == ["cluster demo was stopped by another program, such as `hpcgpu stop`"]
    assert site.state.phase.lost


async def test_a_scheduler_that_somebody_cancelled_has_its_end_in_the_journal_before_hpcgpu_cancels_the_others(
    site: Site,
) -> None:
    site.says("demo-scheduler", JobState.CANCELLED, end=site.now)
    site.client.listening = False
    await site.polled()
    submits = {one.name: one for one in site.directory.submits()}
    assert site.directory.closing and submits["demo-scheduler"].before_close
    assert not submits["demo-0"].before_close


async def test_the_queue_is_polled_soon_after_the_last_of_several_submits(site: Site) -> None:
    site.state.poll_now.clear()
    await site.scale(site.group.limits.maximum + 3)
    assert site.state.poll_now.is_set()


async def test_a_cluster_is_left_to_itself_only_when_the_queue_has_all_jobs_that_were_asked_for(tmp_path: Path) -> None:
    """Until then its lease ends the few that are there, if its start is killed."""
    site = Site(tmp_path)
    await site.begin(0)
    site.state.ownership = Ownership(ends_jobs=False, ends_at_exit=False)
    submit, taken = site.queue.submit, list[str]()
    first, examined = threading.Lock(), threading.Event()
    examine = site.reconciler.submitter.detach_when_complete

    def one(script: Path, **named: Any) -> str:
        if not first.acquire(blocking=False):
            assert examined.wait(60), "the other job is there, and this one is being submitted"
            raise BatchUnavailable("the queue does not answer")
        taken.append(submit(script, **named))
        return taken[0]

    def then() -> None:
        examine()
        examined.set()

    site.queue.submit = one  # type: ignore[method-assign]
    site.reconciler.submitter.detach_when_complete = then  # type: ignore[method-assign]
    await site.scale(2)
    assert len(taken) == 1 and not site.directory.detached
    site.queue.submit = submit  # type: ignore[method-assign]
    await site.scale(2)
    assert site.directory.detached


async def test_an_adaptive_cluster_is_waited_for_with_the_jobs_that_it_has(site: Site) -> None:
    assert len(site.registry.active) == 2
    site.reconciler.order(Adapt(DEFAULT, Limits(minimum=0, maximum=8), 5.0))
    assert site.state.registry.wanted_workers == 2 * site.group.options.workers_per_job
    site.reconciler.order(Adapt(DEFAULT, Limits(minimum=5, maximum=8), 5.0))
    assert site.state.registry.wanted_workers == 5 * site.group.options.workers_per_job, "the minimum is on its way"


async def test_what_was_submitted_keeps_its_directory_though_the_queue_refused_the_rest_of_the_start(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    await site.begin(0)
    site.queue.refusal = SubmitRefused("Invalid account")
    await site.scale(1)
    site.state.lose("the start failed")
    await closed(site)
    assert [submit.refused for submit in site.directory.submits()] == [False, True]


async def test_a_request_that_is_refused_is_answered_with_the_reason(site: Site) -> None:
    periodic = Periodic(site.reconciler, site.options)
    site.directory.begin_close()  # by `hpcgpu stop`, a moment ago
    requests: list[Any] = [{"number": 7, "command": to_json(Scale(DEFAULT, 5))}]
    answers: list[tuple[int, str]] = []

    async def next_request(manager: int) -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def answer_request(number: int, error: str) -> None:
        answers.append((number, error))
        raise asyncio.CancelledError

    site.client.next_request = next_request  # type: ignore[method-assign]
    site.client.answer_request = answer_request  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(periodic._serve_requests(site.client), 60)  # type: ignore[arg-type]
    [(number, error)] = answers
    assert number == 7 and "was closed, by its program or by `hpcgpu stop`" in error
