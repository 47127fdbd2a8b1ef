"""Tasks that need resources of a worker: how many run at once, and where they move. Real schedulers and workers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import dask
import pytest
from distributed import Client, Future, Scheduler, Worker

from hpcgpu.dask_scheduler import scheduler_extension
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.dask_scheduler.tasks_waiting_for_resources import at_once, move_waiting

TIMEOUT = 60.0
#: Ends the tasks that `held` runs.
RELEASE = threading.Event()


def held(number: int) -> None:
    """A task that takes a thread of its worker until the test ends it."""
    RELEASE.wait(TIMEOUT)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.01)


class Site:
    """A scheduler, its workers and a client. Each worker has four threads."""

    def __init__(self, scheduler: Scheduler, client: Client, stack: contextlib.AsyncExitStack) -> None:
        self.scheduler = scheduler
        self.client = client
        self._stack = stack
        self._futures: list[Future] = []

    async def add(self, name: str, **resources: float) -> None:
        """Add a worker."""
        worker = Worker(self.scheduler.address, nthreads=4, name=name, dashboard=False, resources=resources)
        await self._stack.enter_async_context(worker)
        await until(lambda: self.state(name) in self.scheduler.running)

    async def submit(self, count: int, **arguments: Any) -> list[Future]:
        """Submit tasks that do not end, and wait until they have begun or wait for resources."""
        futures = self.client.map(held, range(count), pure=False, **arguments)
        self._futures += futures
        s = self.scheduler
        await until(lambda: all(f.key in s.tasks and s.tasks[f.key].state == "processing" for f in futures))
        return futures

    def state(self, name: str) -> Any:
        """Return what the scheduler records of a worker."""
        return next(ws for ws in self.scheduler.workers.values() if ws.name == name)

    def shares(self) -> dict[str, int]:
        """Return how many tasks each worker has."""
        return {str(ws.name): len(ws.processing) for ws in self.scheduler.workers.values()}

    async def settled(self) -> dict[str, int]:
        """Let tasks move until none does; return how many each worker has."""
        move_waiting(self.scheduler)
        stealing = self.scheduler.extensions.get("stealing")
        while stealing is not None and stealing.in_flight:
            move_waiting(self.scheduler)  # the workers have not answered yet
            await until(lambda: not stealing.in_flight)
            move_waiting(self.scheduler)
        return self.shares()


@asynccontextmanager
async def site(**config: Any) -> AsyncIterator[Site]:
    off = {"distributed.scheduler.work-stealing-interval": "1 hour"}  # what distributed moves itself is no part of it
    with dask.config.set(off | config):
        async with contextlib.AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(Scheduler(host="127.0.0.1", port=0, dashboard=False))
            client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True, set_as_default=False))
            RELEASE.clear()
            try:
                yield Site(scheduler, client, stack)
            finally:
                RELEASE.set()


async def test_tasks_that_wait_for_resources_move_to_a_worker_that_has_them_free() -> None:
    async with site() as s:
        await s.add("first", MEMORY=100)
        futures = await s.submit(4, resources={"MEMORY": 70})
        assert await s.settled() == {"first": 4}, "there is no other worker"
        await s.add("plain")
        await s.add("small", MEMORY=69)
        assert await s.settled() == {"first": 4, "plain": 0, "small": 0}, "no other worker can run them"
        await s.add("second", MEMORY=100)
        await s.add("third", MEMORY=150)
        assert await s.settled() == {"first": 1, "plain": 0, "small": 0, "second": 1, "third": 2}
        RELEASE.set()
        await asyncio.wait_for(s.client.gather(futures, direct=False), TIMEOUT)


async def test_what_a_worker_has_begun_stays() -> None:
    async with site() as s:
        await s.add("first", MEMORY=100)
        futures = await s.submit(2, resources={"MEMORY": 70})
        await s.add("second", MEMORY=100)
        first = s.state("first")
        first.executing = {s.scheduler.tasks[futures[1].key]: 1.0}  # the heartbeat is wrong: the other one runs
        move_waiting(s.scheduler)
        stealing = s.scheduler.extensions["stealing"]
        assert [ts.key for ts in stealing.in_flight] == [futures[0].key]
        await until(lambda: not stealing.in_flight)
        assert s.shares() == {"first": 2, "second": 0}, "the worker kept the task that runs"
        first.executing = {s.scheduler.tasks[futures[0].key]: 1.0}
        assert await s.settled() == {"first": 1, "second": 1}


async def test_nothing_moves_that_may_not_or_need_not() -> None:
    async with site() as s:
        await s.add("first", MEMORY=100)
        await s.add("second", MEMORY=100)
        await s.submit(3, resources={"MEMORY": 30}, workers=["first"], allow_other_workers=True)
        assert await s.settled() == {"first": 3, "second": 0}, "all of them run"
        await s.submit(3, resources={"MEMORY": 90}, workers=["first"])
        assert await s.settled() == {"first": 6, "second": 0}, "they may only run there"
        await s.submit(3, workers=["first"])
        assert await s.settled() == {"first": 9, "second": 0}, "tasks without resources are left to distributed"
    async with site(**{"distributed.scheduler.work-stealing": False}) as s:
        await s.add("first", MEMORY=100)
        await s.submit(2, resources={"MEMORY": 70})
        await s.add("second", MEMORY=100)
        assert await s.settled() == {"first": 2, "second": 0}, "stealing is off"


async def test_a_task_stays_whose_data_would_take_longer_than_its_turn() -> None:
    async with site(**{"distributed.scheduler.unknown-task-duration": "1s"}) as s:
        await s.add("first", MEMORY=100)
        [data] = await s.client.scatter([b"x" * 1000])
        s.scheduler.tasks[data.key].nbytes = 10 * s.scheduler.bandwidth
        futures = s.client.map(lambda number, data: held(number), range(2), data=data, resources={"MEMORY": 70})
        tasks = s.scheduler.tasks
        await until(lambda: all(f.key in tasks and tasks[f.key].state == "processing" for f in futures))
        await s.add("second", MEMORY=100)
        assert await s.settled() == {"first": 2, "second": 0}, "10 s of transfer for 1 s of work"
        tasks[futures[0].key].prefix.add_exec_time(20.0)
        assert await s.settled() == {"first": 1, "second": 1}


async def test_the_time_that_waiting_tasks_take_is_estimated_as_dask_does() -> None:
    async with site(**{"distributed.scheduler.unknown-task-duration": "7s"}) as s:
        extension, tasks = Extension(s.scheduler, None), s.scheduler.tasks
        futures = s.client.map(held, range(3), pure=False)
        await until(lambda: all(f.key in tasks for f in futures))
        prefix = tasks[futures[0].key].prefix

        async def seconds() -> float:
            [waiting] = (await extension.load())["waiting"]
            assert waiting["tasks"] == 3, "there is no worker"
            return waiting["seconds"]

        assert await seconds() == 3 * 7, "unknown-task-duration"
        prefix.add_exec_time(20.0)
        assert await seconds() == 3 * 40, "a task of this kind has run for 20 s, and none has ended"
        prefix.add_duration("compute", 0.0, 30.0)
        assert await seconds() == 3 * 30


async def test_of_many_tasks_that_wait_a_few_are_examined_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_extension, "_SAMPLE", 2)
    async with site(**{"distributed.scheduler.unknown-task-duration": "7s"}) as s:
        futures = s.client.map(held, range(8), pure=False, resources={"GPU": 1})
        await until(lambda: all(f.key in s.scheduler.tasks for f in futures))
        waiting = (await Extension(s.scheduler, None).load())["waiting"]
        assert waiting == [{"resources": {"GPU": 1.0}, "tasks": 8, "seconds": 8 * 7}]


async def test_a_worker_runs_as_many_tasks_at_once_as_its_resources_and_threads_allow() -> None:
    async with site() as s:
        await s.add("one", MEMORY=100, SLOTS=1)
        one = s.state("one")
        assert at_once(one, 100) == 4, "it has four threads, and no task"
        await s.submit(1, resources={"MEMORY": 70})
        assert at_once(one, 100) == 1, "another one of this size would not fit"
        await s.submit(7, resources={"MEMORY": 70})
        assert at_once(one, 100) == 1 and at_once(one, 3) == 1
        await s.submit(8, resources={"MEMORY": 0.1})
        assert at_once(one, 100) == 2, "the mean of large and small ones"
        load = await Extension(s.scheduler, None).load()
        [worker] = load["workers"]["changed"].values()
        assert (worker["processing"], worker["at_once"], worker["nthreads"]) == (16, 2, 2)


async def test_a_tenth_of_a_resource_fits_ten_times() -> None:
    async with site() as s:
        await s.add("one", GPU=0.3)
        await s.submit(3, resources={"GPU": 0.1})
        assert at_once(s.state("one"), 100) == 3
        await s.add("two", GPU=0.3)
        assert await s.settled() == {"one": 3, "two": 0}
