"""Connections to a listener whose other side has not yet proved that it belongs to the cluster.

Everybody who reaches a port can make them, as many as he likes. So a listener

- keeps a limited number of them at a time, and gives each a limited time,
- takes few of them in one turn of the event loop, so that what the process is for goes on,
- writes a limited number of lines about them into its log, which is in the home directory of the cluster's owner.

If there are too many, the oldest of the address that has most of them is closed, and of those who come from there few
are let in and the others closed at once. So who floods a port keeps out himself, and a member from the same address
tries again. If they come from many addresses, as when a thousand workers start, they wait in the kernel in their order.
"""

from __future__ import annotations

import logging
import resource
import socket
import time
from typing import Protocol

import dask
from dask.utils import parse_timedelta
from tornado.ioloop import IOLoop
from tornado.tcpserver import TCPServer

__all__ = ["Connection", "Refusals", "Strangers", "most_at_a_time", "time_limit"]

logger = logging.getLogger("distributed.hpcgpu")

#: Connections at a time. A member of the cluster needs milliseconds to prove itself, and tries again if it is refused.
_MOST = 200
#: Seconds for which a connection is not closed for one from elsewhere, and in which it must be authenticated.
_YOUNG, _LIMIT = 0.5, 10.0
#: Connections of one address that are more than a node of a cluster begins at a time.
_FLOOD = 32
#: Connections that are let in in one turn of the event loop, as each costs about a millisecond of it; and looked at.
_LET_IN, _SEEN = 8, 256
#: Seconds until it is looked again whether there is room.
_PAUSE = 0.05
#: Lines in the log, and the seconds that they are for.
_LINES, _PERIOD = 10, 60.0


class Connection(Protocol):
    """What is counted."""

    def close(self) -> None: ...

    def closed(self) -> bool: ...


def most_at_a_time() -> int:
    """Return how many connections a listener keeps: they use at most a quarter of the file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(soft // 4, _MOST), 1)


def time_limit() -> float:
    """Return the seconds that a peer has to prove itself; peers of the cluster wait no longer for a connection."""
    return min(float(parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))), _LIMIT)


class Refusals:
    """Which refused connections are told: ten within a minute."""

    def __init__(self) -> None:
        self._until, self._lines, self._left_out = 0.0, 0, 0

    def told(self, now: float) -> int | None:
        """Return how many were not told since the last that was; None if this one is not told either.

        Parameters
        ----------
        now : float
            Seconds of a clock that does not go back.
        """
        if now >= self._until:
            self._until, self._lines = now + _PERIOD, 0
        if self._lines >= _LINES:
            self._left_out += 1
            return None
        self._lines += 1
        before, self._left_out = self._left_out, 0
        return before


class Strangers:
    """The connections of one listener that are not authenticated yet, oldest first; closed ones may be among them."""

    def __init__(self) -> None:
        #: Of each address, without the port, its connections and when they came.
        self._from: dict[str, dict[Connection, float]] = {}
        self._address: dict[Connection, str] = {}
        self._most = most_at_a_time()
        self._refusals = Refusals()

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._address

    def __len__(self) -> int:
        return len(self._address)

    def add(self, connection: Connection, address: str) -> None:
        """Keep a new connection from this address. If there are too many, one is closed."""
        if self._is_full():
            most = self._most_from()
            self.refuse(most, f"more than {self._most} at a time do not authenticate themselves")
            self._close(next(iter(self._from[most])))
        self._address[connection] = address
        self._from.setdefault(address, {})[connection] = time.monotonic()

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is authenticated, or closed."""
        address = self._address.pop(connection, None)
        if address is not None:
            del self._from[address][connection]
            if not self._from[address]:
                del self._from[address]

    def close(self) -> None:
        """Close all of them."""
        for connection in list(self._address):
            self._close(connection)

    def refuse(self, address: str, why: str) -> None:
        """Say in the log why a connection was refused, unless many were refused just now."""
        before = self._refusals.told(time.monotonic())
        if before is not None:
            more = f" ({before} more were refused since the last message)" if before else ""
            logger.warning("refused a connection from %s: %s%s", address, why, more)

    def hold_back(self, server: TCPServer) -> None:
        """Let a server that listens take few connections in one turn of the event loop."""
        for listening in server._sockets.values():
            IOLoop.current().remove_handler(listening)
            _Door(server, listening, self)

    def flooding(self) -> str | None:
        """Return the address from which too many come, if there is one."""
        most = self._most_from() if self._is_full() else None
        return most if most is not None and len(self._from[most]) > _FLOOD else None

    def wait(self, now: float) -> float:
        """Return the seconds for which all are left in the kernel, as they come from many addresses."""
        if not self._is_full() or self.flooding() is not None:
            return 0.0
        return max(next(iter(self._from[self._most_from()].values())) + _YOUNG - now, 0.0)

    def _is_full(self) -> bool:
        """Whether there are too many; those that are closed by now are forgotten first."""
        if len(self._address) < self._most:
            return False
        for closed in [connection for connection in self._address if connection.closed()]:
            self.remove(closed)
        return len(self._address) >= self._most

    def _most_from(self) -> str:
        return max(self._from, key=lambda address: len(self._from[address]))

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()


class _Door:
    """Takes the connections of a socket that listens, in the place of tornado, which takes 128 in one turn."""

    def __init__(self, server: TCPServer, listening: socket.socket, strangers: Strangers) -> None:
        self._server, self._listening, self._strangers = server, listening, strangers
        self._loop = IOLoop.current()
        self._loop.add_handler(listening, self._accept, IOLoop.READ)

    def _accept(self, listening: socket.socket, _: int) -> None:
        if wait := self._strangers.wait(time.monotonic()):
            self._loop.update_handler(listening, 0)
            self._loop.call_later(min(wait, _PAUSE), self._open)
            return
        flooding, let_in = self._strangers.flooding(), 0
        for _ in range(_SEEN):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if flooding is not None and address[0] == flooding and let_in >= _LET_IN:
                connection.close()
                self._strangers.refuse(flooding, "too many from there do not authenticate themselves")
                continue
            let_in += 1
            self._server._handle_connection(connection, address)
            if let_in >= _LET_IN and flooding is None:
                return

    def _open(self) -> None:
        if self._listening.fileno() != -1:  # the server has not stopped
            self._loop.update_handler(self._listening, IOLoop.READ)
