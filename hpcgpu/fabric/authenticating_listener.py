"""A listener of Dask that hands a connection on once the other side has proved that it belongs to the cluster.

Its connections report in Dask's handshake whether a client can hold GPU objects.
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
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import BaseListener, CommClosedError
from distributed.comm.utils import ensure_concrete_host
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.tcpserver import TCPServer

from hpcgpu.fabric.unauthenticated_connections import Strangers

logger = logging.getLogger("distributed.hpcgpu")

#: Name under which a client reports in Dask's handshake, and to its connector, whether it can hold GPU objects.
HAS_GPU = "hpcgpu-has-gpu"
#: How often another free port is tried, as in distributed: the kernel may choose a port that is in use.
_TRIES = 5


class Comm(tcp.TCP):  # type: ignore[misc]
    """A connection of Dask whose handshake reports what a client can hold."""

    _handshake: Mapping[str, bool] = {}

    def add_to_handshake(self, connection_args: Mapping[str, Any]) -> Comm:
        """Copy `HAS_GPU` from the arguments of this connection to its handshake; return the connection."""
        self._handshake = {HAS_GPU: connection_args[HAS_GPU]} if HAS_GPU in connection_args else {}
        return self

    def handshake_info(self) -> dict[str, Any]:
        """Return what this side reports to the other side."""
        return {**super().handshake_info(), **self._handshake}


class _Server(TCPServer):
    def __init__(self, serve: Callable[[IOStream, tuple[Any, ...]], Awaitable[None]], **options: Any) -> None:
        super().__init__(**options)
        self._serve = serve

    async def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        await self._serve(stream, address)


class AuthenticatingListener(BaseListener):  # type: ignore[misc]
    """Listens for TCP connections, accepts few of them at a time, and reads only those that `admit` accepts.

    Parameters
    ----------
    address : str
        Address and port, without the scheme.
    comm_handler : callable
        Gets each connection that was admitted, once both sides have done Dask's handshake.
    deserialize, allow_offload
        As Dask's connections have them.
    default_host : str, optional
        The host of `contact_address` if it listens on all addresses of the node.
    default_port : int, default 0
    **connection_args
        Of the connections; a subclass reads them.
    """

    prefix: str
    comm_class: type[tcp.TCP]

    def __init__(  # Dask calls it
        self,
        address: str,
        comm_handler: Callable[[Any], Awaitable[None]],
        deserialize: bool = True,
        *,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        self._host, self._port = parse_host_port(address, default_port)
        self._handle, self._default_host = comm_handler, default_host
        self._deserialize, self._allow_offload = deserialize, allow_offload
        self._server: _Server | None = None
        self._strangers = Strangers()

    @abstractmethod
    async def admit(self, stream: IOStream, address: str) -> IOStream | None:
        """Return the stream of a connection that belongs to the cluster. If it does not, close it."""

    async def start(self) -> None:
        """Listen."""
        sockets = _bound(self._host, self._port)
        self._host, self._port = sockets[0].getsockname()[:2]
        self._server = _Server(self._serve, max_buffer_size=tcp.MAX_BUFFER_SIZE)
        self._server.add_sockets(self._strangers.hold_back(sockets))

    def stop(self) -> None:
        """Stop listening, and close the connections that are not admitted yet."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        self._strangers.close()

    @property
    def listen_address(self) -> str:
        """The address where it listens."""
        return f"{self.prefix}{unparse_host_port(self._host, self._port)}"

    @property
    def contact_address(self) -> str:
        """The address by which other processes reach it."""
        host = ensure_concrete_host(self._host, self._default_host)
        return f"{self.prefix}{unparse_host_port(host, self._port)}"

    async def _serve(self, accepted: IOStream, address: tuple[Any, ...]) -> None:
        peer = self.prefix + unparse_host_port(*address[:2])
        if self._server is None:  # stopped after this connection was accepted
            accepted.close()
        if accepted.closed() or (stream := await self.admit(accepted, peer)) is None:
            return
        if self._server is None:
            stream.close()
        if stream.closed():  # distributed would query its address, and tornado would log the traceback
            return
        here = self.prefix + unparse_host_port(*stream.socket.getsockname()[:2])
        comm = self.comm_class(stream, here, peer, self._deserialize)
        comm.allow_offload = self._allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("%s closed the connection before the handshake of Dask ended", peer)
        else:
            await self._handle(comm)


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
