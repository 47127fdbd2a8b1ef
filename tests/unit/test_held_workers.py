"""Which program gets which workers, on a real scheduler and workers in this process."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
from distributed import Client, Scheduler, Worker, WorkerPlugin
from distributed.core import connect

from hpcgpu.client.hold import hold
from hpcgpu.dask_scheduler import held_workers
from hpcgpu.dask_scheduler.rpc_types import HeldWorkerInfo
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.dask_worker.uploaded_package import plugin_name, require_packages
from hpcgpu.fabric.connection_report import NODE
from hpcgpu.runtime.job_identity import JOB

KIND = {"GPU": 1.0}


class Request:
    """The connection of a program that requests workers."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    async def waits(self, *, free: int, reserved: int) -> None:
        """Wait until the scheduler reports so many workers."""
        async with asyncio.timeout(60):
            while await self.comm.read() != {"free": free, "reserved": reserved}:
                pass

    async def held(self) -> int:
        """Wait until the scheduler gives the workers; return how many."""
        return len(await self.names())

    async def names(self) -> list[str]:
        """Wait until the scheduler gives the workers; return their names."""
        return [worker["name"] for worker in await self.given()]

    async def given(self) -> list[HeldWorkerInfo]:
        """Wait until the scheduler gives the workers."""
        async with asyncio.timeout(60):
            while "held" not in (message := await self.comm.read()):
                pass
        found: list[HeldWorkerInfo] = message["held"]
        return found


class Unpacks(WorkerPlugin):  # type: ignore[misc]
    """As the plugin of an uploaded package: the worker named first cannot unpack it, and needs some time for that."""

    begun: ClassVar[asyncio.Event]
    ends: ClassVar[asyncio.Event]

    async def setup(self, worker: Worker) -> None:
        if worker.name == "first":
            self.begun.set()
            await self.ends.wait()
            raise OSError("the disk is full")


@asynccontextmanager
async def cluster(
    workers: int, jobs: Sequence[str] = "", nodes: Sequence[str] = "", times: Mapping[str, Any] | None = None
) -> AsyncIterator[tuple[Extension, Any]]:
    """A scheduler with hpcgpu's extension, and what makes a request.

    `jobs` and `nodes` have an element for each worker; `times` has what a job records of its start and end.
    """
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        AsyncExitStack() as ends,
    ):
        extension = Extension(scheduler, None)
        for number in range(workers):
            worker = Worker(scheduler.address, nthreads=1, name=f"w{number}", resources=KIND, dashboard=False)
            if jobs:
                about = {"id": jobs[number], "name": jobs[number], **(times or {}).get(jobs[number], {})}
                worker.startup_information[JOB] = lambda worker, about=about: about
            if nodes:
                worker.startup_information[NODE] = lambda worker, node=nodes[number]: node
            await ends.enter_async_context(worker)

        async def request(n_workers: int, *, nested: bool = False) -> Request:
            comm = await connect(scheduler.address)
            ends.callback(comm.abort)
            await comm.write({"op": "hpcgpu_hold", "n_workers": n_workers, "resources": KIND, "nested": nested})
            return Request(comm)

        yield extension, request


async def test_workers_that_an_earlier_request_waits_for_are_not_given_to_a_later_one() -> None:
    async with cluster(2) as (_, request):
        first = await request(1)
        assert await first.held() == 1
        large = await request(2)
        await large.waits(free=1, reserved=0)
        small = await request(1)
        await small.waits(free=1, reserved=1)
        first.comm.abort()
        assert await large.held() == 2
        large.comm.abort()
        assert await small.held() == 1


async def test_two_programs_that_hold_workers_and_request_more_do_not_wait_for_each_other() -> None:
    async with cluster(4) as (_, request):
        one, other = await request(1), await request(1)
        assert await one.held() == await other.held() == 1
        of_one = await request(3, nested=True)
        await of_one.waits(free=2, reserved=0)
        of_other = await request(2, nested=True)
        assert await of_other.held() == 2, "its program holds a worker that the first one waits for"
        for over in (of_other, other):
            over.comm.abort()
        assert await of_one.held() == 3


async def test_a_request_of_more_workers_than_there_are_stops_no_other() -> None:
    async with cluster(2) as (_, request):
        never = await request(3)
        await never.waits(free=2, reserved=0)
        later = await request(1)
        assert await later.held() == 1


async def test_a_worker_whose_job_must_end_is_given_to_no_other_program_unless_the_job_stays() -> None:
    async with cluster(3) as (extension, request):
        holder = await request(1)
        assert await holder.held() == 1
        assert await extension.will_leave(["w0", "w1", "not-there"]) == ["w0"]
        later = await request(2)
        await later.waits(free=1, reserved=0)
        nested = await request(2, nested=True)
        assert await nested.held() == 2, "the block around it must end before the job can"
        nested.comm.abort()
        holder.comm.abort()
        await later.waits(free=1, reserved=0)
        await extension.resume(["w1"])
        assert await later.held() == 2


async def test_a_block_inside_a_block_gets_a_worker_whose_job_must_end_only_if_that_job_waits_for_a_program() -> None:
    async with cluster(3, jobs="abb") as (extension, request):
        holder = await request(1)
        assert await holder.held() == 1
        assert await extension.will_leave(["w0"]) == [], "job a drains; a program holds a worker of job b"
        nested = await request(2, nested=True)
        await nested.waits(free=1, reserved=0)
        nested.comm.abort()
        assert await extension.will_leave(["w1", "w2"]) == ["w1"]
        other = await request(1, nested=True)
        assert await other.held() == 1, "job b waits for the program in any case"


