"""What `hpcgpu.cluster` relies on in distributed's clusters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from canary import canary
from distributed import Scheduler, Worker
from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
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
        await Cluster._start(self)

    async def _close(self) -> None:
        self.called.append("_close")
        await Cluster._close(self)
        await self.scheduler.close()

    async def _correct_state(self) -> None:
        self.called.append("_correct_state")

    def _update_worker_status(self, op: str, msg: Any) -> None:
        self.called.append(f"_update_worker_status {op}")
        Cluster._update_worker_status(self, op, msg)

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: bool = True) -> Any:
        return "ours", cluster, scheduler, workers

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | None = None) -> Any:
        return "ours", n_workers, timeout

    def _threads_per_worker(self) -> int:
        return 4

    def _memory_per_worker(self) -> int:
        return 2**30

    async def until(self, called: str) -> None:
        while called not in self.called:
            await asyncio.sleep(0.01)


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
        assert await cluster.wait_for_workers(3, timeout=5) == ("ours", 3, 5)
        cluster.quiet = True
        cluster._log("a line")
        cluster.scale(cores=8)
        assert len(cluster.worker_spec) == 2, "scale(cores=8) with 4 threads a worker"
        cluster.scale(memory="3 GiB")
        assert len(cluster.worker_spec) == 3, "scale(memory='3 GiB') with 1 GiB a worker"
        assert cluster._adaptive is None and callable(cluster._loop_runner.stop)
        cluster.worker_spec.clear()
    assert "_close" in cluster.called and cluster.status is Status.closed


@canary
async def test_the_cluster_hears_of_workers_by_the_stream_that_hpcgpu_renews() -> None:
    async with started() as cluster:
        stream = cluster._watch_worker_status_task
        await cluster._watch_worker_status_comm.close()
        await asyncio.wait_for(asyncio.wait([stream]), 60)
        assert stream.done(), "the stream ended, and its task goes on"
        comm = await cluster.scheduler_comm.live_comm()
        await comm.write({"op": "subscribe_worker_status"})
        cluster.scheduler_info = SchedulerInfo(await comm.read())
        cluster._watch_worker_status_comm = comm
        cluster._watch_worker_status_task = asyncio.ensure_future(cluster._watch_worker_status(comm))
        async with Worker(cluster.scheduler.address, nthreads=1, name="canary-0-1", dashboard=False) as worker:
            await asyncio.wait_for(cluster.until("_update_worker_status add"), 60)
            assert cluster.scheduler_info["workers"][worker.address]["name"] == "canary-0-1"
        await asyncio.wait_for(cluster.until("_update_worker_status remove"), 60)
        assert cluster.scheduler_info["workers"] == {}
