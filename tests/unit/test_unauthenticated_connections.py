"""Who is not of the cluster can neither use up a listener's file descriptors nor fill its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import dask
import pytest
from distributed.comm import connect, listen
from distributed.comm.utils import get_tcp_server_address
from distributed.security import Security
from tornado.netutil import bind_sockets
from tornado.tcpserver import TCPServer

from hpcgpu.fabric import authenticated_tcp, tls_connections, unauthenticated_connections
from hpcgpu.fabric.ucx_authentication import ARGUMENT
from hpcgpu.fabric.unauthenticated_connections import Refusals, Strangers, most_at_a_time, time_limit

SCHEMES = pytest.mark.parametrize("scheme", ["authenticated", "tls"])


@contextlib.asynccontextmanager
async def echo(scheme: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A listener that returns what it gets: its address, and the arguments of members."""
    authenticated_tcp.install()
    tls_connections.install()
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
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 5)
    async with echo(scheme) as (address, arguments):
        host, port = address.split("://")[1].split(":")
        before = await connect(address, **arguments)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        await converse(address, arguments)
        for reader, _ in silent[:35]:
            assert await ended(reader), "the oldest ones end soon, not after the 10 s that a peer has"
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
    assert await ended(reader), "it need not wait for the limit of 10 s"
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


@SCHEMES
async def test_who_only_tests_whether_a_port_listens_is_no_warning(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with echo(scheme) as (address, arguments):
        host, port = address.removeprefix(f"{scheme}://").split(":")
        for reset in (False, True):
            _, writer = await asyncio.open_connection(host, int(port))
            if reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                await converse(address, arguments)  # the listener waits for the handshake by now
            writer.close()
            await converse(address, arguments)
    assert not caplog.records


@SCHEMES
@pytest.mark.parametrize("sent", [b"", b"x"], ids=["nothing", "a byte"])
async def test_a_peer_that_resets_its_connection_before_it_is_accepted_leaves_no_traceback(
    scheme: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with echo(scheme) as (address, arguments):
        host, port = address.split("://")[1].split(":")
        await converse(address, arguments)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(60):  # the listener accepts none of them before the next await
            with socket.create_connection((host, int(port))) as one:
                one.sendall(sent)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await converse(address, arguments)
        async with asyncio.timeout(20):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) <= 10


def test_ten_refusals_a_minute_are_reported_and_the_others_are_counted() -> None:
    refusals = Refusals()
    assert [refusals.count(100.0) for _ in range(12)] == [0] * 10 + [None, None]
    assert refusals.count(159.0) is None
    assert [refusals.count(160.0), refusals.count(160.0)] == [3, 0]


def test_strangers_have_a_quarter_of_the_file_descriptors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((400, 100), (3, 1), (1_000_000, 200), (resource.RLIM_INFINITY, 200)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_at_a_time() == most


@pytest.mark.parametrize(("configured", "limit"), [("60s", 10.0), ("300ms", 0.3)])
def test_a_stranger_has_at_most_ten_seconds_and_no_more_than_a_peer_of_the_cluster(
    configured: str, limit: float
) -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": configured}):
        assert time_limit() == limit


class _Silent:
    """A connection whose other side sends nothing."""

    open = True

    def close(self) -> None:
        self.open = False

    def closed(self) -> bool:
        return not self.open


def test_who_floods_pushes_out_those_of_his_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 40)
    kept, elsewhere, flood = Strangers(), [_Silent() for _ in range(3)], [_Silent() for _ in range(500)]
    for member in elsewhere:
        kept.add(member, "10.0.0.1")
    assert kept.flooding() is None and kept.wait(0.0) == 0
    for stranger in flood:
        kept.add(stranger, "10.0.0.2")
    assert all(member.open for member in elsewhere), "though they are the oldest"
    assert [stranger.open for stranger in flood] == [False] * 463 + [True] * 37 and len(kept) == 40
    assert kept.flooding() == "10.0.0.2"
    kept.remove(flood[-1])
    assert kept.flooding() is None, "there is room again"


def test_a_thousand_members_that_start_from_many_nodes_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 40)
    kept, members = Strangers(), [_Silent() for _ in range(40)]
    for number, member in enumerate(members):
        kept.add(member, f"10.0.0.{number // 8}")
    now = time.monotonic()
    assert kept.flooding() is None and 0 < kept.wait(now) <= 0.5, "the others wait in the kernel, and none is closed"
    assert kept.wait(now + 0.6) == 0, "if these take long, the oldest makes room"
    kept.remove(members[0])
    assert kept.wait(now) == 0


