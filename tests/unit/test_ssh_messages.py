"""Messages between a laptop and a login node arrive once and in order, however often their connection breaks."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from hpcgpu.ssh.far_side import Beginning, Request, decode, first_line
from hpcgpu.ssh.messages import Frames, Messages
from hpcgpu.ssh.streams import Stream, Streams


class _Side:
    """One side, and the frames that are on their way to it."""

    def __init__(self) -> None:
        self.messages, self.arrived = Messages(), list[bytes]()
        self.frames, self.way = Frames(), bytearray()

    def take(self, size: int) -> None:
        data, self.way = bytes(self.way[:size]), self.way[size:]
        for kind, content in self.frames.feed(data):
            received = self.messages.receive(kind, content)
            if isinstance(received, bytes):
                self.arrived.append(received)


@pytest.mark.parametrize("seed", range(40))
def test_each_message_arrives_once_and_in_order(seed: int) -> None:
    choose, sent = random.Random(seed), list[bytes]()
    near, far = _Side(), _Side()
    for step in range(600):
        act = choose.random()
        if act < 0.4:
            sent.append(b"%d " % step + b"x" * choose.choice((0, 1, 300)))
            far.way += near.messages.sent(sent[-1])
        elif act < 0.8:
            far.take(choose.choice((1, 7, 100, 5000)))
            near.way += far.messages.confirmation(now=choose.random() < 0.2)
        elif act < 0.95:
            near.take(choose.choice((1, 50)))
        else:  # the connection breaks: what is on its way is lost, and a new one resumes
            for side in (near, far):
                side.frames, side.way = Frames(), bytearray()
            far.way += b"".join(near.messages.resume(far.messages.received))
    far.take(1 << 30)
    assert far.arrived == sent


def test_what_the_other_side_cannot_have_received_is_refused() -> None:
    messages = Messages()
    messages.sent(b"one")
    with pytest.raises(ValueError, match="confirms messages that were not sent"):
        messages.resume(2)
    with pytest.raises(ValueError, match="sends something else"):
        Frames().feed(b"Welcome to login1\n")


def test_a_greeting_of_the_account_is_not_taken_for_the_answer() -> None:
    beginning = Beginning("mine")
    assert not beginning.feed(b"Welcome\n" + first_line("another")[:30])
    assert not beginning.feed(first_line("another")[30:] + first_line("mine")[:-1])
    assert beginning.far_side is None
    assert beginning.feed(b"\noutput") == b"output"
    assert beginning.far_side is not None


def test_a_request_is_one_line_whatever_it_holds() -> None:
    request = Request(nonce="n", arguments=["".join(map(chr, range(1, 300))), "ü\n'\"\\$(x)"], config={"a": "\n"})
    python, line, rest = request.encoded("/opt/python").split(b"\n")
    assert (python, rest) == (b"/opt/python", b"")
    assert decode(line) == request


async def test_streams_go_on_over_a_new_connection() -> None:
    async def echo(stream: Stream, wanted: object) -> None:
        assert wanted == {"what": "echo"}
        while data := await stream.read():
            await stream.write(data.upper())
        stream.end()

    near, far = Streams(), Streams(echo)
    connections = list[asyncio.StreamWriter]()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await far.run(reader, writer)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def connected() -> asyncio.Task[None]:
        using = asyncio.ensure_future(near.run(*await asyncio.open_connection("127.0.0.1", port)))
        await near.connected.wait()
        return using

    using = await connected()
    stream, received = near.open({"what": "echo"}), b""
    data = bytes(random.Random(1).choices(b"abc", k=3_000_000))
    writing = asyncio.ensure_future(stream.write(data))
    while len(received) < len(data):
        received += await stream.read()
        if len(received) // 500_000 >= len(connections):  # in the middle of the data
            connections[-1].transport.abort()
            await using
            using = await connected()
    await writing
    stream.end()
    assert await stream.read() == b""
    assert received == data.upper()
    assert len(connections) > 5
    near.end_session()
    await asyncio.wait_for(far.near_side_left.wait(), 60)
    server.close()
    connections[-1].close()
    await using


async def test_what_an_old_connection_still_brings_arrives_once() -> None:
    async def echo(stream: Stream, wanted: object) -> None:
        while data := await stream.read():
            await stream.write(data)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await far.run(reader, writer)
        ended.set()

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, way = await asyncio.open_connection("127.0.0.1", far_port)
        ways.append(way)
        returning = asyncio.ensure_future(carried(back, writer))
        while (data := await reader.read(1 << 16)) and not holds.is_set():
            way.write(data)
        late.extend(data)
        returning.cancel()
        writer.transport.abort()  # the laptop notices that this connection is broken, and the login node does not

    async def carried(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    near, far, late, ways = Streams(), Streams(echo), bytearray(), list[asyncio.StreamWriter]()
    ended, holds = asyncio.Event(), asyncio.Event()
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in (accepted, passed_on)]
    far_port, port = (server.sockets[0].getsockname()[1] for server in servers)
    using = asyncio.ensure_future(near.run(*await asyncio.open_connection("127.0.0.1", port)))
    await near.connected.wait()
    stream = near.open({})
    await stream.write(b"1")
    assert await stream.read() == b"1"
    holds.set()
    await stream.write(b"2")
    await using
    holds.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    using = asyncio.ensure_future(near.run(reader, writer))
    assert await asyncio.wait_for(stream.read(), 60) == b"2"
    ways[0].write(bytes(late))
    ways[0].write_eof()
    await asyncio.wait_for(ended.wait(), 60)
    await stream.write(b"3")
    assert await asyncio.wait_for(stream.read(), 60) == b"3"
    writer.close()
    await using
    for one in (*ways, *servers):
        one.close()


async def test_a_far_side_without_memory_closes_the_streams() -> None:
    async def silent(stream: Stream, wanted: object) -> None:
        await stream.read()

    near, fars = Streams(), [Streams(silent), Streams(silent)]
    served = list[asyncio.StreamWriter]()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        await fars[len(served) - 1].run(reader, writer)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    using = asyncio.ensure_future(near.run(*await asyncio.open_connection("127.0.0.1", port)))
    await near.connected.wait()
    stream = near.open({})
    served[0].transport.abort()
    await using
    using = asyncio.ensure_future(near.run(*await asyncio.open_connection("127.0.0.1", port)))
    assert await asyncio.wait_for(stream.read(), 60) == b""
    assert "may have been restarted" in stream.reason
    with pytest.raises(ConnectionResetError, match="may have been restarted"):
        await stream.write(b"x")
    server.close()
    served[1].close()
    await using


#: A relay whose clock goes on by the hours that it reads.
_RELAY = """
import asyncio, sys, threading
from pathlib import Path
from hpcgpu.ssh.relay import relay

