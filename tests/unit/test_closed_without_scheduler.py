"""A client that is closed while it has no scheduler."""

from __future__ import annotations

import asyncio
import logging

import pytest
from distributed import Client, Scheduler
from distributed.client import FutureCancelledError

from hpcgpu.client import lost_scheduler


@pytest.mark.parametrize("tries", [False, True], ids=["at once", "while it tries to reach the last one again"])
async def test_a_client_that_is_closed_though_no_scheduler_follows_logs_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tries: bool
) -> None:
    for name in ("_reconnect", "_handle_report", "_gather_remote"):  # put back at the end
        monkeypatch.setattr(Client, name, getattr(Client, name))

    async def why() -> str:
        return "job 7 was preempted"

    async def none_follows() -> str:
        await scheduler.finished()  # before that it may accept a connection
        return ""

    scheduler = await Scheduler(port=0, host="127.0.0.1", dashboard=False)
    lost_scheduler.explain_loss(scheduler.address, why)
    lost_scheduler.follow(scheduler.address, none_follows)
    client = await Client(scheduler.address, asynchronous=True, set_as_default=False)
    lost = client.submit(abs, -1)
    async with asyncio.timeout(60):
        while not scheduler.tasks:
            await asyncio.sleep(0.01)
    client.scheduler_comm.comm.abort()
    await scheduler.close()
    with pytest.raises(FutureCancelledError, match="job 7 was preempted"):
        await lost.result()
    async with asyncio.timeout(60):
        while tries and client.scheduler_comm is not None:
            await asyncio.sleep(0.01)
    await client._close(fast=True)  # what `Client.close` calls in a program without an event loop
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
