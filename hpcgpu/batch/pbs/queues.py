"""The kinds of GPU nodes of a PBS, from pbsnodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from hpcgpu.batch.pbs.nodes import amount, by_host, parse_pbsnodes
from hpcgpu.batch.queues import Queue, Queues, answer
from hpcgpu.errors import BatchError
from hpcgpu.posix.printable import printable

__all__ = ["PBSQueue", "parse_nodes", "queues"]


class PBSQueue(Queue):
    """Nodes of a PBS. Their GPUs may have several types, ``a100,cc80``, and PBS accepts each in either case."""

    def has(self, gpu_type: str) -> bool:
        """Return whether its GPUs may be of this type; true where the type is not known."""
        return not self.gpu_type or gpu_type.lower() in self.gpu_type.strip("\"'").lower().split(",")


def queues() -> Queues:
    """Query pbsnodes and qstat."""
    notes = ""
    with contextlib.suppress(BatchError):  # pbsnodes says what is needed
        notes = printable(answer(["qstat", "-Q"]), 20_000, lines=True)
    found = parse_nodes(parse_pbsnodes(answer(["pbsnodes", "-av"])))
    return Queues(gpus=found, by_default=bool(found), route=True, notes=notes)


def parse_nodes(nodes: Mapping[str, Mapping[str, str]]) -> list[PBSQueue]:
    """Return the kinds of GPU nodes, from the vnodes that pbsnodes lists.

    A host may have one vnode for each socket.

    Each node has a little more or less memory than the next: the least of a kind counts.
    """

    def total(vnodes: Iterable[Mapping[str, str]], resource: str) -> int:
        return int(sum(amount(vnode.get(f"resources_available.{resource}", "0")) or 0 for vnode in vnodes))

    kinds: dict[tuple[str, int, int, str, int], int] = {}
    for host in by_host(nodes.values()):
        of_queue: dict[tuple[str, str], list[Mapping[str, str]]] = {}
        for vnode in host:
            if total([vnode], "ngpus"):
                of_queue.setdefault((vnode.get("queue", ""), vnode.get("resources_available.gpu_type", "")), []).append(
                    vnode
                )
        for (queue, gpu_type), vnodes in of_queue.items():
            gpus = total(vnodes, "ngpus")
            others = sum(total(v, "ngpus") for (name, _), v in of_queue.items() if name == queue) - gpus
            kind = (queue, gpus, total(vnodes, "ncpus"), gpu_type, others)
            kinds[kind] = min(total(vnodes, "mem") // 2**20, kinds.get(kind, 2**62))
    return [
        PBSQueue(name, gpus, cores, memory, gpu_type, others=others)
        for (name, gpus, cores, gpu_type, others), memory in kinds.items()
    ]
