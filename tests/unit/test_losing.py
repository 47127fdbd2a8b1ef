"""Results that are lost for good, and tasks whose workers crash, on a real scheduler and workers in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import pytest
from distributed import Client, Event, KilledWorker, Scheduler, Worker
from distributed.client import FutureCancelledError

from hpcgpu.dask_scheduler import lost_results
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.errors import ClusterError
from hpcgpu.runtime.complete_dask_commands import NO_LIMIT


async def wait_for(name: str, *needs: Any) -> str:
    await Event(name).wait()
    return name


def test_a_client_that_loses_a_result_receives_the_reason_and_another_one_does_not() -> None:
    asyncio.run(asyncio.wait_for(_lose_and_retry(), 120))


async def _lose_and_retry() -> None:
    async with (
        Scheduler(port=0, dashboard_address=None) as scheduler,
        Client(scheduler.address, asynchronous=True) as one,
        Worker(scheduler.address, nthreads=4),
        Client(scheduler.address, asynchronous=True) as other,
    ):
        result = one.submit(int, 1, key="result")
        assert await result == 1
        [sent] = await one.scatter([[1, 2, 3]])
        waits = one.submit(wait_for, "go", key="waits")
        needs_sent = one.submit(wait_for, "go", sent, key="needs-sent")
        needs_both = one.submit(wait_for, "go", result, waits, key="needs-both")
        of_other = other.submit(wait_for, "go", key="of-other")
        while {"waits", "needs-sent", "of-other"} - scheduler.tasks.keys():
            await asyncio.sleep(0.01)
        gathering = asyncio.ensure_future(one.gather([waits, result]))
        await asyncio.sleep(0)
        await lost_results.lose(scheduler, set(scheduler.workers.values()), "the money is spent")
        with pytest.raises(ClusterError, match=r"the money is spent. Then client.retry\(futures\)"):
            await gathering
        for future in (result, waits, needs_both):
            with pytest.raises(ClusterError, match="the money is spent"):
                await future
        for future in (sent, needs_sent):
            with pytest.raises(FutureCancelledError, match=r"(?s)the money is spent.*send it again"):
                await future
        assert not of_other.done(), "a client that loses nothing waits"
        async with Worker(scheduler.address, nthreads=4):
            await one.retry([result, waits, needs_both])
            await Event("go", client=one).set()
            assert await one.gather([result, waits]) == [1, "go"] and await of_other == "go"


async def test_a_client_that_loses_only_results_receives_a_reason_for_each() -> None:
    async with (
        Scheduler(port=0, dashboard_address=None) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
        Worker(scheduler.address),
    ):
        results = client.map(abs, [-1, -2])
        assert await client.gather(results) == [1, 2]
        await lost_results.lose(scheduler, set(scheduler.workers.values()), "the money is spent")
        for result in results:
            with pytest.raises(ClusterError, match="the money is spent"):
                await asyncio.wait_for(result, 60)


def test_a_result_that_a_remaining_worker_has_too_is_not_lost() -> None:
    asyncio.run(asyncio.wait_for(_lose_one_of_two(), 120))


async def _lose_one_of_two() -> None:
    async with (
        Scheduler(port=0, dashboard_address=None) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
        Worker(scheduler.address) as leaves,
        Worker(scheduler.address),
    ):
        sent = await client.scatter(42, broadcast=True)
        assert len(scheduler.tasks[sent.key].who_has) == 2
        await lost_results.lose(scheduler, {scheduler.workers[leaves.address]}, "the money is spent")
        assert await sent == 42


async def lose_worker(scheduler: Scheduler, name: str) -> None:
    """Start a worker, and break its connection once it has the task."""
    async with Worker(scheduler.address, name=name) as worker:
        while "task" not in {task.key for task in scheduler.workers[worker.address].processing}:
            await asyncio.sleep(0.01)
        worker.batched_stream.comm.abort()
        while worker.address in scheduler.workers:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("needs", [0, 1])
def test_a_task_fails_when_more_workers_have_crashed_under_it_than_are_allowed(needs: int) -> None:
    """Also if what it needs was lost with each of them, so that it waits for that at first."""
    with dask.config.set({"distributed.scheduler.allowed-failures": 1}):
        asyncio.run(asyncio.wait_for(_crash_three_times(needs), 60))


async def _crash_three_times(needs: int) -> None:
    async with (
        Scheduler(port=0, dashboard_address=None, allowed_failures=NO_LIMIT) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        extension = Extension(scheduler, None)
        scheduler.add_plugin(extension)
        task = client.submit(wait_for, "never", *client.map(int, range(needs)), key="task")
        depends = client.submit(str, task)
        for name, crashed in (("preempted", False), ("first", True), ("second", True)):
            assert task.status == "pending"
            await lose_worker(scheduler, name)
            await extension.lost_workers.ended([name], [name] if crashed else [])
        for future in (task, depends):
            with pytest.raises(KilledWorker):
                await future


def test_crashes_under_a_task_that_was_forgotten_do_not_count_for_another_of_the_same_key() -> None:
    with dask.config.set({"distributed.scheduler.allowed-failures": 1}):
        asyncio.run(_crash_under_two_of_one_key())


async def _crash_under_two_of_one_key() -> None:
    async with (
        Scheduler(port=0, dashboard_address=None, allowed_failures=NO_LIMIT) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        extension = Extension(scheduler, None)
        scheduler.add_plugin(extension)
        for name in ("first", "second"):
            task = client.submit(wait_for, "never", key="task")
            await lose_worker(scheduler, name)
            await extension.lost_workers.ended([name], [name])
            assert scheduler.tasks["task"].state != "erred"
            task.release()
            while "task" in scheduler.tasks:
                await asyncio.sleep(0.01)
