"""TCP connections of Dask that are authenticated, but not encrypted: scheme ``authenticated``.

Both sides do the mutual challenge of `ucx_authentication` before distributed reads a message, because reading a message
unpickles it. After the challenge the connection is distributed's own TCP, at full speed: neither encrypted
nor signed.

The scheme is not ``tcp`` but a separate one. So a process without the key, or without this scheme, cannot skip the
challenge by mistake when it listens or connects. A process that has the key refuses ``tcp``, like a process that has
TLS: no option, argument or member of the cluster can make it listen or connect without the challenge.
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
from hpcgpu.fabric import ucx_authentication
from hpcgpu.fabric.authenticating_listener import AuthenticatingListener, Comm
from hpcgpu.fabric.ucx_authentication import OWN_HOST, signed_address
from hpcgpu.fabric.unauthenticated_connections import time_limit

_SCHEME = "authenticated"


class _Stream:
    """A stream for the challenge: it reads messages of known size, and no byte more."""

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
    """Return the key of a connection. It differs from UCX's key, so no message of one works with the other."""
    key = ucx_authentication.key_of(connection_args)
    if key is None:
        raise FatalCommClosedError(
            f"{address}: this program does not have the key of the cluster: use hpcgpu.connect(NAME), or the security "
            "of this cluster"
        )
    return hmac.new(key, b"hpcgpu authenticated tcp", hashlib.sha256).digest()


class _Connector(tcp.TCPConnector):  # type: ignore[misc]
    prefix = f"{_SCHEME}://"
    comm_class = Comm

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        where = self.prefix + address
        key = _key(connection_args, where)
        comm = await super().connect(address, deserialize, **connection_args)
        try:
            dialled = signed_address(*comm.stream.socket.getpeername()[:2])
            await asyncio.wait_for(ucx_authentication.connect(_Stream(comm.stream), key, dialled), time_limit())
        except AuthenticationError as error:
            comm.abort()
            raise FatalCommClosedError(f"{where}: {error}") from error
        except (StreamClosedError, AttributeError) as error:  # a closed stream has no socket
            comm.abort()
            raise CommClosedError(
                f"{where}: the other side closed the connection before it was authenticated: its log says why"
            ) from error
        except BaseException:  # distributed cancels a connection that takes long
            comm.abort()
            raise
        return comm.add_to_handshake(connection_args)


class _Listener(AuthenticatingListener):
    prefix = f"{_SCHEME}://"
    comm_class = tcp.TCP

    def __init__(self, address: str, *arguments: Any, **named: Any) -> None:
        where = self.prefix + address
        if named.get("require_encryption"):
            raise RuntimeError(f"encryption required by Dask configuration, refusing communication from/to {where!r}")
        self._key = _key(named, where)
        if named.get("default_host") is None and OWN_HOST in os.environ:
            named["default_host"] = os.environ[OWN_HOST]
        super().__init__(address, *arguments, **named)

    async def admit(self, stream: IOStream, address: str) -> IOStream | None:
        side, limit = _Stream(stream), time_limit()
        self._strangers.add(stream, parse_host_port(address.partition("://")[2])[0])
        try:
            own = signed_address(*stream.socket.getsockname()[:2])
            await asyncio.wait_for(ucx_authentication.accept(side, self._key, [own]), limit)
        except TimeoutError:
            why = f"it did not authenticate itself within {limit:g} s"
        except AuthenticationError as error:
            why = str(error)
        except (StreamClosedError, OSError, AttributeError, ValueError):  # AttributeError: it is closed by now
            by_peer = side.begun and stream in self._strangers
            why = "it closed the connection before it was authenticated" if by_peer else ""
        else:
            return stream
        finally:
            self._strangers.remove(stream)
        stream.close()
        if why:  # a peer that only tests whether the port listens is no error
            self._strangers.refuse(address, why)
        return None


class Backend(tcp.TCPBackend):  # type: ignore[misc]
    """The scheme, registered with distributed."""

    def get_connector(self) -> _Connector:
        """Return what makes connections."""
        return _Connector()

    def get_listener(self, *arguments: Any, **named: Any) -> _Listener:
        """Return what listens on an address."""
        return _Listener(*arguments, **named)


class _PlainBackend(tcp.TCPBackend):  # type: ignore[misc]
    """Plain TCP, which a process with the key of a cluster refuses."""

    def get_connector(self) -> _PlainConnector:
        return _PlainConnector()

    def get_listener(self, loc: str, *arguments: Any, **named: Any) -> Any:
        _refuse_plain(loc, named)
        return super().get_listener(loc, *arguments, **named)


class _PlainConnector(tcp.TCPConnector):  # type: ignore[misc]
    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        _refuse_plain(address, connection_args)
        return await super().connect(address, deserialize, **connection_args)


def _refuse_plain(address: str, connection_args: Mapping[str, Any]) -> None:
    """Raise if this process has the key of a cluster whose connections are authenticated.

    If the process also has TLS, Dask's option ``distributed.comm.require-encryption`` decides instead.
    """
    encrypts = ucx_authentication.ARGUMENT not in connection_args and dask.config.get(
        "distributed.comm.require-encryption", None
    )
    if not encrypts and ucx_authentication.key_of(connection_args) is not None:
        raise RuntimeError(
            f"the connections of this cluster are authenticated, refusing communication from/to tcp://{address}"
        )


def install() -> None:
    """Register the scheme with distributed, and refuse plain TCP in a process that has a key, from now on."""
    backends[_SCHEME] = Backend()
    backends["tcp"] = _PlainBackend()
