"""What `hpcgpu.fabric` relies on in distributed's connections, in CPython's ssl, in tornado and in distributed-ucxx."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from canary import canary
from distributed import Client, Future, Scheduler, Worker
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError, connect, listen, tcp
from distributed.comm.registry import backends
from distributed.security import Security

import hpcgpu
from hpcgpu.client import futures_to_replay, lost_scheduler
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.fabric import (
    tls_connections,
    ucx_authentication,
    ucx_endpoints,
    ucx_memory,
)

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
    tls_connections.install()
    security = Security.temporary()
    ends = connection(
        "tls://127.0.0.1:0", security.get_listen_args("scheduler"), security.get_connection_args("client")
    )
    async with ends as (here, there):
        for side, comm in (("connects", here), ("listens", there)):
            assert type(comm.stream.socket) is tls_connections.Socket, f"who {side} has a {type(comm.stream.socket)}"
        await there.write("both ways")
        assert await asyncio.wait_for(here.read(), TIMEOUT) == "both ways"


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
    reading = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="node")
    with contextlib.suppress(ssl.SSLError):
        reading.write(b"")
    new()
    set_error(2, errno.EPIPE, None)
    assert peek() != 0
    tls_connections.clear_errors()
    assert peek() == 0, "a handshake that waits leaves OpenSSL's error queue as it is: SSLObject.do_handshake"


@pytest.fixture
def ucx() -> None:
    pytest.importorskip("distributed_ucxx")
    ucx_authentication.install()


@canary
async def test_ucx_connections_are_authenticated_before_distributed_reads(
    ucx: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own = {ucx_authentication.ARGUMENT: KEY}
    async with connection("ucx://127.0.0.1", own, own) as (here, there):
        await here.write("one of us")
        assert await asyncio.wait_for(there.read(), TIMEOUT) == "one of us"
        found = ucx_endpoints.query(there.ep)
        assert found.peer.startswith("127.0.0.1:") and found.transports, f"UCX describes UCXX.ep as {found}"
    foreign = {ucx_authentication.ARGUMENT: bytes(32)}
    with pytest.raises(OSError):
        async with connection("ucx://127.0.0.1", own, {**foreign, "timeout": 5}):
            raise AssertionError(
                "a connection with another key was accepted: on_connection is not called, or connection_args has no key"
            )


@canary
async def test_ucx_connections_exchange_tags_by_the_function_that_hpcgpu_replaces(
    ucx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {ucx_authentication.ARGUMENT: KEY}
    async with connection("ucx://127.0.0.1", own, own):  # imports ucxx, and replaces the function
        pass
    from ucxx._lib_async import application_context, listener

    sides = []
    for module in (application_context, listener):
        replaced = module.exchange_peer_info
        assert replaced.__module__ == ucx_memory.__name__

        async def recorded(*arguments: Any, replaced: Any = replaced, **named: Any) -> Any:
            sides.append(named["listener"])
            return await replaced(*arguments, **named)

        monkeypatch.setattr(module, "exchange_peer_info", recorded)
    async with connection("ucx://127.0.0.1", own, own):
        pass
    assert sorted(sides) == [False, True], "exchange_peer_info is not called on both sides, with `listener`"


@canary
async def test_a_client_whose_scheduler_closes_waits_until_hpcgpu_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(**_: Any) -> None:
        client.scheduler_comm.comm.abort()
        raise CommClosedError("Stream is closed")

    for name in ("_reconnect", "_handle_report", "_gather_remote"):  # put back at the end
        monkeypatch.setattr(Client, name, getattr(Client, name))

    async def why() -> str:
        return "job 7 was preempted"

    async def waiting() -> tuple[Client, Scheduler, asyncio.Future[Any]]:
        scheduler = await Scheduler(port=0, host="127.0.0.1", dashboard=False)
        lost_scheduler.explain_loss(scheduler.address, why)
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
        # below what hpcgpu replaces, because an earlier test of this process may have let it do so
        monkeypatch.setattr(client.scheduler, "gather", breaks, raising=False)
        with pytest.raises(FutureCancelledError, match=r"a result cancelled for reason: the scheduler is gone.\njob 7"):
            await asyncio.wait_for(client.gather(Future("sent", client)), TIMEOUT)
    results.cancel()
    await client._close(fast=True)
    await scheduler.close()


@canary
async def test_a_client_goes_on_with_another_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_reconnect", "_handle_report", "_gather_remote"):  # put back at the end
        monkeypatch.setattr(Client, name, getattr(Client, name))
    follows = asyncio.Event()

    async def why() -> str:
        return "job 7 was preempted"

    async def next_address() -> str:
        await follows.wait()
        return str(second.address)

    first = await Scheduler(port=0, host="127.0.0.1", dashboard=False)
    lost_scheduler.explain_loss(first.address, why)
    lost_scheduler.follow(first.address, next_address)
    async with (
        Scheduler(port=0, host="127.0.0.1", dashboard=False) as second,
        Client(first.address, asynchronous=True, set_as_default=False) as client,
    ):
        lost = client.submit(abs, -1)
        client.scheduler_comm.comm.abort()
        with pytest.raises(FutureCancelledError, match="job 7 was preempted"):
            await asyncio.wait_for(lost.result(), TIMEOUT)
        early = client.submit(abs, -2)
        follows.set()
        async with Worker(second.address, nthreads=1, dashboard=False):
            assert await asyncio.wait_for(early.result(), TIMEOUT) == 2, "what was submitted meanwhile"
            assert await asyncio.wait_for(client.submit(abs, -3).result(), TIMEOUT) == 3
            assert (await client.scheduler.identity())["address"] == second.address
    await first.close()


REPLACED = (
    *("_reconnect", "_handle_report", "_gather_remote"),
    *("_send_to_scheduler", "_send_to_scheduler_safe", "submit", "map"),
)


async def address_after(event: asyncio.Event, of: list[Scheduler]) -> str:
    await event.wait()
    return str(of[0].address)


@canary
async def test_what_a_client_holds_is_submitted_again_to_another_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REPLACED:  # put back at the end
        monkeypatch.setattr(Client, name, getattr(Client, name))
    follows, following = asyncio.Event(), list[Scheduler]()

    async def breaks(**_: Any) -> None:
        client.scheduler_comm.comm.abort()
        raise CommClosedError("Stream is closed")

    first = await Scheduler(port=0, host="127.0.0.1", dashboard=False)
    lost_scheduler.explain_loss(first.address, lambda: address_after(follows, following))
    lost_scheduler.follow(first.address, lambda: address_after(follows, following))
    async with (
        Scheduler(port=0, host="127.0.0.1", dashboard=False) as second,
        Client(first.address, asynchronous=True, set_as_default=False) as client,
    ):
        following.append(second)
        Extension(second, None)  # its RPCs
        with futures_to_replay.keep(lambda one: one is client):
            async with Worker(first.address, nthreads=1, dashboard=False):
                array = np.arange(1000)
                released, total = client.map(abs, [-1, -2]), client.submit(np.sum, array)
                depends, both = client.submit(sum, released), client.submit(sum, [total, 1], priority=3, retries=2)
                del released
                assert await client.gather([depends, both]) == [3, 499501]
                array[:] = 0
                with pytest.warns(hpcgpu.ClusterWarning, match="with pure=False do not run again"):
                    impure = client.submit(abs, -3, pure=False)
                # below what hpcgpu replaces, because an earlier test of this process may have let it do so
                monkeypatch.setattr(client.scheduler, "gather", breaks, raising=False)
                fetching = asyncio.ensure_future(client.gather([depends, both]))
                while client.status == "running":
                    await asyncio.sleep(0.01)
                later = client.submit(sum, [depends, both])
                follows.set()
            async with Worker(second.address, nthreads=1, dashboard=False):
                assert await asyncio.wait_for(fetching, TIMEOUT) == [3, 499501], "as it was submitted"
                assert await asyncio.wait_for(later.result(), TIMEOUT) == 499504
                with pytest.raises(FutureCancelledError, match="it was submitted with pure=False"):
                    await asyncio.wait_for(impure.result(), TIMEOUT)
                assert second.tasks[both.key].annotations == {"priority": 3, "retries": 2}
                held = {key for key, task in second.tasks.items() if task.who_wants}
                assert held == {depends.key, both.key, later.key, total.key}, "all else is released"
            del total, later, depends, both
            while len(futures_to_replay.of(client)._calls) > 1:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        assert futures_to_replay.of(client) is None
    await first.close()
