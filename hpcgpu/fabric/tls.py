"""Dask's TLS connections, with what is missing upstream: `install` puts our backend in the place of distributed's.

1. **OpenSSL's error queue is empty before we read or write.** OpenSSL asks for that (SSL_get_error(3)), and CPython
does not see to it
   (python/cpython#148594): some errors leave entries behind, and every later read in that thread that finds nothing to
   read yet reports them, on connections that are in order. Since OpenSSL 3.4, a peer that closes without close_notify
   leaves such an entry.
2. **A connection ends with close_notify**, so that peers which do not clear the queue, such as a client without hpcgpu,
get no such entry. 3. **Handshakes have a time limit**: a peer that connects and sends nothing would hold a file
descriptor forever. A peer that leaves right
   after the handshake, to see whether a scheduler answers, is not an error.
4. **If a certificate has expired or is not yet valid, the error says so.**

The queue is cleared without private names and without OpenSSL's library, which may be hidden in Python: a handshake
clears the queue before all else (``state_machine`` in ssl/statem/statem.c), and a server whose client says nothing,
asked to go on with its handshake, does nothing more. That takes 1 µs. `ssl.SSLContext.sslsocket_class`, which is
public, gives connections our class of socket.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from hpcgpu.fabric import certificates
from hpcgpu.fabric.strangers import Strangers, time_limit

__all__ = ["Socket", "clear_errors", "install"]


class _Idle(threading.local):
    """A server whose client never comes; one for each thread, as OpenSSL's objects are not for two at a time."""

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
    """A TLS socket that does not see errors of other sockets, leaves none for them, and sends close_notify."""

    #: The process that made the connection: a forked child that closes its copy must not end it.
    _process: int | None = None
    #: How the connection ended while data was returned that came before: the next `recv_into` says so.
    _end: OSError | int | None = None

    def do_handshake(self, block: bool = False) -> None:
        """As that of `ssl.SSLSocket`; OpenSSL itself clears the queue first."""
        self._process = os.getpid()
        try:
            super().do_handshake(block)
        except OSError:
            clear_errors()
            raise

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """As that of `ssl.SSLSocket`, but fill the buffer as far as data is there, not only with one record of 16 KiB.

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
                    if not isinstance(error, ssl.SSLWantReadError):  # that is the most frequent, and leaves no entry
                        clear_errors()
                        self._end = error if count else None
                    if not count:
                        raise
                    return count
                count += received
                if received == 0 and count:
                    self._end = 0
                if received == 0 or count == wanted or self.gettimeout() != 0:  # one that waits has what it waited for
                    return count

    def send(self, *arguments: Any, **keywords: Any) -> int:
        """As that of `ssl.SSLSocket`."""
        clear_errors()
        try:
            return super().send(*arguments, **keywords)
        except OSError:
            clear_errors()
            raise

    def shutdown(self, how: int) -> None:
        """Say that nothing more comes, then do as `ssl.SSLSocket`, which would forget to."""
        self._say_end()
        super().shutdown(how)

    def close(self) -> None:
        """Say that nothing more comes, then do as `ssl.SSLSocket`."""
        self._say_end()
        super().close()

    def _say_end(self) -> None:
        """Send close_notify, if that needs no waiting. The peer's own is not waited for."""
        if self._process == os.getpid() and self.fileno() != -1 and self.gettimeout() == 0:
            clear_errors()
            # as a rule SSLWantReadError: it is sent, the peer's has not come
            with contextlib.suppress(OSError, ValueError):
                self.unwrap()
            clear_errors()


def _explain(error: BaseException, context: ssl.SSLContext, peer: str) -> str:
    return certificates.explain(
        error.__cause__, context.get_ca_certs(), peer=peer, now=time.time(), host=socket.gethostname()
    )


class TLS(tcp.TLS):  # type: ignore[misc]
    """A connection that this side made. Under TLS 1.3 the first read fails if the peer refuses our certificate."""

    def _read_extra(self) -> None:
        super()._read_extra()
        self._context = self.stream.socket.context  # a connection that broke has no stream

    async def read(self, deserializers: Any = None) -> Any:
        try:
            return await super().read(deserializers)
        except CommClosedError as error:
            if why := _explain(error, self._context, self.peer_address):
                raise FatalCommClosedError(why) from error
            raise


class _Connector(tcp.TLSConnector):  # type: ignore[misc]
    comm_class = TLS

    def _get_connect_args(self, **connection_args: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._get_connect_args(**connection_args)
        arguments["ssl_options"].sslsocket_class = Socket
        return arguments

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        try:
            return await super().connect(address, deserialize, **connection_args)
        except CommClosedError as error:
            if why := _explain(error, connection_args["ssl_context"], self.prefix + address):
                raise FatalCommClosedError(why) from error
            raise


class _Listener(tcp.TLSListener):  # type: ignore[misc]
    def _get_server_args(self, **connection_args: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._get_server_args(**connection_args)
        arguments["ssl_options"].sslsocket_class = Socket
        return arguments

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._strangers, self._limit = Strangers(), time_limit()

    async def start(self) -> None:
        await super().start()
        self._strangers.hold_back(self.tcp_server)

    def stop(self) -> None:
        super().stop()
        self._strangers.close()

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        self._strangers.add(stream, parse_host_port(address.partition("://")[2])[0])
        try:
            await asyncio.wait_for(stream.wait_for_handshake(), self._limit)
        except TimeoutError:
            why = f"no TLS handshake within {self._limit:g} s"
        except OSError as error:
            closed_here = stream not in self._strangers
            why = "" if closed_here else f"TLS handshake failed: {getattr(error, 'real_error', None) or error}"
        else:
            # distributed asks a stream that was closed meanwhile for its address, and tornado logs the traceback.
            return None if stream.closed() else stream
        finally:
            self._strangers.remove(stream)
        stream.close()
        if why:
            self._strangers.refuse(address, why)
        return None


class _Backend(tcp.TLSBackend):  # type: ignore[misc]
    _connector_class = _Connector
    _listener_class = _Listener


def install() -> None:
    """Let distributed make its TLS connections so, from now on."""
    backends["tls"] = _Backend()
