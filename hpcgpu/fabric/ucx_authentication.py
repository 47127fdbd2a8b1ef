"""Mutual authentication of UCX connections; UCX itself has none.

A peer outside the cluster is refused before distributed reads anything from it.

Each side proves that it has the cluster's key, by three raw messages of fixed size, before distributed reads a frame,
because reading a frame unpickles it. The key is never sent. Nonces are fresh on both sides. The signed text contains
the roles and the address that the connector used. So nobody can replay or reflect a message, or relay it from an
address where a member of the cluster listened before. All later data on the connection is neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import importlib.util
import ipaddress
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcgpu.errors import AuthenticationError
from hpcgpu.fabric import interface_addresses, ucx_endpoints, ucx_exit, ucx_memory
from hpcgpu.posix import checked_files

#: Variable of a process in a job: path of the file that holds the key.
VARIABLE = "HPCGPU_UCX_KEY"
#: Variable of a worker's process that listens on all addresses: the address by which others reach its node.
OWN_HOST = "HPCGPU_OWN_HOST"
#: Name under which `hpcgpu.store.certificates_and_keys.security` passes the key on to connections.
ARGUMENT = "hpcgpu_ucx_key"

_MAGIC = b"hpcgpu ucx 2\0\0\0\0"
_KEY = 32
_NONCE = 32
_PROOF = 32
_ADDRESS = 18
_HELLO = len(_MAGIC) + _NONCE + _ADDRESS
_CHALLENGE = len(_MAGIC) + _NONCE + _PROOF
#: Seconds that the other side may take for the whole authentication.
TIMEOUT = 10.0


class _Stranger:
    """A UCX connection that `Strangers` can count."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def close(self) -> None:
        self._comm.abort()

    def closed(self) -> bool:
        return bool(self._comm.closed())


class _Endpoint(Protocol):
    async def send(self, buffer: Any) -> Any: ...

    async def recv(self, buffer: Any) -> Any: ...


def signed_address(host: str, port: int) -> bytes:
    """Return an address in the form that is signed: 16 bytes of IPv6 and 2 bytes of the port.

    IPv4 is mapped to IPv6. All loopback addresses are the same, because they mean the machine itself.

    Raises
    ------
    ValueError
        `host` is no literal address.
    """
    address = ipaddress.ip_address(host.split("%", maxsplit=1)[0])
    if address.is_loopback:  # Debian gives a machine's name the address 127.0.1.1
        address = ipaddress.ip_address("127.0.0.1")
    return (address.packed if address.version == 6 else b"\0" * 10 + b"\xff" * 2 + address.packed) + port.to_bytes(
        2, "big"
    )


def _proof(key: bytes, role: bytes, hello: bytes, listener_nonce: bytes) -> bytes:
    return hmac.new(key, role + hello + listener_nonce, hashlib.sha256).digest()


class Connector:
    """The side that connects, without I/O: send `hello`, pass the answer to `respond`, send its result.

    Parameters
    ----------
    key : bytes
    dialled : bytes
        The `signed_address` to which it connects.
    """

    def __init__(self, key: bytes, dialled: bytes) -> None:
        self._key = key
        self._hello = _MAGIC + secrets.token_bytes(_NONCE) + dialled

    def hello(self) -> bytes:
        """Return the first message."""
        return self._hello

    def respond(self, challenge: bytes) -> bytes:
        """Check the listener's proof and return our own.

        Raises
        ------
        AuthenticationError
            The listener does not have the key.
        """
        magic, nonce, proof = challenge[:16], challenge[16:48], challenge[48:]
        if magic != _MAGIC or not hmac.compare_digest(proof, _proof(self._key, b"listener ", self._hello, nonce)):
            raise AuthenticationError(
                "the other side did not prove that it belongs to this cluster: use hpcgpu.connect(NAME), or "
                "Client(ADDRESS, security=cluster.security)"
            )
        return _proof(self._key, b"connector", self._hello, nonce)


