"""The limits of time of a real scheduler: time without work, and silence of workers, in steps and not by the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from distributed import Client, Event, Scheduler, Worker
from distributed.core import Status

from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.jobs.local_scheduler import LocalScheduler
from hpcgpu.store import certificates_and_keys, create_directory


async def wait_for(name: str) -> None:
    await Event(name).wait()


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[Scheduler, Extension, Worker, Worker]]:
    """A scheduler with limits of an hour and two workers. The second one sends no heartbeats."""
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, name="other", dashboard=False) as other,
        Worker(scheduler.address, name="frozen", dashboard=False) as frozen,
    ):
        frozen.periodic_callbacks["heartbeat"].stop()
        extension = Extension(scheduler, None)
        extension.silence.limit = extension.idle_time.limit = 3600.0
        yield scheduler, extension, other, frozen


def receive_heartbeat(scheduler: Scheduler, *workers: Worker) -> None:
    """Give the scheduler a heartbeat of these workers."""
    for worker in workers:
        scheduler.workers[worker.address].last_seen += 1


async def test_a_worker_that_is_silent_for_the_limit_is_restarted_and_one_that_sends_heartbeats_is_not() -> None:
    async with two_workers() as (scheduler, extension, other, _):
        for _ in range(2):
            extension.silence.step(2000)
            await extension.silence.restart()
            assert other.address in scheduler.workers
            receive_heartbeat(scheduler, other)
        assert list(scheduler.workers) == [other.address]


async def test_time_in_which_the_scheduler_was_suspended_is_no_silence() -> None:
    async with two_workers() as (scheduler, extension, *_):
        for ws in scheduler.workers.values():
            ws.last_seen = time.time() - 7200
        extension.silence.step(1)
        await extension.silence.restart()
        assert len(scheduler.workers) == 2


async def test_without_a_limit_no_worker_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCGPU_WORKER_TTL", "0")
    async with two_workers() as (scheduler, _, *_):
        extension = Extension(scheduler, None)
        for _ in range(2):
            extension.silence.step(1e6)
        await extension.silence.restart()
        assert len(scheduler.workers) == 2


async def test_a_worker_whose_job_has_ended_is_removed_once_it_sends_no_heartbeats() -> None:
    async with (
        two_workers() as (scheduler, extension, other, frozen),
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        scheduler.add_plugin(extension)
        task = client.submit(wait_for, "never", workers=["frozen"], allow_other_workers=True)
        while not scheduler.workers[frozen.address].processing:
            await asyncio.sleep(0.01)
        for _ in range(2):
            extension.silence.step(100)
        receive_heartbeat(scheduler, other)
        await extension.lost_workers.remove_silent()
        assert frozen.address in scheduler.workers, "its job runs: it may only be slow"
        await extension.lost_workers.ended(["other", "frozen"], crashed=["frozen"])
        assert not extension.lost_workers._suspicious, "it may still work"
        await extension.lost_workers.remove_silent()
        assert list(scheduler.workers) == [other.address], "a worker with heartbeats stays until its connection ends"
        assert scheduler.tasks[task.key].processing_on.address == other.address
        assert extension.lost_workers._suspicious == {task.key: 1}, "the loss is charged, as its job crashed"


async def test_a_scheduler_ends_after_the_limit_without_work_and_work_begins_that_time_anew() -> None:
    async with (
        two_workers() as (scheduler, extension, *_),
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        step = extension.idle_time.step
        works = [True]
        extension.holds.waiting = lambda: works[0]  # type: ignore[method-assign]
        for _ in range(3):
            await step(4000)
        works[0] = False
        await step(3000)
        assert await client.submit(abs, -1) == 1
        while scheduler.check_idle() is None:  # Dask's own check, between two steps
            pass
        for _ in range(2):
            await step(3000)
        assert scheduler.status is Status.running, "a task ran between two steps"
        for _ in range(2):
            await step(3000)
        assert scheduler.status is not Status.running


async def test_a_scheduler_in_the_program_applies_the_limits_and_dask_none(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")
    certificates_and_keys.create(directory, 3600, waits=False)
    options = resolve("local", {"idle_timeout": "1h"})
    async with LocalScheduler(options, certificates_and_keys.security(directory), directory) as scheduler:
        assert not scheduler.idle_timeout and not scheduler.worker_ttl
        extension = scheduler.plugins["hpcgpu"]
        assert (extension.idle_time.limit, extension.silence.limit) == (3600.0, 300.0)
