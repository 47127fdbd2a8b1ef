"""A job finds out when its walltime ends without a burden on the queue, and its workers leave in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from math import inf
from queue import Queue
from typing import Any

import pytest
from fake_slurm import Site
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.batch.base import JobStatus
from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.runtime import before_walltime, job_identity
from hpcgpu.runtime.before_walltime import Retirement
from hpcgpu.scaling.walltime_margin import lifetime, query_after
from tests.helpers import Clock

HOUR = 3600.0


@given(st.floats(min_value=1, max_value=1e7))
def test_workers_begin_to_retire_before_the_end_and_not_at_the_start(remaining: float) -> None:
    assert remaining / 2 <= lifetime(remaining) < remaining
    assert remaining - lifetime(remaining) <= 300


@given(st.none() | st.floats(min_value=1, max_value=1e7), st.floats(min_value=0, max_value=1))
def test_the_query_comes_before_workers_must_leave_and_not_at_the_same_moment_in_every_job(
    walltime: float | None, chance: float
) -> None:
    after = query_after(walltime, chance)
    assert after <= 120 and query_after(walltime, 1.0) == 4 * query_after(walltime, 0.0)
    assert walltime is None or after < lifetime(walltime)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(before_walltime, "time", clock)
    return clock


@pytest.fixture
def retired(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Retirement]]:
    """Jobs whose workers must leave."""
    told: list[Retirement] = []

    async def retire(job: Retirement, latest: float) -> None:
        assert clock.now < latest, "some time for what runs"
        told.append(job)

    monkeypatch.setattr(Retirement, "retire", retire)
    yield told


def a_job(slurm: Slurm, **environment: str) -> Retirement:
    nowhere: Any = None
    job = slurm.own_job({"SLURM_JOB_ID": "5"} | environment)
    assert job is not None
    return Retirement(own_job=job, batch=slurm, directory=nowhere, contact=nowhere, names=["w"], walltime=2 * HOUR)


def test_a_job_that_has_its_end_asks_the_queue_once_before_its_workers_leave(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement]
) -> None:
    began, asked = clock.now, list[float]()
    poll = slurm.poll
    slurm.poll = lambda ids: asked.append(clock.now - began) or poll(ids)  # type: ignore[method-assign, func-returns-value]
    a_job(slurm, SLURM_JOB_END_TIME=f"{began + HOUR:.0f}")._watch()
    assert len(retired) == 1 and clock.now == began + HOUR - 150, "half-way into the margin of 5 min"
    assert len(asked) == 1 and HOUR - 270 <= asked[0] <= HOUR - 150


def test_the_workers_of_a_job_whose_walltime_was_extended_stay_longer(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement], capsys: pytest.CaptureFixture[str]
) -> None:
    began = clock.now
    site.job(5, "RUNNING", e=f"{began + 25 * HOUR:.0f}")
    a_job(slurm, SLURM_JOB_END_TIME=f"{began + HOUR:.0f}")._watch()
    assert len(retired) == 1 and clock.now == began + 25 * HOUR - 150
    assert capsys.readouterr().err.count("the walltime of this job was extended by 86400 s") == 1


def test_a_queue_that_hangs_then_does_not_delay_them(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(slurm, "poll", lambda ids: answers.wait() and {})
    monkeypatch.setattr(random, "random", lambda: 0.0)
    began = clock.now
    try:
        a_job(slurm, SLURM_JOB_END_TIME=f"{began + HOUR:.0f}")._watch()
    finally:
        answers.set()
    assert len(retired) == 1 and clock.now == began + HOUR - 150


def test_what_runs_on_workers_that_retire_by_themselves_may_finish_but_its_results_have_time_to_move(
    slurm: Slurm, site: Site, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest: list[float] = []

    async def retire(job: Retirement, until: float) -> None:
        latest.append(until)

    monkeypatch.setattr(Retirement, "retire", retire)
    end = clock.now + HOUR
    a_job(slurm, SLURM_JOB_END_TIME=f"{end:.0f}")._watch()
    assert latest == [end - 50], "a third of the time from the begin, 150 s before the end"


def test_a_job_that_does_not_asks_the_queue_once_and_long_after_its_start(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement]
) -> None:
    began, asked = clock.now, list[float]()
    site.job(5, "RUNNING", e=f"{began + HOUR:.0f}")  # submitted by hand, for an hour instead of two
    poll = slurm.poll
    slurm.poll = lambda ids: asked.append(clock.now - began) or poll(ids)  # type: ignore[method-assign, func-returns-value]
    a_job(slurm)._watch()
    assert len(asked) == len(site.calls("squeue")) == 2 and 30 <= asked[0] <= 120
    assert len(retired) == 1 and clock.now == began + HOUR - 150


def test_a_queue_that_does_not_answer_is_asked_again(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement]
) -> None:
    began = clock.now
    for _ in range(slurm.attempts):
        site.fault("squeue", stdout="", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    site.fault("squeue", stdout="", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    site.job(5, "RUNNING", e=f"{began + HOUR:.0f}")
    a_job(slurm)._watch()
    assert len(retired) == 1 and clock.now == began + HOUR - 150


def test_a_job_that_asks_while_it_is_being_suspended_asks_again(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, poll = clock.now, slurm.poll
    site.job(5, "SUSPENDED", e=f"{began + HOUR:.0f}")

    def once(ids: list[str]) -> dict[str, JobStatus]:
        found = poll(ids)
        site.job(5, "RUNNING", e=f"{began + HOUR:.0f}")
        return found

    monkeypatch.setattr(slurm, "poll", once)
    a_job(slurm)._watch()
    assert len(retired) == 1 and clock.now == began + HOUR - 150


def test_a_job_without_an_end_is_left_alone(slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement]) -> None:
    site.job(5, "RUNNING", e="N/A")
    a_job(slurm)._watch()
    assert not retired


def test_a_node_without_the_commands_of_the_queue_reports_it_in_the_log(
    slurm: Slurm,
    site: Site,
    clock: Clock,
    retired: list[Retirement],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    site.remove("squeue", monkeypatch)
    began = clock.now
    a_job(slurm)._watch()
    assert len(retired) == 1 and clock.now == began + 2 * HOUR - 150, "as the script requests"
    replace(a_job(slurm), walltime=None)._watch()
    assert len(retired) == 1
    not_known, _, nobody = capfd.readouterr().err.splitlines()
    assert "the walltime of its script says when its workers retire: `squeue` was not found on the PATH" in not_known
    assert "only the manager of the cluster says when its workers retire: `squeue` was not found on the PATH" in nobody


def test_where_the_queue_cannot_be_asked_the_walltime_counts_from_the_start_of_the_job_not_of_its_worker(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.remove("squeue", monkeypatch)  # as in a container
    began = clock.now - HOUR  # it waited for an hour for its scheduler
    monkeypatch.setenv(job_identity.JOB, json.dumps({"id": "5", "name": "w", "began": began}))
    a_job(slurm)._watch()
    assert len(retired) == 1 and clock.now == began + 2 * HOUR - 150


def test_a_queue_that_never_answers_is_asked_less_and_less_often_and_the_log_reports_it_once(
    slurm: Slurm, site: Site, clock: Clock, retired: list[Retirement], capfd: pytest.CaptureFixture[str]
) -> None:
    began = clock.now
    for _ in range(20 * slurm.attempts):
        site.fault("squeue", stdout="", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    job = replace(a_job(slurm), walltime=6 * HOUR)
    job._watch()
    assert len(retired) == 1 and clock.now == began + 6 * HOUR - 150
    assert len(site.calls("squeue")) < 20 * slurm.attempts
    not_yet, from_script, _ = capfd.readouterr().err.splitlines()
    assert "is not known yet: " in not_yet and "Unable to contact slurm controller" in not_yet
    assert "so the walltime of its script says when its workers retire" in from_script


def test_a_signal_ends_the_workers_at_once_only_if_the_queue_reports_that_the_job_ends(
    slurm: Slurm, site: Site, clock: Clock
) -> None:
    end = clock.now + HOUR
    for state, found in (("RUNNING", end), ("COMPLETING", None), ("CANCELLED", None)):
        site.job(5, state, e=f"{end:.0f}")
        assert a_job(slurm).warned() == found, state
    site.job(5, "RUNNING", e=f"{end:.0f}")
    for _ in range(slurm.attempts):
        site.fault("squeue", stdout="", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", rc=1)
    assert a_job(slurm).warned() == inf, "not knowing is not an answer"
    assert a_job(slurm).warned() == end


async def test_workers_retire_at_a_later_attempt_if_one_fails_in_the_scheduler(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts: list[list[str]] = []

    class Scheduler:
        async def hpcgpu_unfinished(self, names: list[str]) -> dict[str, int]:
            return dict.fromkeys(names, 0)

        async def retire_workers(self, names: list[str], close_workers: bool, **options: bool) -> None:
            if not close_workers:
                return
            attempts.append(names)
            if len(attempts) < 3:
                raise KeyError("tls://10.0.0.3:1234")  # as one that leaves meanwhile
            raise asyncio.CancelledError

    @contextlib.asynccontextmanager
    async def scheduler_of(*_: object) -> AsyncIterator[Scheduler]:
        yield Scheduler()

    monkeypatch.setattr(before_walltime, "scheduler_of", scheduler_of)
    monkeypatch.setattr(before_walltime, "_AGAIN", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await a_job(slurm).retire(time.time() + 60)
    assert attempts == [["w"]] * 3
    assert capfd.readouterr().err.count("did not retire yet: KeyError") == 1


async def test_what_runs_on_retiring_workers_may_finish_but_not_for_longer_than_the_job_lives(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[str] = []

    class Scheduler:
        def __init__(self, unfinished: list[int]) -> None:
            self.unfinished = unfinished

        async def hpcgpu_unfinished(self, names: list[str]) -> dict[str, int]:
            return {"idle": 0, "w": self.unfinished.pop(0) if len(self.unfinished) > 1 else self.unfinished[0]}

        async def retire_workers(self, names: list[str], close_workers: bool, **options: bool) -> None:
            steps.append("close" if close_workers else "retire")
            if close_workers:
                raise asyncio.CancelledError

    @contextlib.asynccontextmanager
    async def scheduler_of(*_: object) -> AsyncIterator[Scheduler]:
        yield Scheduler(unfinished)

    monkeypatch.setattr(before_walltime, "scheduler_of", scheduler_of)
    monkeypatch.setattr(before_walltime, "_FINISHING_INTERVAL", 0.0)
    unfinished = [2, 1, 0]
    with pytest.raises(asyncio.CancelledError):
        await a_job(slurm).retire(time.time() + 60)
    assert steps == ["retire", "retire", "retire", "close"]
    assert capfd.readouterr().err.count("its workers retire once what runs on them has ended") == 1
    steps.clear()
    unfinished = [1]  # it never finishes
    with pytest.raises(asyncio.CancelledError):
        await a_job(slurm).retire(time.time() + 0.1)
    assert steps[0] == "retire" and steps[-1] == "close"


def test_a_job_that_slurm_warns_lets_its_workers_retire_while_some_time_is_left(
    slurm: Slurm, clock: Clock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    latest: Queue[float] = Queue()

    async def retire(job: Retirement, until: float) -> None:
        latest.put(until)

    monkeypatch.setattr(Retirement, "retire", retire)
    a_job(slurm).begin_at_once(clock.now + 100)
    assert clock.now + 50 < latest.get(timeout=60) < clock.now + 100
    a_job(slurm).begin_at_once(inf)
    assert latest.get(timeout=60) == inf
    within, soon = capfd.readouterr().err.splitlines()
    assert "this job will end within 100 s" in within and "this job will end soon" in soon
