"""TCP connections of Dask that are authenticated, but not encrypted: scheme ``authenticated``.

Both sides do the mutual challenge of `hpcgpu.fabric.authentication` before distributed reads a message, because reading
a message unpickles it. What follows is distributed's own TCP, at its speed: neither encrypted nor signed.

The scheme is one of its own, and not ``tcp``. So a process that has no key, or that does not know the scheme, can
neither listen nor connect without the challenge by mistake. A process that has the key refuses ``tcp``, as one that
has TLS does: no option, argument or member can bring it to listen or to connect without the challenge.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any

import dask
from distributed.comm import tcp
from distributed.comm.addressing import parse_host_port
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.registry import backends
from tornado.iostream import IOStream, StreamClosedError

from hpcgpu.errors import AuthenticationError
from hpcgpu.fabric import authentication
from hpcgpu.fabric.authentication import OWN_HOST, place
from hpcgpu.fabric.strangers import Strangers, time_limit

__all__ = ["Backend", "install"]

_SCHEME = "authenticated"


class _Stream:
    """A stream, as the challenge uses it: messages of known size, and not a byte more is read."""

    def __init__(self, stream: IOStream) -> None:
        self._stream = stream
        #: Whether the other side has sent a message.
        self.begun = False

    async def send(self, buffer: bytearray) -> None:
        await self._stream.write(bytes(buffer))

    async def recv(self, buffer: bytearray) -> None:
        await self._stream.read_into(buffer)
        self.begun = True


def _key(connection_args: Mapping[str, Any], address: str) -> bytes:
    """Return the key of a connection. It is not that of UCX, so no message of one can be used with the other."""
    key = authentication.key_of(connection_args)
    if key is None:
        raise FatalCommClosedError(
            f"{address}: this program does not have the key of the cluster: use hpcgpu.connect(NAME), or the security "
            "of this cluster"
        )
    return hmac.new(key, b"hpcgpu authenticated tcp", hashlib.sha256).digest()


class _Connector(tcp.TCPConnector):  # type: ignore[misc]
    prefix = f"{_SCHEME}://"

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        where = self.prefix + address
        key = _key(connection_args, where)
        comm = await super().connect(address, deserialize, **connection_args)
        try:
            dialled = place(*comm.stream.socket.getpeername()[:2])
            await asyncio.wait_for(authentication.connect(_Stream(comm.stream), key, dialled), time_limit())
        except AuthenticationError as error:
            comm.abort()
            raise FatalCommClosedError(f"{where}: {error}") from error
        except (StreamClosedError, AttributeError) as error:  # a stream that was closed has no socket
            comm.abort()
            raise CommClosedError(
                f"{where}: the other side closed the connection before it was authenticated: its log says why"
            ) from error
        except BaseException:  # distributed cancels what takes long
            comm.abort()
            raise
        return comm


class _Listener(tcp.TCPListener):  # type: ignore[misc]
    prefix = f"{_SCHEME}://"

    def __init__(self, address: str, *arguments: Any, **named: Any) -> None:
        self._key = _key(named, self.prefix + address)
        if named.get("default_host") is None and OWN_HOST in os.environ:
            named["default_host"] = os.environ[OWN_HOST]
        super().__init__(address, *arguments, **named)
        self._strangers = Strangers()

    async def start(self) -> None:
        await super().start()
        self._strangers.hold_back(self.tcp_server)

    def stop(self) -> None:
        super().stop()
        self._strangers.close()

    async def _prepare_stream(self, stream: IOStream, address: str) -> IOStream | None:
        if self.tcp_server is None:  # stopped after this connection was accepted
            stream.close()
            return None
        side, limit = _Stream(stream), time_limit()
        self._strangers.add(stream, parse_host_port(address.partition("://")[2])[0])
        try:
            own = place(*stream.socket.getsockname()[:2])
            await asyncio.wait_for(authentication.accept(side, self._key, [own]), limit)
        except TimeoutError:
            why = f"it did not authenticate itself within {limit:g} s"
        except AuthenticationError as error:
            why = str(error)
        except (StreamClosedError, OSError, AttributeError, ValueError):  # AttributeError: it was closed meanwhile
            by_peer = side.begun and stream in self._strangers
            why = "it closed the connection before it was authenticated" if by_peer else ""
        else:
            return None if stream.closed() else stream
        finally:
            self._strangers.remove(stream)
        stream.close()
        if why:  # who only looks whether somebody listens is no error
            self._strangers.refuse(address, why)
        return None


class Backend(tcp.TCPBackend):  # type: ignore[misc]
    """The scheme, as distributed has it registered."""

    _connector_class = _Connector
    _listener_class = _Listener


class _NeverPlain:
    """A connector or listener of plain TCP that refuses who has the key of a cluster.

    What a process may do that has the key and TLS, Dask's option ``distributed.comm.require-encryption`` says.
    """

    def _check_encryption(self, address: str, connection_args: Mapping[str, Any]) -> None:
        super()._check_encryption(address, connection_args)  # type: ignore[misc]
        encrypts = authentication.ARGUMENT not in connection_args and dask.config.get(
            "distributed.comm.require-encryption", None
        )
        if not encrypts and authentication.key_of(connection_args) is not None:
            raise RuntimeError(
                f"the connections of this cluster are authenticated, refusing communication from/to tcp://{address}"
            )


class _PlainConnector(_NeverPlain, tcp.TCPConnector):  # type: ignore[misc]
    pass


class _PlainListener(_NeverPlain, tcp.TCPListener):  # type: ignore[misc]
    pass


class _PlainBackend(tcp.TCPBackend):  # type: ignore[misc]
    _connector_class = _PlainConnector
    _listener_class = _PlainListener


def install() -> None:
    """Let distributed know the scheme, and refuse plain TCP to who has a key, from now on."""
    backends[_SCHEME] = Backend()
    backends["tcp"] = _PlainBackend()
