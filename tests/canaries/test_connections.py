"""What `hpcgpu.fabric` relies on in distributed's connections, in CPython's ssl, in tornado and in distributed-ucxx."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import dask
import pytest
from canary import canary
from distributed import Client, Future, Scheduler, Worker
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError, connect, listen, tcp
from distributed.comm.registry import backends
from distributed.security import Security
from tornado.tcpserver import TCPServer

from hpcgpu.fabric import authentication, endpoints, links, strangers, tls
from hpcgpu.remote import lost

TIMEOUT = 60.0
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """distributed's own transports are put back."""
    before = dict(backends)
    yield
    backends.clear()
    backends.update(before)


@asynccontextmanager
async def connection(
    address: str, listening: dict[str, Any], connecting: dict[str, Any]
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield both ends of a connection of distributed."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def serve(comm: Any) -> None:
        accepted.set_result(comm)

    listener = await listen(address, serve, **listening)
    try:
        comm = await connect(listener.contact_address, **connecting)
        other = await asyncio.wait_for(accepted, TIMEOUT)
        try:
            yield comm, other
        finally:
            comm.abort()
            other.abort()
    finally:
        listener.stop()


@canary
async def test_both_ends_of_a_tls_connection_have_the_socket_of_hpcgpu() -> None:
    assert isinstance(backends["tls"], tcp.TLSBackend)
    tls.install()
    security = Security.temporary()
    ends = connection(
        "tls://127.0.0.1:0", security.get_listen_args("scheduler"), security.get_connection_args("client")
    )
    async with ends as (here, there):
        for side, comm, caller in (("connects", here, "_get_connect_args"), ("listens", there, "_get_server_args")):
            assert type(comm.stream.socket) is tls.Socket, (
                f"who {side} has a {type(comm.stream.socket)}: {caller} is not asked"
            )
        assert isinstance(here, tls.TLS) and here._context is here.stream.socket.context, "_read_extra is not called"
        await there.write("both ways")
        assert await asyncio.wait_for(here.read(), TIMEOUT) == "both ways"


@canary
async def test_who_connects_and_says_nothing_is_dropped_by_the_method_that_hpcgpu_overrides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    tls.install()
    security = Security.temporary()

    async def nobody(comm: Any) -> None:
        raise AssertionError("a connection without a handshake was handed on")

    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}):
        listener = await listen("tls://127.0.0.1:0", nobody, **security.get_listen_args("scheduler"))
        host, port = listener.contact_address.removeprefix("tls://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), TIMEOUT) == b"", "_prepare_stream does not end it"
        writer.close()
        listener.stop()
    assert "no TLS handshake within 0.2 s" in caplog.text


@canary
async def test_a_server_takes_its_connections_from_the_sockets_that_hpcgpu_takes_them_from() -> None:
    handled: list[str] = []

    class Server(TCPServer):
        async def handle_stream(self, stream: Any, address: Any) -> None:
            handled.append(address[0])
            stream.close()

    server = Server()
    server.listen(0, "127.0.0.1")
    (listening,) = server._sockets.values()
    strangers.Strangers().hold_back(server)
    for _ in range(2):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), TIMEOUT) == b""
        writer.close()
    assert handled == ["127.0.0.1"] * 2, "_handle_connection does not hand a connection on to handle_stream"
    server.stop()
    assert listening.fileno() == -1


@canary
async def test_a_tcp_listener_reads_nothing_before_the_method_that_hpcgpu_overrides() -> None:
    seen: list[str] = []

    class Listener(tcp.TCPListener):  # type: ignore[misc]
        async def _prepare_stream(self, stream: Any, address: str) -> Any:
            seen.append(bytes(await stream.read_bytes(5)).decode())
            stream.close()

    class Backend(tcp.TCPBackend):  # type: ignore[misc]
        _listener_class = Listener

    async def nobody(comm: Any) -> None:
        raise AssertionError("a connection that was refused was handed on")

    backends["tcp"] = Backend()
    listener = await listen("tcp://127.0.0.1:0", nobody)
    host, port = listener.contact_address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"first")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), TIMEOUT) == b"", (
            "a listener writes before _prepare_stream has ended"
        )
    writer.close()
    listener.stop()
    assert seen == ["first"], "_prepare_stream of a TCP listener is not called first"


@canary
async def test_each_tcp_connection_and_listener_is_checked_before_it_is_made() -> None:
    checked: list[str] = []

    class Refuses:
        def _check_encryption(self, address: str, connection_args: dict[str, Any]) -> None:
            checked.append(type(self).__name__)
            raise RuntimeError("refused")

    class Connector(Refuses, tcp.TCPConnector):  # type: ignore[misc]
        pass

    class Listener(Refuses, tcp.TCPListener):  # type: ignore[misc]
        pass

    class Backend(tcp.TCPBackend):  # type: ignore[misc]
        _connector_class = Connector
        _listener_class = Listener

    backends["tcp"] = Backend()
    with pytest.raises(RuntimeError, match="refused"):
        await connect("tcp://127.0.0.1:9", timeout=TIMEOUT)
    with pytest.raises(RuntimeError, match="refused"):
        await listen("tcp://127.0.0.1", None)
    assert checked == ["Connector", "Listener"], "_check_encryption is not called for plain TCP"


