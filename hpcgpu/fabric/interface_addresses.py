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


def reaching(address: str) -> set[str]:
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # a datagram socket sends nothing on connect; the address is for documentation (RFC 5737)
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, address in present.items() if address == own), None)
