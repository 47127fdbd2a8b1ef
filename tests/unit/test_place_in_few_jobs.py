"""In which jobs tasks run while a cluster scales itself, on a real scheduler and workers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker

from hpcgpu.dask_scheduler.rpc_types import GroupState
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.runtime.job_identity import JOB

TIMEOUT = 60.0
#: Ends the tasks that `held` runs.
RELEASE = threading.Event()


def held(number: int, *needs: Any) -> None:
    """A task that takes a thread of its worker until the test ends it."""
    RELEASE.wait(TIMEOUT)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.01)


def group(minimum: int | None) -> GroupState:
    return GroupState(
        name="worker",
        target=4,
        minimum=minimum,
        maximum=None if minimum is None else 4,
        reason="",
        paused="",
        gpu_hours=0.0,
        maximum_gpu_hours=None,
        usual_wait=None,
        gpus_per_node=2,
        resources={"GPU": 1.0},
    )


@asynccontextmanager
async def cluster(minimum: int | None) -> AsyncIterator[tuple[Scheduler, Client]]:
    """Four jobs with two workers each, of one thread; their manager reports this minimum."""
    RELEASE.clear()
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(port=0, dashboard_address=":0"))
        extension = Extension(scheduler, None)
        scheduler.add_plugin(extension)
        await extension.lease.heartbeat(1, groups=[group(minimum)])
        workers = [Worker(scheduler.address, nthreads=1, dashboard=False, memory_limit=0) for _ in range(8)]
        for number, worker in enumerate(workers):
            await stack.enter_async_context(worker)
            scheduler.workers[worker.address].extra[JOB] = {"id": str(number // 2)}
        await until(lambda: len(scheduler.running) == 8)
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
        try:
            yield scheduler, client
        finally:
            RELEASE.set()


async def busy(scheduler: Scheduler, tasks: int) -> list[int]:
    """How many tasks each job that has tasks has, once these are so many together."""

    def counted() -> Counter[str]:
        return Counter(ws.extra[JOB]["id"] for ws in scheduler.workers.values() for _ in ws.processing)

    await until(lambda: counted().total() == tasks)
    return sorted(counted().values())


@pytest.mark.parametrize("together", [True, False], ids=["at once", "one after another"])
def test_tasks_fill_few_jobs_of_a_cluster_that_scales_itself(together: bool) -> None:
    async def run() -> None:
        async with cluster(minimum=0) as (scheduler, client):
            futures = []
            for count in [3] if together else [1] * 3:
                futures += client.map(held, range(count), pure=False)
                jobs = await busy(scheduler, len(futures))
            assert jobs == [1, 2]
            futures += client.map(held, range(5), pure=False)
            assert await busy(scheduler, 8) == [2] * 4, "no task waits while a worker is free"
            futures += client.map(held, range(3), pure=False)
            await busy(scheduler, 11)
            RELEASE.set()
            await client.gather(futures)

    asyncio.run(run())


def test_tasks_run_where_their_data_is_all_the_same() -> None:
    async def run() -> None:
        async with cluster(minimum=0) as (scheduler, client):
            away = next(ws for ws in scheduler.workers.values() if ws.extra[JOB]["id"] == "2")
            data = await client.scatter(1, workers=[away.address])
            futures = [client.submit(held, 0), client.submit(held, 1, data)]
            await busy(scheduler, 2)
            assert futures[1].key in {ts.key for ts in away.processing}

    asyncio.run(run())


@pytest.mark.parametrize("minimum", [None, 4], ids=["a fixed size", "the minimum"])
def test_where_no_job_may_end_distributed_places_the_tasks(minimum: int | None) -> None:
    async def run() -> None:
        async with cluster(minimum) as (scheduler, client):
            futures = client.map(held, range(3), pure=False)
            await busy(scheduler, 3)
            assert scheduler.valid_workers(scheduler.tasks[futures[0].key]) is None, "distributed chooses among all"

    asyncio.run(run())
