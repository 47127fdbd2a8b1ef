"""Attacks on the listeners of a cluster, the same over each transport: whoever does not have the key gets no further
than the challenge, and nothing that he sends is unpickled.

What only one transport has is in test_authenticated.py, test_ucx_authentication.py, tests/unit/test_tls_connections.py.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import dask
import pytest
from distributed.comm import connect

from hpcgpu.fabric import authenticated_tcp, ucx_authentication
from hpcgpu.fabric.ucx_authentication import ARGUMENT, Connector, signed_address
from tests.helpers import converse_with, echo_server
from tests.local.test_listeners import Bomb, frames

pytestmark = pytest.mark.shows("Strangers are refused at every port")

KEY = bytes(range(32))
HELLO, CHALLENGE = 66, 80
converse = partial(converse_with, KEY)


class Peer(Protocol):
    """The other side of a connection, as an attacker has it."""

    async def send(self, data: bytes) -> None:
        """Send, if it is still possible."""

    async def receive(self, size: int) -> bytes:
        """Return so many bytes."""

    async def rest(self) -> bytes:
        """Wait until the other side has closed the connection; what it sent meanwhile."""

    def close(self) -> None: ...


@dataclass
class OverTCP:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), 60)

    async def rest(self) -> bytes:
        with suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), 60)
        return b""

    def close(self) -> None:
        self.writer.close()


@dataclass
class OverUCX:
    endpoint: Any

    async def send(self, data: bytes) -> None:
        with suppress(_broken()):
            await self.endpoint.send(bytearray(data))

    async def receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        await self.endpoint.recv(buffer)
        return bytes(buffer)

    async def rest(self) -> bytes:
        with suppress(_broken()):
            return await self.receive(CHALLENGE)
        return b""

    def close(self) -> None:
        self.endpoint.abort()


def _broken() -> type[Exception]:
    import ucxx.exceptions

    return ucxx.exceptions.UCXError  # type: ignore[no-any-return]


@dataclass
class Transport:
    """A scheme of addresses, and how a stranger connects and listens there."""

    scheme: str

    def place(self, address: str) -> bytes:
        """The address of a listener, as members sign it."""
        host, port = self.at(address)
        return signed_address(host, port)

    def at(self, address: str) -> tuple[str, int]:
        host, port = address.removeprefix(f"{self.scheme}://").split(":")
        return host, int(port)

    def member(self, address: str) -> Connector:
        """The challenge of a member that connects to this address, to be sent message by message."""
        key = KEY if self.scheme == "ucx" else authenticated_tcp._key({ARGUMENT: KEY}, address)
        return Connector(key, self.place(address))

    async def dial(self, address: str) -> Peer:
        if self.scheme == "ucx":
            import ucxx

            return OverUCX(await ucxx.create_endpoint(*self.at(address)))
        return OverTCP(*await asyncio.open_connection(*self.at(address)))

    @asynccontextmanager
    async def listening(self, answer: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[str]:
        """The address of a listener that is no member."""
        answers = list[asyncio.Task[None]]()

        async def accepted(*connection: Any) -> None:
            peer: Peer = OverUCX(*connection) if self.scheme == "ucx" else OverTCP(*connection)
            answers.append(answering := asyncio.ensure_future(answer(peer)))
            await asyncio.wait([answering])
            peer.close()

        if self.scheme == "ucx":
            import ucxx

            listener = ucxx.create_listener(accepted)
            port = listener.port
        else:
            listener = await asyncio.start_server(accepted, "127.0.0.1")
            port = listener.sockets[0].getsockname()[1]
        yield f"{self.scheme}://127.0.0.1:{port}"
        listener.close()
        for answering in answers:
            with suppress(*self.gone()):  # distributed tries again until its time is over, and breaks off the last try
                await asyncio.wait_for(answering, 60)

    def gone(self) -> list[type[Exception]]:
        """What is raised where the other side has closed the connection before it has sent a message."""
        return [_broken()] if self.scheme == "ucx" else [asyncio.IncompleteReadError, ConnectionError]

    def echo(self, messages: list[Any]) -> AbstractAsyncContextManager[str]:
        """A listener with the key; its address."""
        return echo_server(f"{self.scheme}://127.0.0.1", KEY, messages)


@pytest.fixture(params=["authenticated", "ucx"])
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transport:
    if request.param == "ucx":
        distributed_ucxx = pytest.importorskip("distributed_ucxx.ucxx")
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.delenv("UCX_MEMTYPE_CACHE", raising=False)  # ucxx sets it in this process
        ucx_authentication.install()
        distributed_ucxx.init_once()  # as a member does, before a stranger in this process begins UCX in another way
    else:
        authenticated_tcp.install()
    return Transport(request.param)


@pytest.fixture
def bomb(tmp_path: Path) -> Any:
    """A pickle that must not be read."""
    yield pickle.dumps(Bomb(tmp_path / "pwned"))
    assert not (tmp_path / "pwned").exists()


async def test_who_has_the_key_converses_and_no_other_does(over: Transport, caplog: pytest.LogCaptureFixture) -> None:
    async with over.echo(messages := list[Any]()) as address:
        await converse(address)
        with pytest.raises(OSError):
            await connect(address, timeout=2)
        for other in (bytes(32), KEY[:-1] + b"\1"):
            with pytest.raises(OSError, match="did not prove that it belongs to this cluster"):
                await connect(address, timeout=60, **{ARGUMENT: other})
        await converse(address.replace("127.0.0.1", "localhost"))
    assert messages == [{"x": 1}, {"x": 1}]
    assert "refused a connection from " in caplog.text
    assert KEY.hex() not in caplog.text and repr(KEY) not in caplog.text


async def test_nothing_that_a_stranger_sends_is_answered_or_unpickled(
    over: Transport, bomb: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with over.echo(messages := list[Any]()) as address:
        hello = over.member(address).hello()
        for sent in (
            *(bomb, frames(bomb) * 4, bomb[:HELLO], struct.pack("<Q", 2**62) * 10, bytes(HELLO)),
            *(os.urandom(4096), bytes(10_000_000), hello[:-1] + bomb, hello[:16] + bomb),
        ):
            peer = await over.dial(address)
            await peer.send(sent)
            assert await peer.rest() == b""
            peer.close()
        await converse(address)
    assert messages == [{"x": 1}]
    assert "the peer does not authenticate itself" in caplog.text


async def test_only_the_proof_of_a_member_on_this_connection_lets_anybody_in(
    over: Transport, bomb: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = list[bytes]()

    class Recorded(Connector):
        """What a member sends, for somebody who can read the network."""

        def respond(self, challenge: bytes) -> bytes:
            recorded.extend((self.hello(), super().respond(challenge)))
            return recorded[-1]

    async with over.echo(messages := list[Any]()) as address:
        with monkeypatch.context() as patch:
            patch.setattr(ucx_authentication, "Connector", Recorded)
            await converse(address)
        [hello, proof] = recorded
        stranger = Connector(bytes(32), over.place(address)).hello()
        other = await over.dial(address)
        await other.send(hello)
        of_other = await other.receive(CHALLENGE)
        for first, second in (
            (hello, lambda challenge: proof),  # the whole conversation once more
            (hello, lambda challenge: challenge[-32:]),  # the listener's own proof
            (hello, lambda challenge: of_other[-32:]),  # that of another connection
            (stranger, lambda challenge: bytes(32)),
            (stranger, lambda challenge: stranger[:32]),
            (hello, lambda challenge: hello),  # a message of another size
        ):
            peer = await over.dial(address)
            await peer.send(first)
            await peer.send(second(await peer.receive(CHALLENGE)))
            await peer.send(bomb)
            assert await peer.rest() == b""
            peer.close()
        peer = await over.dial(address)
        await peer.send(of_other[:HELLO])  # a challenge as the first message
        assert await peer.rest() == b""
        for one in (peer, other):
            one.close()
        await converse(address)
    assert messages == [{"x": 1}, {"x": 1}]
    assert "the peer does not have the cluster's key" in caplog.text


async def test_nobody_gets_in_by_handing_on_what_members_send(
    over: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    async with over.echo(messages := list[Any]()) as address:
        done = asyncio.Event()

        async def relay(member: Peer) -> None:
            """Hand on to the real listener what a member sends who takes this address for one of the cluster."""
            real = await over.dial(address)
            await real.send(await member.receive(HELLO))
            assert await real.rest() == b"", "not even the challenge"
            done.set()
            real.close()

        async with over.listening(relay) as between:
            with pytest.raises(OSError):
                await connect(between, timeout=3, **{ARGUMENT: KEY})
            await asyncio.wait_for(done.wait(), 60)
        await converse(address)
    assert messages == [{"x": 1}]
    assert "to an address that this process does not have: somebody may be intercepting the connection" in caplog.text


async def test_who_connects_does_not_take_what_it_is_answered_elsewhere_for_the_proof_of_this_listener(
    over: Transport,
) -> None:
    async with over.echo(messages := list[Any]()) as address:

        async def mirror(member: Peer) -> None:
            """Have the hello answered by a listener of the cluster, for which it is changed."""
            hello = await member.receive(HELLO)
            real = await over.dial(address)
            await real.send(hello[:-18] + over.place(address))
            await member.send(await real.receive(CHALLENGE))
            await member.rest()
            real.close()

        async with over.listening(mirror) as where:
            with pytest.raises(OSError, match="did not prove that it belongs to this cluster"):
                await connect(where, timeout=60, **{ARGUMENT: KEY})
    assert messages == []


async def test_an_impostor_s_listener_gets_nothing_from_who_connects(over: Transport) -> None:
    after = asyncio.get_running_loop().create_future()

    async def impostor(member: Peer) -> None:
        await member.receive(HELLO)
        await member.send(bytes(CHALLENGE))
        after.set_result(await member.rest())

    async with over.listening(impostor) as address:
        with pytest.raises(OSError, match="did not prove that it belongs to this cluster"):
            await connect(address, timeout=60, **{ARGUMENT: KEY})
        assert await asyncio.wait_for(after, 60) == b"", "until it closes the connection, it sends no more"


async def test_a_peer_that_stalls_is_disconnected_in_time(
    over: Transport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def stalls(seconds: float, sent: int) -> int:
        """Return how much a peer receives that sends so much of the first message, and then nothing."""
        monkeypatch.setattr(ucx_authentication, "TIMEOUT", seconds)
        before = caplog.text.count("refused a connection")
        with dask.config.set({"distributed.comm.timeouts.connect": f"{seconds}s"}):
            async with over.echo([]) as address:
                peer = await over.dial(address)
                if sent:
                    await peer.send(over.member(address).hello()[:sent])
                received = len(await peer.rest())
                while caplog.text.count("refused a connection") == before:
                    await asyncio.sleep(0.01)
                peer.close()
        return received

    assert [await stalls(0.3, sent) for sent in (0, 1, 20, 65)] == [0, 0, 0, 0]
    assert await stalls(5, HELLO) == CHALLENGE
    assert caplog.text.count("refused a connection") == 5


async def test_a_listener_that_stops_keeps_no_connection_that_is_not_authenticated(over: Transport) -> None:
    async with over.echo([]) as address:
        peer = await over.dial(address)
        await converse(address)  # later than that one
    assert await peer.rest() == b"", "it need not wait for the limit of 10 s"
    peer.close()
