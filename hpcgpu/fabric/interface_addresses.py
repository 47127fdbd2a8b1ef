"""Network interfaces of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
from collections.abc import Mapping

import psutil


def addresses() -> dict[str, str]:
    """Return the interfaces that have an IPv4 address, and the address: UCX's connection manager and Dask need one."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                found.setdefault(name, entry.address)
    return found


def every_address() -> set[str]:
    """Return all addresses of this machine, IPv4 and IPv6."""
    entries = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    return {entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)}


def interfaces_of_network(address: str) -> set[str]:
    """Return the interfaces whose network contains an IPv4 address."""
    found = set()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                network = ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)
                with contextlib.suppress(ValueError):
                    if ipaddress.ip_address(address) in network:
                        found.add(name)
    return found


def missing(interface: str, present: Mapping[str, str]) -> str:
    """Return in words what is wrong with an interface's name on this machine; empty if nothing is wrong."""
    if interface in present:
        return ""
    listed = ", ".join(f"{name} ({address})" for name, address in sorted(present.items())) or "none"
    return (
        f"interface {interface!r} does not exist on {socket.gethostname()}, or has no IPv4 address. Interfaces with "
        f"an address: {listed}"
    )


def default_interface(present: Mapping[str, str]) -> str | None:
    """Return the interface of the default route. Most likely, other machines reach this one through it."""
    own = _address_towards("192.0.2.1")  # for documentation (RFC 5737)
    return next((name for name, address in present.items() if address == own), None)


def towards(address: str) -> str | None:
    """Return the interface on which a worker listens whose scheduler has this IPv4 address, also behind a router.

    Dask chooses it in the same way (`distributed.utils.get_ip`); None if it is not known.
    """
    try:
        own = _address_towards(str(ipaddress.IPv4Address(address)))
    except ValueError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces for entry in entries if entry.address == own), None)


def _address_towards(address: str) -> str | None:
    """Return the address of this machine from which it reaches another one; None if it has no way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket sends nothing on connect
        except OSError:
            return None
        return str(probe.getsockname()[0])
