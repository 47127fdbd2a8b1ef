"""Chooses protocol and network interface: `decide` and `incompatibility` are pure, `this_node` examines this node."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcgpu.fabric import interface_addresses

#: Bytes of locked memory below which UCX cannot register its buffers
#: with an InfiniBand card; many systems give 64 KiB or 8 MiB.
_LOCKED_MEMORY = 2**30
#: The kind of an interface in sysfs, from ``linux/if_arp.h``.
_ARPHRD_INFINIBAND = "32"
#: Seconds that UCX may take to start; on a busy shared filesystem the import takes most of it.
_TIMEOUT = 120.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """The network hardware and software of a node.

    Attributes
    ----------
    has_ucxx : bool
        Whether distributed-ucxx is installed.
    ports : tuple of str
        Active InfiniBand ports, such as ``mlx5_0/1``.
    transports : tuple of str
        What UCX itself can use, such as ``rc_mlx5``.
    ucx_error : str
        Why UCX did not report them.
    ucx_tls : str
        ``UCX_TLS``, the only transports that UCX may use; empty if it is not set.
    locked_memory : int or None
        Bytes that a process may lock; None without a limit.
    infiniband : tuple of str
        Interfaces of InfiniBand cards that have an IPv4 address.
    addresses : mapping
        All interfaces that have an IPv4 address, with it.
    """

    has_ucxx: bool = False
    ports: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    ucx_error: str = ""
    ucx_tls: str = ""
    locked_memory: int | None = None
    infiniband: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)

    @property
    def slingshot(self) -> str | None:
        """The first interface of HPE Slingshot, whose cards are named ``hsn0``, ``hsn1``, and so on."""
        return min((name for name in self.addresses if name.startswith("hsn")), default=None)


@dataclass(frozen=True)
class TransportChoice:
    """The protocol and the network interface of the workers.

    Attributes
    ----------
    protocol : str
        ``"ucx"`` or ``"tcp"``.
    interface : str or None
        Network interface of this node; with None, Dask uses the interface of the default route.
    network : str
        Which network it is: ``"infiniband"``, ``"slingshot"``, or empty.
    why : str
        A sentence for people.
    """

    protocol: str
    interface: str | None
    network: str
    why: str


def decide(node: Node, protocol: str, interface: str | None, *, gpu: bool) -> TransportChoice:
    """Choose protocol and interface.

    Parameters
    ----------
    node : Node
    protocol : str
        The option: ``"auto"`` chooses UCX only if the node has all that UCX over InfiniBand needs.
    interface : str or None
        The option; None chooses the fastest network.
    gpu : bool
        Whether the scheduler has a GPU.
    """
    network, found = _network(node)
    chosen = interface or found
    if protocol != "auto":
        return TransportChoice(
            "ucx" if protocol == "ucx" else "tcp",
            chosen,
            network,
            f"{protocol.upper()}{_over_interface(chosen)}: set by the option `protocol`",
        )
    if lacking := _lacking(node, interface, gpu=gpu):
        return TransportChoice("tcp", chosen, network, f"TCP{_over_interface(chosen)}: {lacking}")
    return TransportChoice(
        "ucx", chosen, network, f"UCX over InfiniBand ({', '.join(node.ports)}){_over_interface(chosen)}"
    )


def incompatibility(choice: TransportChoice, node: Node, protocol: str, interface: str | None) -> str:
    """Return why a node cannot use the transport that the scheduler's node chose; empty if it can.

    Parameters
    ----------
    choice : TransportChoice
        The scheduler's.
    node : Node
        A worker's.
    protocol, interface : str or None
        The options of the worker.
    """
    if choice.protocol == "ucx" and not node.has_ucxx:
        return (
            "the scheduler uses UCX, but distributed-ucxx is not installed for this Python: use the same "
            "environment in all jobs"
        )
    own = decide(node, "auto", interface, gpu=True)
    # Dask checks this itself
    if protocol == "auto" and choice.protocol == "ucx" and own.protocol != "ucx" and not node.ucx_error:
        return (
            f"the scheduler's node chose {choice.why}, but this node chose {own.why}. Exclude such nodes (Slurm: "
            "constraint, or --exclude in job_extra_directives; PBS: select_extra or queue), or set protocol='tcp'"
        )
    if interface is None and choice.network and own.network != choice.network:
        what = {"infiniband": "an InfiniBand interface with an IPv4 address", "slingshot": "a Slingshot interface"}[
            choice.network
        ]
        return (
            f"the scheduler listens on {choice.interface}, but this node does not have {what}. It has: "
            f"{', '.join(sorted(node.addresses)) or 'no interface with an IPv4 address'}. Set interface to a "
            "network that all nodes have"
        )
    return ""


def _network(node: Node) -> tuple[str, str | None]:
    """Return a node's fastest network, and the interface of that network."""
    if node.slingshot is not None:
        return "slingshot", node.slingshot
    if node.ports and node.infiniband:
        return "infiniband", node.infiniband[0]
    return "", None


def nearest(node: Node, network: str, name: str, reaching: Collection[str]) -> str | None:
    """Return the interface of a worker's node that is nearest to the scheduler's interface.

    A node may have several rails, each a separate network.

    Parameters
    ----------
    node : Node
    network : str
        The network that the scheduler's node uses, see `TransportChoice`.
    name : str
        The interface of the scheduler's node.
    reaching : collection of str
        Interfaces whose network contains the scheduler's address.
    """
    own = (
        node.infiniband if network == "infiniband" else tuple(sorted(n for n in node.addresses if n.startswith("hsn")))
    )
    return min(own, key=lambda candidate: (candidate not in reaching, candidate != name, candidate), default=None)


