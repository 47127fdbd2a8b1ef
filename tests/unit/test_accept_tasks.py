"""Whether a worker accepts tasks, on a real scheduler and workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed import Client, Scheduler, Worker, WorkerPlugin
from distributed.core import Status

from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.dask_worker import accept_tasks


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_retiring_worker_and_one_that_refuses_tasks_accept_tasks_again_on_request() -> None:
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, name="stays", dashboard=False) as stays,
        Worker(scheduler.address, nthreads=1, name="other", dashboard=False) as other,
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        for worker in (stays, other):
            accept_tasks.obey(worker)
        extension, state = Extension(scheduler, None), scheduler.workers[stays.address]
        await scheduler.retire_workers(workers=[stays.address], close_workers=False, remove=False)
        await until(lambda: stays.status is Status.closing_gracefully)
        await extension.resume(["stays"])
        await until(lambda: state.status is Status.running and stays.status is Status.running)
        assert await client.submit(abs, -1, workers=["stays"]) == 1
        await extension.refuse_tasks(["stays"])
        refused = client.submit(abs, -2, workers=["stays"])
        await until(lambda: stays.status is Status.closing_gracefully and refused.key in scheduler.tasks)
        assert scheduler.tasks[refused.key].state == "no-worker"
        await extension.resume(["stays"])
        assert await refused == 2


async def test_a_worker_that_is_paused_because_its_memory_is_full_refuses_tasks_too() -> None:
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        # without a limit, Dask does not check whether the memory has room again
        Worker(scheduler.address, nthreads=1, name="full", memory_limit=0, dashboard=False) as worker,
    ):
        accept_tasks.obey(worker)
        extension, state = Extension(scheduler, None), scheduler.workers[worker.address]
        worker.status = Status.paused
        await until(lambda: state.status is Status.paused)
        await extension.refuse_tasks(["full"])
        await until(lambda: worker.status is Status.closing_gracefully)
        assert state.status is Status.closing_gracefully


async def test_a_worker_that_closes_does_not_accept_tasks_again() -> None:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        worker = await Worker(scheduler.address, nthreads=1, dashboard=False)
        accept_tasks.obey(worker)
        (handler,) = (one for one in worker.stream_handlers.values() if one.__module__ == accept_tasks.__name__)
        during = []

        class AcceptAtTheEnd(WorkerPlugin):
            def teardown(self, worker: Worker) -> None:
                handler(accepts=True)
                during.append(worker.status)

        await worker.plugin_add(plugin=AcceptAtTheEnd())
        await worker.close()
        assert during == [Status.closing]
        handler(accepts=True)
        assert worker.status is Status.closed
