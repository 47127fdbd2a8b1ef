"""What `hpcgpu.cluster` relies on in distributed's clusters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from canary import canary
from distributed import Scheduler, Worker
from distributed.core import Status, rpc
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo


class Ours(SpecCluster):
    """A cluster that overrides what hpcgpu overrides, and notes what is called."""

    def __init__(self, **arguments: Any) -> None:
        self.called: list[str] = []
        self.begun = hasattr(self, "_cluster_info")
        super().__init__(worker={"cls": Worker, "options": {}}, name="canary", **arguments)

    async def _start(self) -> None:
        self.called.append("_start")
        self.scheduler = await Scheduler(host="127.0.0.1", port=0, dashboard=False)
        self.scheduler_comm = rpc(self.scheduler.address)
        self.status = Status.running

    async def _close(self) -> None:
        self.called.append("_close")
        await self.scheduler_comm.close_rpc()
        await self.scheduler.close()
        self.status = Status.closed

    async def _correct_state(self) -> None:
        self.called.append("_correct_state")

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool = True) -> Any:
        return "ours", cluster, scheduler, workers


@asynccontextmanager
async def started() -> AsyncIterator[Ours]:
    cluster = await asyncio.wait_for(Ours(asynchronous=True), 60)
    try:
        yield cluster
    finally:
        await cluster.close()


@canary
async def test_the_cluster_calls_what_hpcgpu_overrides() -> None:
    async with started() as cluster:
        assert not cluster.begun and cluster._cluster_info["name"] == "canary"
        assert cluster.called[:2] == ["_start", "_correct_state"], f"awaiting a cluster calls {cluster.called}"
        assert cluster.status is Status.running
        assert await cluster.get_logs(cluster=True, scheduler=False, workers=False) == ("ours", True, False, False)
        cluster.quiet = True
        cluster._log("a line")
        assert cluster._adaptive is None and callable(cluster._loop_runner.stop)
    assert "_close" in cluster.called and cluster.status is Status.closed


@canary
async def test_the_scheduler_reports_workers_by_the_stream_that_hpcgpu_reads() -> None:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler, rpc(scheduler.address) as calls:
        comm = await calls.live_comm()
        await comm.write({"op": "subscribe_worker_status"})
        assert SchedulerInfo(await comm.read())["workers"] == {}
        async with Worker(scheduler.address, nthreads=1, name="canary-0-1", dashboard=False) as worker:
            [[op, message]] = await asyncio.wait_for(comm.read(), 60)
            assert op == "add" and message["workers"][worker.address]["name"] == "canary-0-1"
        assert [tuple(event) for event in await asyncio.wait_for(comm.read(), 60)] == [("remove", worker.address)]
        await comm.close()
