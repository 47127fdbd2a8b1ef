"""Clients that share results, or forget them, go on with another scheduler: on real ones in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker, fire_and_forget, get_worker

from hpcgpu.client import futures_to_replay, lost_scheduler
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.errors import ClusterWarning

pytestmark = pytest.mark.filterwarnings("ignore:replay, after the end")

REPLACED = (
    *("_reconnect", "_handle_report", "_gather_remote"),
    *("_send_to_scheduler", "_send_to_scheduler_safe", "submit", "map"),
)


@asynccontextmanager
async def two_clients() -> AsyncIterator[tuple[Client, Client, Scheduler]]:
    """Two clients of a scheduler with a worker, in a block of `replay`, and the scheduler that follows."""

    async def following() -> str:
        return str(second.address)

    async def why() -> str:
        return "job 7 was preempted"

    with pytest.MonkeyPatch.context() as patch:
        for name in REPLACED:  # put back at the end
            patch.setattr(Client, name, getattr(Client, name))
        async with (
            Scheduler(port=0, dashboard_address=":0") as first,
            Scheduler(port=0, dashboard_address=":0") as second,
            Worker(first.address, dashboard=False),
            Worker(second.address, dashboard=False),
        ):
            extension = Extension(second, None)
            second.add_plugin(extension)
            lost_scheduler.explain_loss(first.address, why)
            lost_scheduler.follow(first.address, following)
            async with (
                Client(first.address, asynchronous=True, set_as_default=False) as one,
                Client(first.address, asynchronous=True, set_as_default=False) as other,
            ):
                with futures_to_replay.keep(lambda client: client in (one, other)):
                    yield one, other, second


async def goes_on(client: Client, second: Scheduler) -> None:
    """Let a client lose its scheduler; wait until it has submitted its futures to the next one."""
    client.scheduler_comm.comm.abort()
    while client.scheduler.address != second.address or client.status != "running":
        await asyncio.sleep(0.01)


async def released_by_the_other() -> None:
    async with two_clients() as (one, other, second):
        of_one, of_other = one.submit(abs, -1, key="shared"), other.submit(abs, -1, key="shared")
        needs_it = other.submit(abs, of_other, key="needs")
        assert await asyncio.gather(of_one, needs_it) == [1, 1]
        await goes_on(one, second)
        await of_one
        ask, asked = other.who_has, asyncio.Event()

        async def who_has(*arguments: Any) -> Any:
            found = await ask(*arguments)
            assert "shared" in found
            of_one.release()
            while "shared" in second.tasks:
                await asyncio.sleep(0.01)
            asked.set()
            return found

        other.who_has = who_has
        await goes_on(other, second)
        await asked.wait()
        assert await of_other == 1 and await needs_it == 1


async def only_needed_by_the_other() -> None:
    async with two_clients() as (one, other, second):
        of_one, of_other = one.submit(abs, -1, key="shared"), other.submit(abs, -1, key="shared")
        needs_it = one.submit(abs, of_one, key="needs")
        assert await asyncio.gather(needs_it, of_other) == [1, 1]
        of_one.release()
        await goes_on(one, second)
        await needs_it
        while second.tasks["shared"].state != "released":
            await asyncio.sleep(0.01)
        await goes_on(other, second)
        assert await of_other == 1
        assert {key for key, task in second.tasks.items() if task.who_wants} == {"shared", "needs"}


@pytest.mark.parametrize("case", [released_by_the_other, only_needed_by_the_other])
def test_a_result_that_another_client_has_released_is_computed_again(case: Any) -> None:
    asyncio.run(asyncio.wait_for(case(), 20))


async def with_an_array_that_changes() -> None:
    async with two_clients() as (one, _, second):
        array = np.ones(100_000)
        future = one.submit(np.sum, array)
        assert await future == 100_000
        array[:] = 0
        await goes_on(one, second)
        assert await future == 100_000


def test_what_runs_again_has_the_data_of_its_submit() -> None:
    asyncio.run(asyncio.wait_for(with_an_array_that_changes(), 60))


GO = threading.Event()


def runs_on() -> str:
    GO.wait()
    RAN.append(get_worker().address)
    return RAN[-1]


RAN: list[str] = []


async def fired_and_forgotten() -> None:
    async with two_clients() as (one, _, second):
        future, lost = one.submit(runs_on, key="held"), one.submit(runs_on, key="lost")
        with pytest.warns(
            ClusterWarning, match="to fire_and_forget do not run again .* unless your program holds"
        ) as told:
            fire_and_forget([future, lost])
        assert [warning.filename for warning in told] == [__file__]
        lost.release()
        await goes_on(one, second)
        while "held" not in second.tasks:
            await asyncio.sleep(0.01)
        future.release()
        del future
        GO.set()
        [worker] = second.workers
        while worker not in RAN:
            await asyncio.sleep(0.01)
        assert "lost" not in second.tasks


def test_what_is_given_to_fire_and_forget_runs_again_if_the_program_held_it() -> None:
    asyncio.run(asyncio.wait_for(fired_and_forgotten(), 60))
