"""Dask's TLS connections, with fixes that upstream lacks: `install` replaces distributed's backend by ours.

1. **OpenSSL's error queue is empty before we read or write.** OpenSSL requires this (SSL_get_error(3)), but CPython
   does not do it (python/cpython#148594). Some errors leave entries in the queue. Every later read in that thread that
   finds no data yet reports them, also on an intact connection. Since OpenSSL 3.4, a peer that closes without
   close_notify leaves such an entry.
2. **A connection ends with close_notify.** So peers that do not clear the queue, such as a client without hpcgpu, get
   no such entry.
3. **Handshakes have a time limit.** Without it, a peer that connects and sends nothing would hold a file descriptor
   forever. A peer that leaves in the handshake, or right after it, only tests whether a scheduler answers; this is no
   error.
4. **If a certificate has expired or is not yet valid, the error says so.**

The queue is cleared without private names and without OpenSSL's library, which may be hidden in Python. A handshake
clears the queue first (``state_machine`` in ssl/statem/statem.c). So `clear_errors` continues the handshake of a server
whose client sends nothing: nothing else happens. That takes 1 µs. `ssl.SSLContext.sslsocket_class`, which is public,
gives connections our class of socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from typing import Any

from distributed.comm import tcp
from distributed.comm.addressing import parse_host_port
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.registry import backends
from tornado.iostream import IOStream, SSLIOStream

from hpcgpu.fabric import certificate_errors
from hpcgpu.fabric.authenticating_listener import AuthenticatingListener, Comm
from hpcgpu.fabric.unauthenticated_connections import time_limit


class _Idle(threading.local):
    """A server without a client; one for each thread, because two threads may not use one OpenSSL object at a time."""

    def __init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)


_idle = _Idle()


def clear_errors() -> None:
    """Empty this thread's queue of OpenSSL errors."""
    with contextlib.suppress(ssl.SSLWantReadError):
        _idle.server.do_handshake()


def _result(end: OSError | int) -> int:
    if isinstance(end, OSError):
        raise end
    return end


class Socket(ssl.SSLSocket):
    """A TLS socket that reads no errors of other sockets, leaves no errors for them, and sends close_notify."""

    #: The process that made the connection: a forked child that closes its copy must not end it.
    _process: int | None = None
    #: How the connection ended, if earlier data had to be returned first: the next `recv_into` reports it.
    _end: OSError | int | None = None

    def do_handshake(self, block: bool = False) -> None:
        """Do as `ssl.SSLSocket.do_handshake`; OpenSSL itself clears the queue first."""
        self._process = os.getpid()
        try:
            super().do_handshake(block)
        except OSError:
            clear_errors()
            raise

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Do as `ssl.SSLSocket.recv_into`, but return all data that is there, not only one record of 16 KiB.

        Tornado and asyncio take several times as long for one call as OpenSSL takes for one record.
        """
        end, self._end = self._end, None
        if end is not None:
            return _result(end)
        clear_errors()
        with memoryview(buffer) as whole, whole.cast("B") as view:
            wanted, count = nbytes or len(view), 0
            while True:
                try:
                    with view[count:wanted] as rest:
                        received = super().recv_into(rest, len(rest), flags)
                except OSError as error:
                    if not isinstance(error, ssl.SSLWantReadError):  # the most frequent one; it leaves no entry
                        clear_errors()
                        self._end = error if count else None
                    if not count:
                        raise
                    return count
                count += received
                if received == 0 and count:
                    self._end = 0
                if received == 0 or count == wanted or self.gettimeout() != 0:  # a blocking socket has data now
                    return count

    def send(self, *arguments: Any, **keywords: Any) -> int:
        """Do as `ssl.SSLSocket.send`."""
        clear_errors()
        try:
            return super().send(*arguments, **keywords)
        except OSError:
            clear_errors()
            raise

    def shutdown(self, how: int) -> None:
        """Send close_notify, which `ssl.SSLSocket` does not do, then do as it does."""
        self._send_close_notify()
        super().shutdown(how)

    def close(self) -> None:
        """Send close_notify, then do as `ssl.SSLSocket`."""
        self._send_close_notify()
        super().close()

    def _send_close_notify(self) -> None:
        """Send close_notify on a socket that does not block; do not wait for the peer's close_notify."""
        if self._process == os.getpid() and self.fileno() != -1 and self.gettimeout() == 0:
            clear_errors()
            # usually SSLWantReadError: ours is sent, the peer's has not come
            with contextlib.suppress(OSError, ValueError):
                self.unwrap()
            clear_errors()


