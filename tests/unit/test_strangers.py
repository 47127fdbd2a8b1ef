"""Who is not of the cluster can neither use up a listener's file descriptors nor fill its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest
from distributed.comm import connect, listen
from distributed.security import Security

from hpcgpu.fabric import authenticated_tcp, strangers, tls
from hpcgpu.fabric.authentication import ARGUMENT
from hpcgpu.fabric.strangers import Refusals, most_at_a_time

SCHEMES = pytest.mark.parametrize("scheme", ["authenticated", "tls"])


@contextlib.asynccontextmanager
async def echo(scheme: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A listener that returns what it gets: its address, and the arguments of members."""
    authenticated_tcp.install()
    tls.install()
    security = Security.temporary()
    key: dict[str, Any] = {ARGUMENT: bytes(32)}
    here, there = (
        (key, key)
        if scheme == "authenticated"
        else (security.get_connection_args("client"), security.get_listen_args("scheduler"))
    )

    async def handle(comm: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                await comm.write(await comm.read())

    async with listen(f"{scheme}://127.0.0.1", handle, **there) as listener:
        yield listener.contact_address, here


async def converse(address: str, arguments: dict[str, Any]) -> None:
    comm = await connect(address, **arguments)
    await comm.write("from a member")
    assert await comm.read() == "from a member"
    await comm.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 20) == b""
    return True


@SCHEMES
async def test_who_connects_without_end_pushes_out_himself_and_no_member(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strangers, "_MOST", 5)
    async with echo(scheme) as (address, arguments):
        host, port = address.split("://")[1].split(":")
        before = await connect(address, **arguments)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        await converse(address, arguments)
        for reader, _ in silent[:35]:
            assert await ended(reader), "the oldest ones end at once, not after the 30 s that a peer has"
        await before.write("was there before")
        assert await before.read() == "was there before"
        await before.close()
        for _, writer in silent:
            writer.close()
    told = [record.getMessage() for record in caplog.records if "refused a connection" in record.getMessage()]
    assert 1 <= len(told) <= 10 and "more than 5 at a time do not authenticate themselves" in told[0]


@SCHEMES
async def test_a_listener_that_stops_closes_the_connections_of_strangers(scheme: str) -> None:
    async with echo(scheme) as (address, arguments):
        host, port = address.split("://")[1].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await converse(address, arguments)
    assert await ended(reader), "it need not wait for the limit of 30 s"
    writer.close()


@SCHEMES
async def test_a_stranger_does_not_fill_the_log(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with echo(scheme) as (address, arguments):
        host, port = address.split("://")[1].split(":")
        for _ in range(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\n".ljust(66))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
            writer.close()
        await converse(address, arguments)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 10 and all("refused a connection from " in line for line in told)


def test_ten_refusals_a_minute_are_told_and_the_others_are_counted() -> None:
    refusals = Refusals()
    assert [refusals.told(100.0) for _ in range(12)] == [0] * 10 + [None, None]
    assert refusals.told(159.0) is None
    assert [refusals.told(160.0), refusals.told(160.0)] == [3, 0]


def test_strangers_have_a_quarter_of_the_file_descriptors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 256), (3, 1), (1_000_000, 2000), (resource.RLIM_INFINITY, 2000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_at_a_time() == most