def _lacking(node: Node, interface: str | None, *, gpu: bool) -> str:
    """Return the first requirement of UCX over InfiniBand that is missing here; empty if nothing is missing.

    `interface` is the user's option.
    """
    if not gpu:
        return "the scheduler job has no GPU, which UCX needs"
    if not node.has_ucxx:
        return "distributed-ucxx is not installed (install hpcgpu with the extra cu12 or cu13)"
    if node.slingshot is not None:
        return f"the network is Slingshot ({node.slingshot}), which UCX does not support"
    if not node.ports:
        return "this node has no active InfiniBand port"
    return _lacking_in_ucx(node) or _lacking_settings(node, interface)


def _lacking_in_ucx(node: Node) -> str:
    if node.ucx_error:
        return f"UCX did not start: {node.ucx_error}"
    left_out = [what for what, names in (("InfiniBand", ("rc", "dc")), ("CUDA", ("cuda",))) if not _offers(node, names)]
    if left_out and node.ucx_tls:
        return f"UCX_TLS={node.ucx_tls} excludes {' and '.join(left_out)}"
    if "InfiniBand" in left_out:
        return (
            "this UCX was built without InfiniBand, as PyPI's wheels are. Use conda-forge's ucx, or the site's UCX "
            "with RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        )
    if left_out:
        return (
            "this UCX was built without CUDA, so it cannot send GPU memory. Sites often have UCX with CUDA as a "
            "separate module or package"
        )
    return ""


def _lacking_settings(node: Node, interface: str | None) -> str:
    if node.locked_memory is not None and node.locked_memory < _LOCKED_MEMORY:
        return (
            f"a process may lock only {node.locked_memory // 1024} KiB of memory (ulimit -l), too little for "
            "InfiniBand. Slurm copies the limit of the login node unless job_extra_directives has "
            "'--propagate=NONE'. `ulimit -l $(ulimit -Hl)` in job_script_prologue raises it as far as the site "
            "allows"
        )
    if interface is not None and interface not in node.addresses:
        return f"{interface} has no IPv4 address, which UCX needs to connect"
    if interface is None and not node.infiniband:
        return (
            "no interface of the InfiniBand card has an IPv4 address (IPoIB), which UCX needs to connect. If "
            "another interface uses this card, such as a bond, set the option interface to its name"
        )
    return ""


def _offers(node: Node, names: tuple[str, ...]) -> bool:
    return any(transport.startswith(names) for transport in node.transports)


def without_rdma(node: Node, choice: TransportChoice) -> str:
    """Return why the InfiniBand that a node has is not used; empty if it is, or there is none."""
    if not node.ports or (choice.protocol == "ucx" and _offers(node, ("rc", "dc"))):
        return ""
    return (
        "the InfiniBand of this node is not used: "
        f"{_lacking(node, choice.interface, gpu=True) or 'the option `protocol` requests TCP'}"
    )


def _over_interface(interface: str | None) -> str:
    return f" over {interface}" if interface else ""


def this_node(*, ucx: bool = True, sysfs: Path = Path("/sys/class/infiniband")) -> Node:
    """Return the network hardware and software of this node.

    Parameters
    ----------
    ucx : bool, default True
        Whether UCX itself is queried too, if the node has InfiniBand.
    sysfs : Path
    """
    has_ucxx = importlib.util.find_spec("distributed_ucxx") is not None
    ports = active_infiniband_ports(sysfs)
    transports, error = _ucx_transports() if ucx and has_ucxx and ports else ((), "")
    addresses = interface_addresses.addresses()
    cards = {port.split("/")[0] for port in ports}
    names = sorted(
        path.name for card in cards for path in (sysfs / card / "device" / "net").glob("*") if _carries_ipoib(path)
    )
    return Node(
        has_ucxx=has_ucxx,
        ports=tuple(ports),
        transports=transports,
        ucx_error=error,
        ucx_tls=os.environ.get("UCX_TLS", ""),
        locked_memory=locked_memory(),
        infiniband=tuple(name for name in names if name in addresses),
        addresses=addresses,
    )


def _carries_ipoib(interface: Path) -> bool:
    """Whether an interface is up and is InfiniBand: a card may have two ports, one of them Ethernet."""
    state, kind = interface / "operstate", interface / "type"
    up = not state.exists() or state.read_text().strip() != "down"
    return up and (not kind.exists() or kind.read_text().strip() == _ARPHRD_INFINIBAND)


def _ucx_transports() -> tuple[tuple[str, ...], str]:
    """Query UCX for its transports in a separate process.

    The query starts UCX. In this process, Dask must be the one that starts UCX, after CUDA (`ucxx.init`).

    Returns
    -------
    tuple of str, and str
        The transports, and why UCX did not report them.
    """
    code = "import os, ucxx; print('transports', *sorted(ucxx.get_active_transports()), flush=True); os._exit(0)"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return (), f"no answer within {_TIMEOUT:g} s"
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        return (), words[-1] if words else f"exit code {done.returncode}"
    lines = [line.split() for line in done.stdout.splitlines()]  # UCX prints its warnings here too
    return next((tuple(words[1:]) for words in lines if words[:1] == ["transports"]), ()), ""


def locked_memory() -> int | None:
    """Return how many bytes this process may lock; None without a limit, which root never has (``man 2 mlock``)."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else limit


def active_infiniband_ports(sysfs: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the InfiniBand ports that are up (``4: ACTIVE`` in sysfs), without Ethernet ports of such cards."""
    ports = []
    for state in sorted(sysfs.glob("*/ports/*/state")):
        port = state.parent
        link = port / "link_layer"
        if "ACTIVE" in state.read_text() and (not link.exists() or link.read_text().strip() == "InfiniBand"):
            ports.append(f"{port.parent.parent.name}/{port.name}")
    return ports
