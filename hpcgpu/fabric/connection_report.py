"""The transports that the workers' connections really use, and their speed; measured on the workers.

The choice of pairs and the tables are pure.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.core import clean_exception

from hpcgpu.display.html import html
from hpcgpu.display.text_columns import columns
from hpcgpu.fabric import measure_links

_COLUMNS = ("from", "to", "", "transports")
#: Most pairs of workers that are queried within nodes, and most across nodes.
_MOST = 32
#: Transports of UCX that are RDMA (``ucx_info -d``).
_RDMA = ("rc_", "dc_", "ud_", "gga_", "srd_")
_TIMEOUT = 60.0
#: What workers report about themselves: their node.
NODE = "hpcgpu-node"


@dataclass(frozen=True)
class Link:
    """A connection between two workers.

    Attributes
    ----------
    first, second : str
        Names of the workers.
    same_node : bool
    transports : tuple of str
        Its transports, each with its device, as UCX names them: ``rc_mlx5/mlx5_0:1``, ``cuda_ipc/cuda``; over TCP
        ``tls/ib0``.
    nvlinks : int
        Active NVLinks of the first worker's GPU.
    error : str
        Why the transports are not known; empty if they are.
    """

    first: str
    second: str
    same_node: bool
    transports: tuple[str, ...]
    nvlinks: int = 0
    error: str = ""

    @property
    def rdma(self) -> bool:
        """Whether the connection uses RDMA."""
        return any(transport.startswith(_RDMA) for transport in self.transports)

    @property
    def nvlink(self) -> bool:
        """Whether CUDA IPC moves data from GPU to GPU, and the GPU has NVLinks that are up."""
        return (
            self.same_node
            and self.nvlinks > 0
            and any(transport.startswith("cuda_ipc") for transport in self.transports)
        )


@dataclass(frozen=True)
class Fabric:
    """The protocol, the network and the connections of a cluster's workers.

    Attributes
    ----------
    protocol : str
        ``"ucx"``, ``"tls"`` or ``"tcp"``.
    why : str
        Why it was chosen.
    interface : str
        Network interface on the scheduler's node; empty if Dask uses that of the default route.
    links : list of Link
        Connections between workers: all kinds of connections, but not all connections of a large cluster.
    """

    protocol: str
    why: str
    interface: str = ""
    links: list[Link] = field(default_factory=list)

    @property
    def rdma(self) -> bool | None:
        """Whether all connections across nodes use RDMA; None while there is no such connection."""
        across = [link.rdma for link in self.links if not link.same_node and not link.error]
        return all(across) if across else None

    @property
    def nvlink(self) -> bool | None:
        """Whether all connections within nodes use NVLink; None while there is no such connection."""
        within = [link.nvlink for link in self.links if link.same_node and not link.error]
        return all(within) if within else None

    @property
    def transports(self) -> tuple[str, ...]:
        """All transports in use."""
        return tuple(sorted({transport for link in self.links for transport in link.transports}))

    def _facts(self) -> list[tuple[str, str]]:
        words = {True: "yes", False: "no", None: "not known: this needs two workers on {}"}
        return [
            ("protocol", self.protocol),
            ("why", self.why),
            ("interface", self.interface or "that of the default route"),
            ("RDMA across nodes", words[self.rdma].format("different nodes")),
            ("NVLink within nodes", words[self.nvlink].format("one node")),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        where = {True: "same node", False: "across nodes"}
        return [
            (link.first, link.second, where[link.same_node], link.error or ", ".join(link.transports))
            for link in self.links
        ]

    def __repr__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self._facts()]
        return "\n".join([*lines, *([columns(_COLUMNS, self._rows())] if self.links else [])])

    def _repr_html_(self) -> str:
        template = "{{ facts(named) }}{{ table(columns, rows) }}"
        return html(template, named=self._facts(), columns=_COLUMNS, rows=self._rows())


@dataclass(frozen=True)
class Measurement:
    """How fast a connection is.

    Attributes
    ----------
    link : Link
    buffer : str
        ``"host"`` or ``"device"``.
    latency : float
        Seconds, half a round trip of an empty message of Dask.
    bandwidth : mapping of int to float
        Bytes a second, by the size of a message in bytes.
    line_rate : float
        Bytes a second that the card can do, from sysfs; 0 within a node, and if the rate is not known.
    error : str
        Why it was not measured; empty if it was.
    """

    link: Link
    buffer: str
    latency: float = 0.0
    bandwidth: Mapping[int, float] = field(default_factory=dict)
    line_rate: float = 0.0
    error: str = ""


def choose(workers: Mapping[str, str], most: int = _MOST) -> list[tuple[str, str, bool]]:
    """Return pairs of workers, and whether both are on one node: at most `most` pairs of each kind.

    Parameters
    ----------
    workers : mapping of str to str
        Node by address.
    most : int
    """
    nodes: dict[str, list[str]] = {}
    for address, node in workers.items():
        nodes.setdefault(node, []).append(address)
    # Pairs of neighbours come first, so that every GPU and every node is used once before any is used twice.
    within = [
        (group[i], group[(i + step) % len(group)], True)
        for step in range(1, max((len(group) for group in nodes.values()), default=1))
        for group in nodes.values()
        for i in range(len(group))
        if step <= len(group) // 2 and (2 * step != len(group) or i < step)
    ]
    across = [(nodes[a][0], nodes[b][0], False) for a, b in itertools.combinations(nodes, 2)]
    return within[:most] + across[:most]


async def _run(scheduler: Any, worker: str, function: Any, **arguments: Any) -> Any:
    """Run a function of `hpcgpu.fabric.measure_links` on one worker."""
    message = {
        "op": "run",
        "function": pickle.dumps(function),
        "args": (),
        "kwargs": pickle.dumps(arguments),
        "wait": True,
    }
    answers = await asyncio.wait_for(scheduler.broadcast(msg=message, workers=[worker]), _TIMEOUT)
    answer = answers[worker]
    if answer["status"] != "OK":
        _, error, _ = clean_exception(**{name: answer[name] for name in ("exception", "traceback")})
        raise error
    return answer["result"]


def _nodes(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the batch system's name of each worker's node.

    Workers outside our jobs report only their address.
    """
    return {address: str(worker.get(NODE) or worker["host"]) for address, worker in workers.items()}


