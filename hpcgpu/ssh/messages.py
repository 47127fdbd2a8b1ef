"""Messages that arrive once and in order, over connections that break.

Each side keeps what the other has not confirmed.

This module does no input or output. `hpcgpu.ssh.streams` sends what it returns.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from dataclasses import asdict, dataclass

from hpcgpu.posix import json_records

_HEAD = struct.Struct(">cI")
_COUNT = struct.Struct(">Q")
_HELLO, _MESSAGE, _CONFIRM = b"H", b"M", b"C"
#: Most bytes of a message, and of a frame, which is a message with its head.
LONGEST = 1 << 17
#: Messages that are received before they are confirmed.
_EVERY = 32


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What each side sends first on a new connection.

    Attributes
    ----------
    epoch : str
        Names the far side's memory of this session; empty if the near side does not have it yet.
    received : int
        Messages that this side has received in that epoch.
    """

    epoch: str
    received: int

    def frame(self) -> bytes:
        """Return it as bytes to send."""
        return _frame(_HELLO, json.dumps(asdict(self)).encode())


@dataclass
class Frames:
    """Cuts what is read into frames."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the complete frames: kind and content.

        Raises
        ------
        ValueError
            It is not what the other side writes.
        """
        self._rest += data
        found, at = [], 0
        while len(self._rest) - at >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest, at)
            if kind not in (_HELLO, _MESSAGE, _CONFIRM) or length > LONGEST:
                raise ValueError("the other side of the ssh connection sends something else")
            if len(self._rest) - at - _HEAD.size < length:
                break
            begin = at + _HEAD.size
            found.append((kind, self._rest[begin : begin + length]))
            at = begin + length
        self._rest = self._rest[at:]
        return found


class Messages:
    """One side of a session: what it has sent and received, in all connections together."""

    def __init__(self) -> None:
        self._sent: deque[bytes] = deque()
        self._confirmed = 0
        self.received = 0
        self._reported = 0

    def sent(self, message: bytes) -> bytes:
        """Keep a message until the other side has it; return the frame to send, now or after the next hello."""
        frame = _frame(_MESSAGE, message)
        self._sent.append(frame)
        return frame

    def resume(self, received: int) -> list[bytes]:
        """Return the frames that the other side does not have, for a new connection.

        Raises
        ------
        ValueError
            It cannot have received so much, or so little.
        """
        self._confirm(received)
        return list(self._sent)

    def receive(self, kind: bytes, content: bytes) -> bytes | Hello | None:
        """Take a frame; return its message or greeting.

        Raises
        ------
        ValueError
            It is not what the other side writes.
        """
        if kind == _HELLO:
            return json_records.parse(content, Hello, "the greeting of the other side")
        if kind == _CONFIRM:
            self._confirm(*_COUNT.unpack(content) if len(content) == _COUNT.size else (-1,))
            return None
        self.received += 1
        return content

    def confirmation(self, *, now: bool = False) -> bytes:
        """Return the frame that confirms what was received; nothing if it can wait and is not needed `now`."""
        if self.received - self._reported < (0 if now else _EVERY):
            return b""
        self._reported = self.received
        return _frame(_CONFIRM, _COUNT.pack(self.received))

    @property
    def unreported(self) -> bool:
        """Whether something was received that is not confirmed."""
        return self.received > self._reported

    def _confirm(self, received: int) -> None:
        new = received - self._confirmed
        if not 0 <= new <= len(self._sent):
            raise ValueError("the other side confirms messages that were not sent")
        for _ in range(new):
            self._sent.popleft()
        self._confirmed = received


def _frame(kind: bytes, content: bytes) -> bytes:
    return _HEAD.pack(kind, len(content)) + content
