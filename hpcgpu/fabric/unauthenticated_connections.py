"""Connections to a listener whose other side has not yet proved that it belongs to the cluster.

Anybody who reaches a port can open any number of such connections. So a listener

- keeps a limited number of them at a time, and gives each a limited time,
- accepts few of them in one turn of the event loop, so that the process goes on with its own work,
- writes a limited number of lines about them into its log, which is in the home directory of the cluster's owner.

If there are too many, the listener closes the oldest connection of the address that has most. It accepts few new
connections from that address and closes the others at once. So an address that floods a port shuts out only itself, and
a member of the cluster at the same address tries again. If the connections come from many addresses, as when a thousand
workers start, they wait in the kernel in their order.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from typing import Any, Protocol

import dask
from dask.utils import parse_timedelta
from tornado.ioloop import IOLoop

logger = logging.getLogger("distributed.hpcgpu")

#: Most connections at a time. A member of the cluster authenticates itself in milliseconds, and retries if refused.
_MOST = 200
#: Seconds for which a new connection is kept even if others wait; seconds that it has to authenticate itself.
_YOUNG, _LIMIT = 0.5, 10.0
#: Connections from one address: a node of a cluster begins no more than these at a time.
_FLOOD = 32
#: Connections in one turn of the event loop: those that are let in, at about a millisecond each, and all accepted ones.
_LET_IN, _SEEN = 8, 256
#: Most seconds until connections are accepted again.
_PAUSE = 0.05
#: Most lines in the log within a period, and the seconds of that period.
_LINES, _PERIOD = 10, 60.0


class Connection(Protocol):
    """A connection that `Strangers` counts."""

    def close(self) -> None: ...

    def closed(self) -> bool: ...


def most_at_a_time() -> int:
    """Return how many connections a listener keeps: they use at most a quarter of the file descriptors."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(soft // 4, _MOST), 1)


def time_limit() -> float:
    """Return the seconds that a peer has to authenticate itself; the cluster's peers wait no longer to connect."""
    return min(float(parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))), _LIMIT)


class Refusals:
    """Logs refused connections: ten within a minute."""

    def __init__(self) -> None:
        self._until, self._lines, self._left_out = 0.0, 0, 0

    def count(self, now: float) -> int | None:
        """Return how many refusals were not logged since the last logged one; None if this one is not logged either.

        Parameters
        ----------
        now : float
            Seconds on a monotonic clock.
        """
        if now >= self._until:
            self._until, self._lines = now + _PERIOD, 0
        if self._lines >= _LINES:
            self._left_out += 1
            return None
        self._lines += 1
        before, self._left_out = self._left_out, 0
        return before

    def log(self, address: str, why: str) -> None:
        """Log why a connection was refused, unless many were refused just now."""
        before = self.count(time.monotonic())
        if before is not None:
            more = f" ({before} more were refused since the last message)" if before else ""
            logger.warning("refused a connection from %s: %s%s", address, why, more)


class Strangers:
    """The connections of one listener that are not authenticated yet, oldest first; closed ones may be among them."""

    def __init__(self) -> None:
        #: The connections of each address, without the port, and when each began.
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
        """Close all connections."""
        for connection in list(self._address):
            self._close(connection)

    def refuse(self, address: str, why: str) -> None:
        """Log why a connection was refused, unless many were refused just now."""
        self._refusals.log(address, why)

    def hold_back(self, sockets: Iterable[socket.socket]) -> list[socket.socket]:
        """Return these listening sockets as sockets that accept few connections in one turn of the event loop."""
        return [_LimitedAcceptor(listening, self) for listening in sockets]

    def flooding(self) -> str | None:
        """Return the address that has too many connections, if there is one."""
        most = self._most_from() if self._is_full() else None
        return most if most is not None and len(self._from[most]) > _FLOOD else None

    def wait(self, now: float) -> float:
        """Return the seconds for which new connections stay in the kernel, if too many come from many addresses."""
        if not self._is_full() or self.flooding() is not None:
            return 0.0
        return max(next(iter(self._from[self._most_from()].values())) + _YOUNG - now, 0.0)

    def _is_full(self) -> bool:
        """Whether there are too many connections; closed ones are removed first."""
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


class _LimitedAcceptor(socket.socket):
    """A listening socket that lets in only few connections in one turn of the event loop.

    After a few connections, `accept` reports that no more wait, until the next turn.
    """

    def __init__(self, listening: socket.socket, strangers: Strangers) -> None:
        super().__init__(fileno=listening.detach())
        self.setblocking(False)
        self._strangers, self._loop = strangers, IOLoop.current()
        self._seen = self._let_in = 0
        self._flooding: str | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a new connection and its address.

        Raises
        ------
        BlockingIOError
            There is no connection, or enough were accepted in this turn.
        """
        if not self._seen:
            if wait := self._strangers.wait(time.monotonic()):
                self._loop.update_handler(self, 0)
                self._loop.call_later(min(wait, _PAUSE), self._open)
                raise BlockingIOError
            self._flooding = self._strangers.flooding()
            self._loop.add_callback(self._begin_turn)
        return self._next()

    def _begin_turn(self) -> None:
        self._seen = self._let_in = 0

    def _next(self) -> tuple[socket.socket, Any]:
        while self._seen < _SEEN and (self._let_in < _LET_IN or self._flooding is not None):
            connection, address = super().accept()
            self._seen += 1
            if self._flooding is None or address[0] != self._flooding or self._let_in < _LET_IN:
                self._let_in += 1
                return connection, address
            connection.close()
            self._strangers.refuse(self._flooding, "too many from there do not authenticate themselves")
        raise BlockingIOError

    def _open(self) -> None:
        if self.fileno() != -1:  # the server has not stopped
            self._loop.update_handler(self, IOLoop.READ)