@canary
def test_cpython_leaves_errors_of_other_connections_and_a_handshake_clears_them() -> None:
    import _ssl
    import ctypes
    import errno
    import ssl

    try:
        library = ctypes.PyDLL(_ssl.__file__)
        new, set_error, peek = library.ERR_new, library.ERR_set_error, library.ERR_peek_error
    except (AttributeError, OSError):
        pytest.skip("this Python hides OpenSSL's functions: no entry can be made on purpose")
    peek.restype = ctypes.c_ulong
    new()
    set_error(2, errno.EPIPE, None)  # ERR_LIB_SYS
    reading = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO())
    with contextlib.suppress(ssl.SSLError):
        reading.write(b"")
    new()
    set_error(2, errno.EPIPE, None)
    assert peek() != 0
    tls.clear_errors()
    assert peek() == 0, "a handshake that waits leaves OpenSSL's error queue as it is: SSLObject.do_handshake"


@canary
async def test_a_worker_can_be_asked_for_its_connections() -> None:
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(host="127.0.0.1", port=0, dashboard=False))
        one = await stack.enter_async_context(Worker(scheduler.address, nthreads=1, name="one", dashboard=False))
        two = await stack.enter_async_context(Worker(scheduler.address, nthreads=1, name="two", dashboard=False))
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True, set_as_default=False))
        told = (await client.run(links.describe, peers=[two.address], workers=[one.address]))[one.address]
        assert told["transports"] == {two.address: ["tcp/lo"]} and not told["errors"], told
        await client.run(links.receive, workers=[two.address])
        speed = (await client.run(links.measure, peer=two.address, sizes=[1000], device=False, workers=[one.address]))[
            one.address
        ]
        assert speed.get("latency", 0) > 0 and "error" not in speed, speed


@pytest.fixture
def ucx() -> None:
    pytest.importorskip("distributed_ucxx")
    authentication.install()


@canary
async def test_ucx_connections_are_authenticated_before_distributed_reads(
    ucx: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own = {authentication.ARGUMENT: KEY}
    async with connection("ucx://127.0.0.1", own, own) as (here, there):
        await here.write("one of us")
        assert await asyncio.wait_for(there.read(), TIMEOUT) == "one of us"
    foreign = {authentication.ARGUMENT: bytes(32)}
    with pytest.raises(OSError):
        async with connection("ucx://127.0.0.1", own, {**foreign, "timeout": 5}):
            raise AssertionError(
                "a connection with another key was accepted: on_connection is not called, or connection_args has no key"
            )


@canary
async def test_ucx_names_the_peer_and_the_transports_of_a_connection(ucx: None) -> None:
    own = {authentication.ARGUMENT: KEY}
    async with connection("ucx://127.0.0.1", own, own) as (_, there):
        told = endpoints.query(there.ep)
        assert told.peer.startswith("127.0.0.1:"), f"ucp_ep_query by Endpoint._ep.handle says {told}"
        assert told.transports, "ucp_ep_query names no transports"
    code = "import os, ucxx; print('transports', *ucxx.get_active_transports(), flush=True); os._exit(0)"
    said = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert any(line.startswith("transports ") for line in said.stdout.splitlines()), (
        f"get_active_transports: {said.stderr[-500:]}"
    )


@canary
async def test_a_client_whose_scheduler_closes_waits_until_hpcgpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(client: Client, *arguments: Any) -> None:
        assert client._gather_keys == {"sent"}, "_gather_keys does not have the results that are fetched"
        client.scheduler_comm.comm.abort()
        raise CommClosedError("Stream is closed")

    for name in ("_reconnect", "_handle_report"):  # put back at the end
        monkeypatch.setattr(Client, name, getattr(Client, name))
    monkeypatch.setattr(Client, "_gather_remote", breaks)

    async def why() -> str:
        return "job 7 was preempted"

    async def waiting() -> tuple[Client, Scheduler, asyncio.Future[Any]]:
        scheduler = await Scheduler(port=0, host="127.0.0.1", dashboard=False)
        lost.ask(scheduler.address, why)
        client = await Client(scheduler.address, asynchronous=True, set_as_default=False)
        return client, scheduler, asyncio.ensure_future(client.gather([client.submit(abs, -1)]))  # there is no worker

    for ends in ("the scheduler closes", "the connection breaks"):
        client, scheduler, results = await waiting()
        if ends == "the scheduler closes":
            await scheduler.close()
        else:
            client.scheduler_comm.comm.abort()
        with pytest.raises(FutureCancelledError, match=r"for reason: the scheduler is gone.\njob 7 was preempted"):
            await asyncio.wait_for(results, TIMEOUT)
        await client._close(fast=True)
        await scheduler.close()
    client, scheduler, results = await waiting()
    async with Worker(scheduler.address, nthreads=1, dashboard=False):
        await client.scatter({"sent": 1})
        with pytest.raises(FutureCancelledError, match=r"sent cancelled for reason: the scheduler is gone.\njob 7"):
            await asyncio.wait_for(client.gather(Future("sent", client)), TIMEOUT)
    results.cancel()
    await client._close(fast=True)
    await scheduler.close()
