"""What the manager asks the scheduler each second does not grow with the number of workers, if nothing has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgpack
import psutil
import pytest
from distributed import Scheduler, Worker
from distributed.security import Security

from hpcgpu.dask_scheduler.answer_changes import Received, Sent
from hpcgpu.dask_scheduler.rpc_types import WorkerLoad
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient, Workers
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.manager.periodic_tasks import decision_interval
from hpcgpu.posix.threads import in_thread

IDLE = WorkerLoad(
    processing=0,
    calls=0,
    computes=False,
    occupancy=0.0,
    nbytes=0,
    wanted=0,
    actors=0,
    at_once=1,
    nthreads=1,
    paused=False,
    memory_limit=64 * 2**30,
)


def loads(number: int, **changed: int) -> dict[str, Any]:
    return {f"demo-{i}": {**IDLE, **(changed if i == 7 else {})} for i in range(number)}


def size(answer: object) -> int:
    """Bytes of an answer on the network."""
    return len(msgpack.dumps(answer))


@pytest.mark.parametrize("number", [10, 1000, 8000])
def test_an_answer_does_not_grow_with_the_workers_if_nothing_has_changed(number: int) -> None:
    told, known = Sent(), Received()
    assert known.update(told.changed_since(loads(number), known.version))
    again = told.changed_since(loads(number), known.version)
    assert size(again) < 100
    assert not known.update(again) and known.values == loads(number)
    one = told.changed_since(loads(number, processing=3), known.version)
    assert size(one) < 300, "only the worker that has changed is told"
    assert known.update(one) and known.values == loads(number, processing=3)
    assert known.update(told.changed_since(loads(number - 2, processing=3), known.version))
    assert known.values == loads(number - 2, processing=3)


def test_everything_is_sent_again_after_either_side_has_started_again() -> None:
    told, known = Sent(), Received()
    known.update(told.changed_since(loads(10), known.version))
    known.update(Sent().changed_since(loads(8), known.version))
    assert known.values == loads(8), "another scheduler, which knows nothing of the version"
    new = Received()
    new.update(told.changed_since(loads(10), new.version))
    assert new.values == loads(10)


def test_two_that_ask_in_turns_both_have_everything() -> None:
    told, one, other = Sent(), Received(), Received()
    for number in (10, 12, 12, 9):
        for known in (one, other):
            known.update(told.changed_since(loads(number), known.version))
            assert known.values == loads(number)


@asynccontextmanager
async def manager(*names: str) -> AsyncIterator[tuple[SchedulerClient, Callable[[str], Any], Extension]]:
    """A manager's connection to a real scheduler with our extension, and what starts another worker."""
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        AsyncExitStack() as stack,
    ):
        extension = Extension(scheduler, None)
        scheduler.add_plugin(extension)

        async def join(name: str) -> Worker:
            return await stack.enter_async_context(Worker(scheduler.address, name=name, dashboard=False))

        for name in names:
            await join(name)
        client = SchedulerClient(scheduler.address, Security(), lambda joined, known: None, lambda address: None)
        yield client, join, extension
        await client.close()


async def test_the_manager_has_the_workers_and_their_load_though_only_changes_are_sent() -> None:
    async with manager("demo-0", "demo-1") as (client, join, extension):

        async def names() -> set[str]:
            return {str(worker["name"]) for worker in (await client.workers()).values()}

        assert await names() == {"demo-0", "demo-1"} == await names()
        assert not (await extension.workers(client._workers.version))["workers"]["changed"]
        load = await client.load()
        assert load["workers"].keys() == {"demo-0", "demo-1"} and await client.load() is load, "nothing has changed"
        [one, _] = extension.scheduler.workers.values()
        extension.scheduler.add_resources(one.address, {"GPU": 1})
        assert (await client.workers())[one.address]["resources"] == {"GPU": 1}
        third = await join("demo-2")
        assert await names() == {"demo-0", "demo-1", "demo-2"}
        assert (await client.load())["workers"].keys() == {"demo-0", "demo-1", "demo-2"}
        assert await client.running() == 3
        await third.close(nanny=False)
        assert await names() == {"demo-0", "demo-1"}
        assert (await client.load())["workers"].keys() == {"demo-0", "demo-1"}
        assert {"type", "id", "address", "services"} <= client.info.keys()