class Listener:
    """The side that listens, without I/O.

    Pass the first message to `challenge` and send its result. Pass the answer to `check`.

    Parameters
    ----------
    key : bytes
    addresses : collection of bytes
        Each `signed_address` that leads to it.
    """

    def __init__(self, key: bytes, addresses: Collection[bytes]) -> None:
        self._key = key
        self._addresses = addresses
        self._nonce = secrets.token_bytes(_NONCE)
        self._hello = b""

    def challenge(self, hello: bytes) -> bytes:
        """Return our proof and our nonce, from which the connector makes its proof.

        Raises
        ------
        AuthenticationError
            The message is not of this protocol, or it was meant for another address.
        """
        if hello[:16] != _MAGIC or len(hello) != _HELLO:
            raise AuthenticationError("the peer does not authenticate itself")
        if hello[-_ADDRESS:] not in self._addresses:
            raise AuthenticationError(
                "the other side connected to an address that this process does not have: somebody may be intercepting "
                "the connection"
            )
        self._hello = hello
        return _MAGIC + self._nonce + _proof(self._key, b"listener ", hello, self._nonce)

    def check(self, proof: bytes) -> None:
        """Raise `AuthenticationError` unless the connector has the key."""
        if not hmac.compare_digest(proof, _proof(self._key, b"connector", self._hello, self._nonce)):
            raise AuthenticationError("the peer does not have the cluster's key")


async def connect(endpoint: _Endpoint, key: bytes, dialled: bytes) -> None:
    """Authenticate a connection that this side made, to this `signed_address`.

    Raises
    ------
    AuthenticationError
        The listener does not belong to the cluster, or does not authenticate itself.
    """
    side = Connector(key, dialled)
    await endpoint.send(bytearray(side.hello()))
    await endpoint.send(bytearray(side.respond(await _receive(endpoint, _CHALLENGE))))


async def accept(endpoint: _Endpoint, key: bytes, addresses: Collection[bytes]) -> None:
    """Authenticate a connection that the other side made, to one of these addresses.

    Raises
    ------
    AuthenticationError
        The peer does not belong to the cluster.
    """
    side = Listener(key, addresses)
    await endpoint.send(bytearray(side.challenge(await _receive(endpoint, _HELLO))))
    side.check(await _receive(endpoint, _PROOF))


async def _receive(endpoint: _Endpoint, size: int) -> bytes:
    buffer = bytearray(size)
    await endpoint.recv(buffer)  # a longer message is an error of UCX; a shorter one leaves zeros at the end
    return bytes(buffer)


def _key_of_process() -> bytes | None:
    """Return the key of a process in a job; None if it has none, for example without ``security``."""
    path = os.environ.get(VARIABLE)
    return _read_key(path) if path else None


@functools.cache
def _read_key(path: str) -> bytes:
    """Read a key, once: a process still connects to its peers after the cluster's files are removed."""
    try:
        key = bytes.fromhex(checked_files.read(Path(path)).decode())
    except ValueError:
        key = b""
    if len(key) != _KEY:
        raise ValueError(
            f"the key in {path} is damaged (it must have {_KEY} bytes): start a new cluster, or render the scripts "
            "again"
        )
    return key


def key_of(connection_args: Mapping[str, Any]) -> bytes | None:
    """Return the key of a connection: its security's key, else that of the process; None if there is none."""
    key = connection_args.get(ARGUMENT)
    return bytes(key) if key is not None else _key_of_process()


def install() -> None:
    """Let distributed authenticate each connection of scheme ``ucx`` that has a key.

    The first connection imports UCX.
    """
    from distributed.comm.registry import backends

    _key_of_process()
    if importlib.util.find_spec("distributed_ucxx") is not None and not getattr(
        backends.get("ucx"), "authenticates", False
    ):
        backends["ucx"] = _LazyBackend()


class _LazyBackend:
    """Passes every call to the backend of distributed-ucxx, with connectors and listeners that authenticate."""

    authenticates = True

    @functools.cached_property
    def _real(self) -> Any:
        return _authenticated()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _broken() -> Any:
    """Return the errors of a connection that broke."""
    import ucxx.exceptions
    from distributed.comm.core import CommClosedError

    return TimeoutError, CommClosedError, ucxx.exceptions.UCXError, OSError


