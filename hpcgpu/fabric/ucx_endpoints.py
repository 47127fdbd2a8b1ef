"""UCX's own data on a connection: the address of the other side, and the transports in use.

ucxx has no call for either. UCX has ``ucp_ep_query``, which it documents (UCX 1.12 and later, ``ucp/api/ucp.h``). This
module calls it in the library that ucxx has loaded. It imports and loads nothing before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

_LOCAL, _REMOTE, _TRANSPORTS = 1 << 1, 1 << 2, 1 << 3
_MOST = 32


@dataclass(frozen=True)
class Endpoint:
    """One side of a connection.

    Attributes
    ----------
    peer : str
        ``address:port`` of the other side; empty if UCX does not report it.
    transports : tuple of str
        The transports in use, each with its device: ``rc_mlx5/mlx5_0:1``, ``cuda_ipc/cuda``, ``tcp/eth0``.
    """

    peer: str = ""
    transports: tuple[str, ...] = ()


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (("entries", ctypes.POINTER(_Entry)), ("number", ctypes.c_uint), ("entry_size", ctypes.c_size_t))


class _Attributes(ctypes.Structure):
    """``ucp_ep_attr_t``. Later releases add fields at its end; the mask of fields keeps this one valid."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_ubyte * 128),
        ("remote", ctypes.c_ubyte * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


@functools.cache
def _library() -> Any:
    """Return the libucp that this process has already loaded; None if it has none or an old one."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libucp.so.0", mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # never load a second UCX
        library.ucp_ep_query.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Attributes)]
        library.ucp_ep_query.restype = ctypes.c_int8
        return library
    return None


def query(endpoint: Any) -> Endpoint:
    """Query UCX for a connection.

    Parameters
    ----------
    endpoint : ucxx.Endpoint, or the UCXEndpoint inside it

    Returns
    -------
    Endpoint
        Empty if UCX does not report it, or if the connection is closed.
    """
    library = _library()
    try:
        handle = int(getattr(endpoint, "ucp_endpoint", None) or endpoint.handle)
    except (AttributeError, TypeError):
        return Endpoint()
    if library is None or not handle or not endpoint.alive:
        return Endpoint()
    entries = (_Entry * _MOST)()
    peer, transports = "", list[str]()
    for mask in (_REMOTE, _TRANSPORTS):  # UCX may refuse one field and answer the other
        attributes = _Attributes(mask=mask, transports=_Transports(entries, _MOST, ctypes.sizeof(_Entry)))
        if library.ucp_ep_query(handle, ctypes.byref(attributes)) != 0:
            continue
        if mask == _REMOTE:
            peer = _address(bytes(attributes.remote))
        else:
            used = entries[: attributes.transports.number]
            transports = [f"{e.transport.decode()}/{e.device.decode()}" for e in used if e.transport and e.device]
    return Endpoint(peer, tuple(sorted(set(transports))))


def _address(raw: bytes) -> str:
    """Return ``address:port`` of a ``sockaddr_storage``."""
    family, port = int.from_bytes(raw[:2], sys.byteorder), int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(family, raw[4:8])}:{port}"
    return f"[{socket.inet_ntop(family, raw[8:24])}]:{port}" if family == socket.AF_INET6 else ""
