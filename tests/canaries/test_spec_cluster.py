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


class Ours(SpecCluster):
    """A cluster that overrides what hpcgpu overrides, and notes what is called."""

    def __init__(self, **arguments: Any) -> None:
        self.called: list[str] = []
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
        assert cluster.called[:2] == ["_start", "_correct_state"], f"awaiting a cluster calls {cluster.called}"
        assert cluster.status is Status.running
    assert "_close" in cluster.called and cluster.status is Status.closed