class Loop(asyncio.SelectorEventLoop):
    seconds = 0.0

    def time(self):
        return super().time() + self.seconds

    def go_on(self, hours):
        self.seconds += 3600 * hours

def read():
    for line in sys.stdin:
        loop.call_soon_threadsafe(loop.go_on, float(line))

loop = Loop()
threading.Thread(target=read, daemon=True).start()
loop.run_until_complete(relay(Path(sys.argv[1]), 12 * 3600.0))
"""


async def test_a_relay_lives_as_long_as_the_laptop_is_connected_and_ends_if_it_stays_away(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(100):
                writer.write(data)
        over.set()

    over = asyncio.Event()
    path = tmp_path / "relay" / "socket"
    path.parent.mkdir()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    command = [sys.executable, "-P", "-c", _RELAY, str(path)]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    with ExitStack() as ends:
        ends.enter_context(relay)
        ends.callback(relay.kill)
        assert relay.stdin is not None and relay.stdout is not None and relay.stdout.readline() == b"ready\n"
        near = Streams()
        reader, writer = await asyncio.open_unix_connection(path)
        using = asyncio.ensure_future(near.run(reader, writer))
        stream = near.open({"connect": list(server.sockets[0].getsockname())})
        for hours in (0, 13, 13, 13):
            relay.stdin.write(b"%d\n" % hours)
            await stream.write(b"x")
            assert await asyncio.wait_for(stream.read(), 60) == b"x", "the connections of a long session go on"
        writer.close()
        await using

        def is_over() -> bool:
            assert relay.stdin is not None
            with suppress(BrokenPipeError):
                relay.stdin.write(b"13\n")
            return relay.poll() is not None

        until(is_over, "it ends")
        assert not path.parent.exists()
    await asyncio.wait_for(over.wait(), 60)
    server.close()
