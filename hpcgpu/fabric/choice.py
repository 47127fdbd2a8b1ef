"""Chooses between UCX and TCP: `choose` decides and is pure, `probe` looks at this node."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Choice", "choose", "probe"]


@dataclass(frozen=True)
class Choice:
    """A protocol, ``"ucx"`` or ``"tcp"``, and why."""

    protocol: str
    why: str


def choose(*, gpus: int, has_ucxx: bool, active_ports: Sequence[str], transports: Sequence[str]) -> Choice:
    """Choose the protocol: UCX only where all that it needs for InfiniBand is there.

    Parameters
    ----------
    gpus : int
        GPUs of the scheduler job.
    has_ucxx : bool
        Whether distributed-ucxx is installed.
    active_ports : sequence of str
        Active InfiniBand ports, such as ``mlx5_0/1``.
    transports : sequence of str
        What UCX itself can use, such as ``rc_mlx5``.
    """
    if not gpus:
        return Choice("tcp", "TCP: the scheduler job has no GPU, which UCX needs")
    if not has_ucxx:
        return Choice("tcp", "TCP: distributed-ucxx is not installed (extras cu12 and cu13 of hpcgpu bring it)")
    if not active_ports:
        return Choice("tcp", "TCP: this node has no active InfiniBand port")
    if not any(t.startswith(("rc", "dc")) for t in transports):
        return Choice(
            "tcp",
            "TCP: this UCX was built without InfiniBand, as PyPI's wheels are; use conda-forge's ucx, or the site's with "
            "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true",
        )
    return Choice("ucx", f"UCX over InfiniBand ({', '.join(active_ports)})")


def active_infiniband_ports(sysfs: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the InfiniBand ports that are up (``4: ACTIVE`` in sysfs), Ethernet ports of such cards left out."""
    ports = []
    for state in sorted(sysfs.glob("*/ports/*/state")):
        port = state.parent
        link = port / "link_layer"
        if "ACTIVE" in state.read_text() and (not link.exists() or link.read_text().strip() == "InfiniBand"):
            ports.append(f"{port.parent.parent.name}/{port.name}")
    return ports


def probe(gpus: int) -> Choice:
    """Look at this node and choose. UCX is imported only if all else speaks for it."""
    has_ucxx = importlib.util.find_spec("distributed_ucxx") is not None
    ports = active_infiniband_ports()
    transports: list[str] = []
    if gpus and has_ucxx and ports:
        import ucxx

        transports = list(ucxx.get_active_transports())
    return choose(gpus=gpus, has_ucxx=has_ucxx, active_ports=ports, transports=transports)