def _use_socket(connection_args: dict[str, Any]) -> None:
    """Give the connections of a context our class of socket. Without a context, distributed makes no connection."""
    if (context := connection_args.get("ssl_context")) is not None:
        context.sslsocket_class = Socket


def _explain(error: BaseException, context: ssl.SSLContext, peer: str) -> str:
    return certificate_errors.explain(
        error.__cause__, context.get_ca_certs(), peer=peer, now=time.time(), host=socket.gethostname()
    )


class TLS(Comm, tcp.TLS):  # type: ignore[misc]
    """A connection that this side made. Under TLS 1.3 the first read fails if the peer refuses our certificate."""

    def __init__(self, stream: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(stream, *arguments, **named)
        self._context = stream.socket.context  # a broken connection has no stream

    async def read(self, deserializers: Any = None) -> Any:
        try:
            return await super().read(deserializers)
        except CommClosedError as error:
            if why := _explain(error, self._context, self.peer_address):
                raise FatalCommClosedError(why) from error
            raise


class _Connector(tcp.TLSConnector):  # type: ignore[misc]
    comm_class = TLS

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        _use_socket(connection_args)
        try:
            return (await super().connect(address, deserialize, **connection_args)).add_to_handshake(connection_args)
        except CommClosedError as error:
            if why := _explain(error, connection_args["ssl_context"], self.prefix + address):
                raise FatalCommClosedError(why) from error
            raise
        except ValueError as error:
            if "not idle" in str(error):  # tornado, if the peer has closed the connection before TLS begins
                raise CommClosedError(f"{self.prefix}{address} has closed the connection") from error
            raise


def _left(error: OSError) -> bool:
    """Whether a peer has closed its connection: one that only tests whether the port listens is not refused."""
    ended = ssl.SSLEOFError | ssl.SSLZeroReturnError  # the latter in Debian 12's Python 3.11.2
    return isinstance(error, ended | ConnectionError) or error.errno == errno.ENOTCONN


class _Listener(AuthenticatingListener):
    prefix = "tls://"
    comm_class = tcp.TLS

    def __init__(self, address: str, *arguments: Any, **named: Any) -> None:
        _use_socket(named)
        if (context := named.get("ssl_context")) is None:
            raise TypeError(f"tls://{address}: this program has no certificate: use the security of the cluster")
        super().__init__(address, *arguments, **named)
        self._context: ssl.SSLContext = context
        self._limit = time_limit()

    async def admit(self, stream: IOStream, address: str) -> IOStream | None:
        try:
            encrypted = self._wrap(stream)
        except OSError as error:  # the peer has reset the connection already
            stream.close()
            if not _left(error):
                self._strangers.refuse(address, f"TLS handshake failed: {error}")
            return None
        self._strangers.add(encrypted, parse_host_port(address.partition("://")[2])[0])
        try:
            await asyncio.wait_for(encrypted.wait_for_handshake(), self._limit)
        except TimeoutError:
            why = f"no TLS handshake within {self._limit:g} s"
        except OSError as error:
            error = getattr(error, "real_error", None) or error
            closed_here = encrypted not in self._strangers
            why = "" if closed_here or _left(error) else f"TLS handshake failed: {error}"
        else:
            return encrypted
        finally:
            self._strangers.remove(encrypted)
        encrypted.close()
        if why:
            self._strangers.refuse(address, why)
        return None

    def _wrap(self, stream: IOStream) -> SSLIOStream:
        """Return a TLS stream over the socket of another stream.

        tornado can also do this when it accepts a connection. Then each connection that its peer has reset would log a
        traceback.
        """
        stream.socket.getpeername()  # raises after a reset; `wrap_socket` would raise too, but leave a socket open
        wrapped = self._context.wrap_socket(stream.socket, server_side=True, do_handshake_on_connect=False)
        return SSLIOStream(wrapped, max_buffer_size=stream.max_buffer_size, read_chunk_size=stream.read_chunk_size)


class _Backend(tcp.TLSBackend):  # type: ignore[misc]
    def get_connector(self) -> _Connector:
        return _Connector()

    def get_listener(self, *arguments: Any, **named: Any) -> _Listener:
        return _Listener(*arguments, **named)


def install() -> None:
    """Let distributed make its TLS connections with this backend from now on."""
    backends["tls"] = _Backend()