async def test_a_manager_that_goes_to_the_next_scheduler_closes_its_connection_to_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with manager() as (client, _, one), manager("demo-1") as (_, _, two):
        port = int(one.scheduler.address.rpartition(":")[2])

        def connections() -> int:
            return sum(bool(there.raddr) and there.raddr[1] == port for there in psutil.Process().net_connections())

        await client.workers()
        assert connections() == 1, "no worker has connections of its own there"
        await in_thread(client.move, two.scheduler.address)
        assert {worker["name"] for worker in (await client.workers()).values()} == {"demo-1"}
        async with asyncio.timeout(60):
            while connections():
                await asyncio.sleep(0.01)
        assert "open comms" not in caplog.text


async def test_the_manager_receives_at_once_the_workers_that_come_and_go_also_when_its_stream_had_ended() -> None:
    seen: list[str] = []
    changed = asyncio.Event()

    def joined(workers: Workers, known: Workers) -> None:
        assert workers.items() <= known.items()
        seen.extend(f"+{worker['name']}" for worker in workers.values())
        changed.set()

    def left(address: str) -> None:
        seen.append(f"-{address in client.known}")
        changed.set()

    async def until(number: int) -> None:
        async with asyncio.timeout(60):
            while len(seen) < number:
                changed.clear()
                await changed.wait()

    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        scheduler.add_plugin(Extension(scheduler, None))
        client = SchedulerClient(scheduler.address, Security(), joined, left)
        assert not client.listening and await client.listen() == {} and client.listening
        others: list[object] = []
        other = SchedulerClient(scheduler.address, Security(), lambda new, known: others.append(new), lambda _: None)
        assert await other.listen() == {}, "a second manager"
        async with Worker(scheduler.address, name="demo-0", dashboard=False) as worker:
            await until(1)
            await client._comm.close()
            await asyncio.wait_for(client.stream_ended(), 60)
            assert not client.listening and (await client.listen())[worker.address]["name"] == "demo-0"
        await until(2)
        await client.close()
        assert seen == ["+demo-0", "-False"] and not client.listening
        assert len(others) == 1 and other.listening, "the second manager learns of the same worker, and still listens"
        async with Worker(scheduler.address, name="demo-1", dashboard=False), asyncio.timeout(60):
            while len(others) < 2:
                await asyncio.sleep(0.01)
        await other.close()


async def test_a_notebook_shows_the_first_of_many_workers() -> None:
    async with manager("demo-0") as (client, _, _):
        [worker] = (await client.workers()).values()
        client.info["workers"] |= {f"tcp://10.0.0.{i}:1": worker for i in range(999)}
        page = client.info._repr_html_()
        assert page.count("Local directory") == 20 and "1000" in page and "(shown below: 20)" in page


@pytest.mark.parametrize(("jobs", "seconds"), [(0, 1.0), (1, 1.0), (200, 1.0), (1000, 5.0)])
def test_decisions_are_further_apart_where_each_examines_many_jobs(jobs: int, seconds: float) -> None:
    assert decision_interval(jobs) == seconds


async def test_a_worker_that_came_or_went_while_the_scheduler_was_asked_is_reported_as_the_stream_reported_it() -> None:
    computed, arrives = asyncio.Event(), asyncio.Event()
    async with manager("demo-0") as (client, join, extension):

        async def late(version: str) -> Any:
            answer = await extension.workers(version)
            computed.set()
            await arrives.wait()
            return answer

        def known() -> set[str]:
            return {str(worker["name"]) for worker in client.known.values()}

        async def asked_while(changes: Callable[[], Any], names: set[str]) -> set[str]:
            """What is known after an answer that was computed before this change, and arrives after it."""
            computed.clear(), arrives.clear()
            answer = asyncio.ensure_future(client.workers())
            await computed.wait()
            other = asyncio.ensure_future(client.workers())
            await changes()
            async with asyncio.timeout(60):
                while known() != names:
                    await asyncio.sleep(0.01)
            arrives.set()
            await asyncio.gather(answer, other)
            return known()

        await client.listen()
        extension.scheduler.handlers["hpcgpu_workers"] = late
        new: list[Worker] = []

        async def comes() -> None:
            new.append(await join("demo-1"))

        assert await asked_while(comes, {"demo-0", "demo-1"}) == {"demo-0", "demo-1"}
        assert await asked_while(lambda: new[0].close(nanny=False), {"demo-0"}) == {"demo-0"}
        extension.scheduler.handlers["hpcgpu_workers"] = extension.workers
        await client.workers()
        assert known() == {"demo-0"}
