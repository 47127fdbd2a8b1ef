"""A listener of Dask that hands a connection on once the other side has proved that it belongs to the cluster.

Its connections say in Dask's handshake whether a client can hold GPU objects.
"""

from __future__ import annotations

import errno
import logging
import socket
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import dask
from distributed.comm import tcp
from distributed.comm.addressing import unparse_host_port
from distributed.comm.core import CommClosedError
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.tcpserver import TCPServer

from hpcgpu.fabric.unauthenticated_connections import Strangers

logger = logging.getLogger("distributed.hpcgpu")

#: Name under which a client says in Dask's handshake, and to its connector, whether it can hold GPU objects.
HAS_GPU = "hpcgpu-has-gpu"
#: How often another free port is tried, as in distributed: the kernel may choose a port that is in use.
_TRIES = 5


class Comm(tcp.TCP):  # type: ignore[misc]
    """A connection of Dask whose handshake says what a client can hold."""

    _handshake: Mapping[str, bool] = {}

    def add_to_handshake(self, connection_args: Mapping[str, Any]) -> Comm:
        """Copy `HAS_GPU` from the arguments of this connection to its handshake; return the connection."""
        self._handshake = {HAS_GPU: connection_args[HAS_GPU]} if HAS_GPU in connection_args else {}
        return self

    def handshake_info(self) -> dict[str, Any]:
        """Return what this side tells the other side."""
        return {**super().handshake_info(), **self._handshake}


class _Server(TCPServer):
    def __init__(self, serve: Callable[[IOStream, tuple[Any, ...]], Awaitable[None]], **options: Any) -> None:
        super().__init__(**options)
        self._serve = serve

    async def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        await self._serve(stream, address)


class GuardedListener(tcp.BaseTCPListener):  # type: ignore[misc]
    """Listens as distributed does, but accepts few connections at a time, and reads only those that `admit` accepts."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._strangers = Strangers()

    @abstractmethod
    async def admit(self, stream: IOStream, address: str) -> IOStream | None:
        """Return the stream of a connection that belongs to the cluster. If it does not, close it."""

    async def start(self) -> None:
        """Listen."""
        self.tcp_server = _Server(self._serve, max_buffer_size=tcp.MAX_BUFFER_SIZE)
        self.tcp_server.add_sockets(self._strangers.hold_back(_bound(self.ip, self.port)))

    def stop(self) -> None:
        """Stop listening, and close the connections that are not admitted yet."""
        super().stop()
        self._strangers.close()

    async def _serve(self, accepted: IOStream, address: tuple[Any, ...]) -> None:
        peer = self.prefix + unparse_host_port(*address[:2])
        if self.tcp_server is None:  # stopped after this connection was accepted
            accepted.close()
        if accepted.closed() or (stream := await self.admit(accepted, peer)) is None:
            return
        if self.tcp_server is None:
            stream.close()
        if stream.closed():  # distributed would query its address, and tornado would log the traceback
            return
        here = self.prefix + unparse_host_port(*stream.socket.getsockname()[:2])
        comm = self.comm_class(stream, here, peer, self.deserialize)
        comm.allow_offload = self.allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("%s closed the connection before the handshake of Dask ended", peer)
        else:
            await self.comm_handler(comm)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on an address; on a free port for port 0."""
    backlog = int(dask.config.get("distributed.comm.socket-backlog"))
    for left in reversed(range(_TRIES)):
        try:
            return bind_sockets(port, address=host, backlog=backlog)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or not left:
                raise
    raise AssertionError