@SCHEMES
async def test_a_flood_from_one_address_does_not_keep_members_of_another_out(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 50)
    async with echo(scheme) as (address, arguments):
        host, port = address.split("://")[1].split(":")
        over = asyncio.Event()

        async def flood() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.66", 0))
                    silent.append(writer)

        silent: list[asyncio.StreamWriter] = []
        floods = [asyncio.create_task(flood()) for _ in range(4)]
        while len(silent) < 300:
            await asyncio.sleep(0.01)
        for _ in range(3):
            comm = await connect(address, timeout=60, **arguments)
            await comm.write("from a member")
            assert await comm.read() == "from a member"
            await comm.close()
        over.set()
        await asyncio.gather(*floods)
        for writer in silent:
            writer.close()


class Ended:
    """A connection that was answered and closed."""

    def close(self) -> None: ...

    def closed(self) -> bool:
        return True


def test_connections_that_were_answered_and_closed_are_no_flood() -> None:
    asked = Strangers()
    for _ in range(most_at_a_time()):
        asked.add(Ended(), "192.0.2.1")
    assert asked.flooding() is None and asked.wait(time.monotonic()) == 0.0


async def test_in_one_turn_few_connections_of_a_flood_are_let_in_and_one_from_elsewhere_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 40)
    kept = Strangers()
    for _ in range(40):
        kept.add(_Silent(), "127.0.0.66")
    with contextlib.ExitStack() as stack:
        [acceptor] = kept.hold_back([socket.create_server(("127.0.0.1", 0))])
        stack.enter_context(acceptor)
        flood, [member] = (
            [
                stack.enter_context(socket.create_connection(acceptor.getsockname(), 20, (source, 0)))
                for _ in range(count)
            ]
            for source, count in (("127.0.0.66", 20), ("127.0.0.77", 1))
        )
        let_in = []
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, address = acceptor.accept()
                stack.enter_context(connection)
                let_in.append(address)
        assert let_in == [one.getsockname() for one in (*flood[:8], member)]
        assert [one.recv(1) for one in flood[8:]] == [b""] * 12, "they are closed"
    assert "from 127.0.0.66: too many from there do not authenticate themselves" in caplog.text


async def test_a_silent_peer_is_dropped_after_the_time_limit_by_each_listener(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    tls_connections.install()
    authenticated_tcp.install()
    arguments = {
        "tls": Security.temporary().get_listen_args("scheduler"),
        "authenticated": {ARGUMENT: bytes(32)},
    }

    async def nobody(comm: Any) -> None:
        raise AssertionError("a connection that was not admitted was handed on")

    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}):
        for scheme, named in arguments.items():
            listener = await listen(f"{scheme}://127.0.0.1:0", nobody, **named)
            host, port = listener.contact_address.removeprefix(f"{scheme}://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b"", (
                    "a listener writes before it has admitted the peer"
                )
            writer.close()
            listener.stop()
    assert "no TLS handshake within 0.2 s" in caplog.text
    assert "it did not authenticate itself within 0.2 s" in caplog.text


async def test_a_server_of_tornado_accepts_few_connections_in_one_turn_and_then_all() -> None:
    kept, turns, handled = Strangers(), list[int](), list[Any]()

    class Server(TCPServer):
        async def handle_stream(self, stream: Any, address: Any) -> None:
            if not handled:
                asyncio.get_running_loop().call_soon(lambda: turns.append(len(handled)))
            handled.append(stream)

    server = Server()
    server.add_sockets(kept.hold_back(bind_sockets(0, "127.0.0.1")))
    address = get_tcp_server_address(server)
    members = [socket.create_connection(address) for _ in range(20)]  # they wait in the kernel
    async with asyncio.timeout(60):
        while len(handled) < len(members):
            await asyncio.sleep(0.01)
    assert turns and turns[0] <= unauthenticated_connections._LET_IN, f"{turns} connections were accepted in one turn"
    for connection in (*members, *handled):
        connection.close()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
