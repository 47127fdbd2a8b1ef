"""Many streams of bytes over one session of `hpcgpu.ssh.messages`, on both sides.

A stream goes on when its ssh connection breaks and another one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from hpcgpu.ssh.messages import Frames, Hello, Messages

_HEAD = struct.Struct(">cI")
_GRANT = struct.Struct(">I")
_OPEN, _DATA, _END, _CLOSE, _MORE, _BYE = b"O", b"D", b"E", b"C", b"W", b"B"
#: Bytes that a stream may have on the way: with less, the delay of the link limits it. ssh itself allows 2 MiB.
_WINDOW = 1 << 23
_PIECE = 1 << 16
#: Seconds between two signs of life.
SIGN_OF_LIFE = 15
#: Seconds that a write waits for room in the window. Then it sends a piece without room, also while the connection is
#: broken: Dask's sockets fail if this side reads nothing from them for half a minute (TCP_USER_TIMEOUT).
_WAIT_FOR_ROOM = 2.0


class Stream:
    """One stream of bytes in both directions."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self.number = streams, number
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._window, self._room = _WINDOW, asyncio.Event()
        self._consumed = 0
        self.closed = False
        self.reason = ""

    async def read(self) -> bytes:
        """Return what has arrived; empty at its end."""
        if self.closed and self._arrived.empty():
            return b""
        data = await self._arrived.get()
        self._consumed += len(data)
        if self._consumed >= _WINDOW // 4 and not self.closed:
            self._streams.send(_MORE, self.number, _GRANT.pack(self._consumed))
            self._consumed = 0
        return data

    async def write(self, data: bytes) -> None:
        """Send; wait while the other side does not read, but not for ever.

        Raises
        ------
        ConnectionError
            The stream is closed.
        """
        while data:
            if self._window <= 0 and not self.closed:
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WAIT_FOR_ROOM):
                        await self._room.wait()
            if self.closed:
                raise ConnectionResetError(self.reason or "the stream is closed")
            piece, data = data[:_PIECE], data[_PIECE:]
            self._window -= len(piece)
            self._streams.send(_DATA, self.number, piece)

    def end(self) -> None:
        """Send that nothing more comes."""
        if not self.closed:
            self._streams.send(_END, self.number)

    def close(self, reason: str = "") -> None:
        """Close it in both directions."""
        if not self.closed:
            self._streams.send(_CLOSE, self.number, reason.encode())
            self._mark_closed(reason)

    def _mark_closed(self, reason: str) -> None:
        self.closed, self.reason = True, reason
        self._streams.remove(self.number)
        self._arrived.put_nowait(b"")
        self._room.set()

    def receive(self, kind: bytes, content: bytes) -> None:
        """Take a message of the other side."""
        if kind == _MORE:
            self._window += _GRANT.unpack(content)[0]
            self._room.set()
        elif kind == _CLOSE:
            self._mark_closed(content.decode(errors="replace"))
        else:
            self._arrived.put_nowait(content)  # empty at the end

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a local connection, until both directions have ended."""

        async def send() -> None:
            while data := await reader.read(_PIECE):
                await self.write(data)
            self.end()

        async def receive() -> None:
            while data := await self.read():
                writer.write(data)
                await writer.drain()
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

        tasks = [asyncio.ensure_future(send()), asyncio.ensure_future(receive())]
        reason = ""
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            reason = next((str(task.exception()) for task in done if task.exception() is not None), "")
        finally:
            for task in tasks:
                task.cancel()
            self.close(reason)
            writer.close()


class Streams:
    """One side of a session.

    Parameters
    ----------
    opened : callable, optional
        On the far side: is awaited for each stream that the near side opens, with what it wants.
    """

    def __init__(self, opened: Callable[[Stream, Any], Awaitable[None]] | None = None) -> None:
        self._opened = opened
        self._epoch = secrets.token_hex(8) if opened is not None else ""
        self._messages = Messages()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._current: asyncio.StreamWriter | None = None
        #: The same, once both sides have greeted.
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = set[asyncio.Task[None]]()
        #: Set when the near side has left for good.
        self.near_side_left = asyncio.Event()
        #: The time of the loop at which the last frame came.
        self.last_received = 0.0
        #: Set while there is a connection.
        self.connected = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether there was a connection already."""
        return self._epoch != ""

    def open(self, wanted: Any) -> Stream:
        """Open a stream; `wanted` is what it leads to there."""
        stream = Stream(self, next(self._numbers))
        self._streams[stream.number] = stream
        self.send(_OPEN, stream.number, json.dumps(wanted).encode())
        return stream

    def end_session(self) -> None:
        """End this session for good: the far side forgets it."""
        self.send(_BYE, 0)

    def send(self, kind: bytes, number: int, content: bytes = b"") -> None:
        """Send a message of a stream, now or on the next connection."""
        frame = self._messages.sent(_HEAD.pack(kind, number) + content)
        if self._writer is not None:
            self._writer.write(frame)

    def remove(self, number: int) -> None:
        """Forget a stream that is closed."""
        self._streams.pop(number, None)

    def reset(self, reason: str) -> None:
        """Close all streams: the far side has forgotten them."""
        for stream in list(self._streams.values()):
            stream.receive(_CLOSE, reason.encode())
        self._messages = Messages()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use a connection until it breaks. The streams stay.

        Raises
        ------
        ValueError
            The other side is no hpcgpu.
        """
        loop, frames = asyncio.get_running_loop(), Frames()
        self._current, self._writer = writer, None
        self.last_received = loop.time()
        signs = asyncio.ensure_future(self._signs_of_life(writer))
        writer.write(Hello(epoch=self._epoch, received=self._messages.received).frame())
        try:
            while data := await reader.read(_PIECE):
                self.last_received = loop.time()
                for kind, content in frames.feed(data):
                    if self._current is not writer:  # what it still brings, the new connection brings again
                        return
                    received = self._messages.receive(kind, content)
                    if isinstance(received, Hello):
                        self._greet(received, writer)
                    elif received is not None:
                        self._receive(received)
                if self._writer is writer and (confirmation := self._messages.confirmation()):
                    writer.write(confirmation)
                await writer.drain()
        except OSError:
            pass
        finally:
            signs.cancel()
            if self._writer is writer:
                self._writer = None
                self.connected.clear()
            writer.close()

    def _greet(self, other: Hello, writer: asyncio.StreamWriter) -> None:
        """Resume the session, or begin it."""
        if self._opened is None and other.epoch != self._epoch:  # the near side: the far side has no memory of us
            if self._epoch:
                self.reset("the login node has lost this connection: it may have been restarted")
            self._epoch = other.epoch
            writer.write(Hello(epoch=self._epoch, received=0).frame())
            other = Hello(epoch=self._epoch, received=0)
        if other.epoch != self._epoch:
            return  # the far side: the near side greets again, once it has our epoch
        for frame in self._messages.resume(other.received):
            writer.write(frame)
        self._writer = writer
        self.connected.set()

    def _receive(self, message: bytes) -> None:
        kind, number = _HEAD.unpack_from(message)
        content = message[_HEAD.size :]
        if kind == _BYE:
            self.near_side_left.set()
        elif kind == _OPEN and self._opened is not None:
            stream = self._streams[number] = Stream(self, number)
            task = asyncio.ensure_future(self._serve(stream, json.loads(content)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (known := self._streams.get(number)) is not None:
            known.receive(kind, content)

    async def _serve(self, stream: Stream, wanted: Any) -> None:
        assert self._opened is not None
        try:
            await self._opened(stream, wanted)
        except (OSError, ValueError, TypeError, KeyError) as error:
            stream.close(str(error) or type(error).__name__)
        finally:
            stream.close()

    async def _signs_of_life(self, writer: asyncio.StreamWriter) -> None:
        for second in itertools.count(1):
            await asyncio.sleep(1)
            if self._writer is writer:
                writer.write(self._messages.confirmation(now=second % SIGN_OF_LIFE == 0 or self._messages.unreported))