async def query_links(
    scheduler: Any, workers: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Link], dict[str, dict[str, float]]]:
    """Query the transports of the connections between workers.

    Parameters
    ----------
    scheduler : rpc
        Connection to the Dask scheduler.
    workers : mapping
        The scheduler's list of workers, by address.

    Returns
    -------
    list of Link, and dict
        The links; and the line rates of the node of each link's first worker, by that worker's name.
    """
    pairs = choose(_nodes(workers))
    peers: dict[str, list[str]] = {}
    for first, second, _ in pairs:
        peers.setdefault(first, []).append(second)
    queries = (_run(scheduler, worker, measure_links.describe, peers=others) for worker, others in peers.items())
    found = await asyncio.gather(*queries, return_exceptions=True)
    answers: dict[str, measure_links.Description] = {}
    for worker, answer in zip(peers, found, strict=True):
        if isinstance(answer, BaseException):  # the worker may be gone by now
            lost = dict.fromkeys(peers[worker], str(answer) or type(answer).__name__)
            answers[worker] = {"transports": {}, "errors": lost, "nvlinks": 0, "rates": {}}
        else:
            answers[worker] = answer
    described = [
        Link(
            str(workers[first]["name"]),
            str(workers[second]["name"]),
            same_node,
            tuple(answers[first]["transports"].get(second, ())),
            answers[first]["nvlinks"],
            answers[first]["errors"].get(second, ""),
        )
        for first, second, same_node in pairs
    ]
    return described, {str(workers[worker]["name"]): answer["rates"] for worker, answer in answers.items()}


def line_rate(transports: Iterable[str], rates: Mapping[str, float]) -> float:
    """Return the line rate of the fastest card of a connection, in bytes per second; 0 if sysfs does not give it."""
    devices = {transport.split("/", 1)[1] for transport in transports if "/" in transport}
    return max((rate for device, rate in rates.items() if device in devices), default=0.0) * 1e9 / 8


async def bench(
    scheduler: Any, workers: Mapping[str, Mapping[str, Any]], sizes: Sequence[int], *, device: bool
) -> list[Measurement]:
    """Measure one connection within a node and one across nodes.

    The buffers are in host memory and, if requested, in GPU memory.

    The measurements run one after the other, so that none disturbs another.

    Raises
    ------
    OSError
        The workers cannot connect to each other.
    """
    found, rates = await query_links(scheduler, workers)
    addresses = {str(worker["name"]): address for address, worker in workers.items()}
    if found and all(link.error for link in found):
        raise OSError(
            f"the workers cannot connect to each other: {found[0].error}. Set the option interface to a network that "
            "all of their nodes have, or ask the site whether a firewall is between them"
        )
    chosen = [
        next((link for link in found if link.same_node is same and not link.error), None) for same in (True, False)
    ]
    result = []
    for link in filter(None, chosen):
        first, second = addresses[link.first], addresses[link.second]
        await _run(scheduler, second, measure_links.receive)
        for buffer in ("host", "device") if device else ("host",):
            try:
                answer: measure_links.Speeds = await _run(
                    scheduler, first, measure_links.measure, peer=second, sizes=list(sizes), device=buffer == "device"
                )
            except (OSError, TimeoutError) as error:
                answer = {"error": str(error) or f"no answer within {_TIMEOUT:g} s"}
            rate = 0.0 if link.same_node else line_rate(link.transports, rates[link.first])
            result.append(Measurement(link, buffer, line_rate=rate, **answer))
    return result


def bench_table(measurements: Iterable[Measurement], width: int = 140) -> str:
    """Return the measurements as a table."""
    listed = list(measurements)
    sizes = sorted({size for one in listed for size in one.bandwidth})
    rows = []
    for one in listed:
        cells = [f"{one.bandwidth[size] / 1e9:.2f} GB/s" if size in one.bandwidth else "" for size in sizes]
        best = max(one.bandwidth.values(), default=0.0)
        share = (
            f"{one.line_rate / 1e9:.1f} GB/s, {best / one.line_rate:.0%} used"
            if one.line_rate and best
            else "not known"
        )
        latency = f"{one.latency * 1e6:.0f} µs" if one.latency else "-"
        where = "same node" if one.link.same_node else "across nodes"
        rows.append((where, one.buffer, latency, *cells, share, ", ".join(one.link.transports), one.error))
    head = ("", "buffer", "latency", *map(_size, sizes), "line rate", "transports", "")
    return columns(head, rows, width)


def _size(size: int) -> str:
    for unit, amount in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= amount and size % amount == 0:
            return f"{size // amount} {unit}"
    return f"{size} B"