def _connector() -> Any:
    import ucxx.exceptions
    from distributed.comm.addressing import parse_host_port, unparse_host_port
    from distributed.comm.core import CommClosedError, FatalCommClosedError
    from distributed_ucxx.ucxx import UCXXConnector

    class AuthenticatedConnector(UCXXConnector):  # type: ignore[misc]
        async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
            key = key_of(connection_args)
            host, port = parse_host_port(address)
            try:
                ipaddress.ip_address(host.split("%")[0])
            except ValueError:  # the signed address must be the address that is dialled
                [(*_, found), *_] = await asyncio.get_running_loop().getaddrinfo(
                    host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
                )
                host = found[0]
            address = unparse_host_port(host, port)
            try:
                comm = await super().connect(address, deserialize, **connection_args)
            # distributed-ucxx lets some errors through, and distributed retries after an OSError
            except ucxx.exceptions.UCXError as error:
                raise CommClosedError(f"ucx://{address}: {str(error) or type(error).__name__}") from error
            if key is None:
                return comm
            try:
                await ucx_memory.within(TIMEOUT, connect(comm.ep, key, signed_address(host, port)), comm.abort)
            except AuthenticationError as error:
                comm.abort()
                raise FatalCommClosedError(f"ucx://{address}: {error}") from error
            except _broken() as error:
                comm.abort()
                raise CommClosedError(f"ucx://{address}: {str(error) or type(error).__name__}") from error
            except BaseException:  # distributed cancels attempts that take long
                comm.abort()
                raise
            return comm

    return AuthenticatedConnector


def _listener() -> Any:
    from distributed.comm.core import CommClosedError
    from distributed_ucxx.ucxx import UCXXListener

    from hpcgpu.fabric.unauthenticated_connections import Strangers

    class AuthenticatedListener(ucx_memory.KeepsListening, UCXXListener):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._named, self._strangers = named, Strangers()

        def stop(self) -> None:
            super().stop()
            self._strangers.close()

        async def on_connection(self, comm: Any, handshake_overrides: dict[str, Any] | None = None) -> None:
            if self.stopped:
                comm.abort()
                raise CommClosedError("this process accepts no more connections")
            key = key_of(self._named)
            if key is not None:
                peer, stranger = ucx_endpoints.query(comm.ep).peer or "an unknown address", _Stranger(comm)
                self._strangers.add(stranger, peer.rpartition(":")[0])
                try:
                    own = {signed_address(host, self.port) for host in interface_addresses.every_address()}
                    await ucx_memory.within(TIMEOUT, accept(comm.ep, key, own), comm.abort)
                except (AuthenticationError, *_broken()) as error:
                    if stranger in self._strangers:  # else there were too many, which is logged already
                        self._strangers.refuse(f"{peer} to {comm.local_address}", ucx_memory.why_refused(error))
                    comm.abort()
                    raise CommClosedError("not authenticated") from error
                finally:
                    self._strangers.remove(stranger)
            await super().on_connection(comm, handshake_overrides)

    return AuthenticatedListener


def _authenticated() -> Any:
    from dask import config
    from distributed_ucxx.ucxx import UCXXBackend

    from hpcgpu.fabric import ucx_settings

    # before ucxx is imported: a client has no job that sets it
    os.environ.update(ucx_settings.memory_type_cache(os.environ, config.get("distributed-ucxx", None) or {}))
    ucx_exit.spare_ucx()
    ucx_memory.exchange_tags_safely(TIMEOUT)
    connector, listener = _connector(), _listener()

    class AuthenticatedBackend(UCXXBackend):  # type: ignore[misc]
        def get_connector(self) -> Any:
            return connector()

        def get_listener(self, loc: str, handle_comm: Any, deserialize: bool, **connection_args: Any) -> Any:
            return listener(loc, handle_comm, deserialize, **connection_args)

    return AuthenticatedBackend()