async def test_a_worker_is_held_again_if_its_manager_could_not_take_its_drain_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_workers, "_LEAVES", -1.0)
    async with cluster(1) as (extension, request):
        assert await extension.will_leave(["w0"]) == []
        assert await (await request(1)).held() == 1


async def test_without_a_program_that_waits_nothing_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(2) as (extension, request):
        assert await (await request(1)).held() == 1
        with monkeypatch.context() as no_scheduler:
            no_scheduler.setattr(extension.holds, "scheduler", None)  # so to read its workers fails
            extension.holds.assign()
        assert await (await request(1)).held() == 1


async def test_a_program_that_waits_for_workers_counts_as_work() -> None:
    async with cluster(1) as (extension, request):
        assert not extension.works()
        waits = await request(2)
        await waits.waits(free=1, reserved=0)
        assert extension.works(), "idle_timeout does not end the cluster"


async def test_a_request_that_is_none_stops_no_other_and_no_scaling() -> None:
    async with cluster(1) as (extension, request):
        comm = await connect(extension.scheduler.address)
        await comm.write({"op": "hpcgpu_hold", "n_workers": 1, "resources": {"GPU": "many"}})
        with pytest.raises(Exception, match="many"):
            answer = await asyncio.wait_for(comm.read(), 60)
            raise RuntimeError(str(answer))
        comm.abort()
        assert extension.holds.requested() == []
        later = await request(1)
        assert await later.held() == 1


async def test_a_worker_that_cannot_unpack_an_uploaded_package_is_given_to_no_program() -> None:
    Unpacks.begun, Unpacks.ends = asyncio.Event(), asyncio.Event()
    async with cluster(0) as (extension, request):
        scheduler = extension.scheduler
        scheduler.add_plugin(extension)
        name, plugin = plugin_name("own"), pickle.dumps(Unpacks())
        await scheduler.register_worker_plugin(comm=None, plugin=plugin, name=name, idempotent=False)
        waits = await request(1)

        def worker(name: str) -> Any:
            made = Worker(scheduler.address, nthreads=1, name=name, resources=KIND, dashboard=False)
            require_packages(made)
            return made

        first = asyncio.ensure_future(worker("first").start())
        async with asyncio.timeout(60):
            await Unpacks.begun.wait()
            while not scheduler.running:
                await asyncio.sleep(0.01)
        extension.holds.assign()  # as each second
        Unpacks.ends.set()
        with pytest.raises(RuntimeError, match="Worker failed to start"):
            await first
        async with worker("second"):
            extension.holds.assign()
            assert await waits.names() == ["second"]


async def test_of_jobs_with_as_many_free_workers_those_that_end_last_are_taken() -> None:
    old, new = {"began": 100.0, "ends": 900.0}, {"began": 500.0, "ends": 1300.0}
    async with cluster(4, jobs=["demo-0", "demo-0", "demo-2", "demo-2"], times={"demo-0": old, "demo-2": new}) as (
        _,
        request,
    ):
        assert await (await request(2)).names() == ["w2", "w3"]
    async with cluster(3, jobs="abc", times={"a": old, "b": {"began": 90.0, "ends": None}, "c": new}) as (_, request):
        assert await (await request(2)).names() == ["w1", "w2"], "job b has no walltime"


async def test_jobs_that_end_together_are_taken_and_ranked_in_the_order_of_their_numbers() -> None:
    async with cluster(3, jobs=["demo-10", "demo-9", "demo-2"]) as (_, request):
        assert await (await request(2)).names() == ["w2", "w1"]


async def test_workers_of_a_node_have_consecutive_ranks_and_their_own_local_ranks_also_in_different_jobs() -> None:
    async with cluster(4, jobs=["j-0", "j-1", "j-2", "j-10"], nodes=["n10", "n9", "n10", "n9"]) as (_, request):
        found = await (await request(4)).given()
    assert [(one["node"], one["job"]["name"], one["rank"], one["local_rank"]) for one in found] == [
        ("n9", "j-1", 0, 0),
        ("n9", "j-10", 1, 1),
        ("n10", "j-0", 2, 0),
        ("n10", "j-2", 3, 1),
    ]


async def test_a_call_on_held_workers_is_named_by_the_function_of_the_user(tmp_path: Path) -> None:
    def train(size: bytes, place: str) -> None:
        while not Path(place, "go").exists():
            time.sleep(0.05)

    async with cluster(1) as (extension, _), Client(extension.scheduler.address, asynchronous=True) as client:
        [ws] = extension.scheduler.workers.values()
        async with hold(client, 1, resources=KIND, quiet=True) as workers:
            call = asyncio.ensure_future(workers.run(train, b"x" * 300_000, str(tmp_path)))
            async with asyncio.timeout(60):
                while not (names := extension.calls.names(ws)):
                    await asyncio.sleep(0.01)
            assert names == ["train"]
            (tmp_path / "go").touch()
            await call


async def test_a_client_of_held_workers_uses_all_of_them_or_those_that_the_program_names() -> None:
    async with (
        cluster(3) as (extension, _),
        Client(extension.scheduler.address, asynchronous=True) as client,
        hold(client, 2, resources=KIND, quiet=True) as workers,
    ):
        held, (first, second) = workers.client, workers.addresses
        assert {*await held.has_what()} == {*await held.ncores()} == {first, second}
        everywhere = await held.scatter(1, broadcast=True)
        assert {*(await held.who_has([everywhere]))[everywhere.key]} == {first, second}
        named = held.map(str, range(4), workers=[second])
        await held.gather(named)
        assert {*chain(*(await held.who_has(named)).values())} == {second}
