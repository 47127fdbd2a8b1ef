"""Drafts a profile from what the batch system says of itself. Parsing is pure; `draft` asks."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcgpu.batch.command import run
from hpcgpu.batch.pbs.nodes import amount, by_host, parse_pbsnodes
from hpcgpu.errors import BatchError
from hpcgpu.posix.printable import printable

__all__ = ["Queue", "draft", "parse_nodes", "parse_sinfo", "queues", "render"]

#: Partition, GRES, CPUs, MB of memory, longest time, features.
_SINFO = "%R|%G|%c|%m|%l|%f"


@dataclass(frozen=True)
class Queue:
    """One kind of GPU in one kind of node of a queue.

    Attributes
    ----------
    name : str
        Of the queue; empty where it is not known.
    gpus : int
        Of this type in a node.
    cores : int
        Of a node.
    memory : int
        MiB of a node.
    gpu_type, limit, features : str
        Empty where there is none. PBS may give a GPU several types, ``a100,cc80``.
    others : int
        GPUs of other types in the same node.
    """

    name: str
    gpus: int
    cores: int
    memory: int
    gpu_type: str = ""
    limit: str = ""
    features: str = ""
    others: int = 0


def parse_sinfo(stdout: str) -> list[Queue]:
    """Return the partitions with GPUs."""
    queues = []
    for line in printable(stdout, None, lines=True).split("\n"):
        parts = line.strip().split("|")
        if len(parts) != 6:
            continue
        name, gres, cores, memory, limit, features = parts
        types: Counter[str] = Counter()
        for match in re.finditer(r"(?:^|,)gpu:(?:([\w.-]+):)?([0-9]{1,9})", gres):
            types[match[1] or ""] += int(match[2])
        for gpu_type, gpus in types.items():
            queue = Queue(
                name,
                gpus,
                _number(cores),
                _number(memory),
                gpu_type,
                "" if limit == "infinite" else limit,
                "" if features == "(null)" else features,
                types.total() - gpus,
            )
            if queue not in queues:
                queues.append(queue)
    return queues


def _number(text: str) -> int:
    """Return the number that sinfo means by ``16+``: at least so many."""
    match = re.match("[0-9]{1,18}", text)
    return int(match[0]) if match else 0


def parse_nodes(nodes: Mapping[str, Mapping[str, str]]) -> list[Queue]:
    """Return the kinds of GPU nodes of a PBS, from what pbsnodes says of their vnodes: a host may have one for each socket.

    Each node has a little more or less memory than the next: the least of a kind counts.
    """

    def total(vnodes: Iterable[Mapping[str, str]], resource: str) -> int:
        return int(sum(amount(vnode.get(f"resources_available.{resource}", "0")) or 0 for vnode in vnodes))

    kinds: dict[tuple[str, int, int, str, int], int] = {}
    for host in by_host(nodes.values()):
        of_queue: dict[tuple[str, str], list[Mapping[str, str]]] = {}
        for vnode in host:
            if total([vnode], "ngpus"):
                of_queue.setdefault((vnode.get("queue", ""), vnode.get("resources_available.gpu_type", "")), []).append(vnode)
        for (queue, gpu_type), vnodes in of_queue.items():
            gpus = total(vnodes, "ngpus")
            others = sum(total(v, "ngpus") for (name, _), v in of_queue.items() if name == queue) - gpus
            kind = (queue, gpus, total(vnodes, "ncpus"), gpu_type, others)
            kinds[kind] = min(total(vnodes, "mem") // 2**20, kinds.get(kind, 2**62))
    return [Queue(name, gpus, cores, memory, gpu_type, others=others) for (name, gpus, cores, gpu_type, others), memory in kinds.items()]


def render(system: str, queues: Sequence[Queue], today: str, others: str = "") -> str:
    """Return the draft: the kind of node with the most GPUs is filled in, the others are comments."""
    lines = [
        "# A profile for hpcgpu, drafted from what the batch system says. Look through it, and add what the site's pages say.",
        "about: ",
        "source: ",
        f"date: {today}",
        f"system: {system}",
        "# Options that each user must give.",
        "needs: [account, walltime]",
        "options:",
    ]
    if not queues:
        return "\n".join([*lines, "  # The batch system names no nodes with GPUs.", "  gpus-per-node: 1", ""])
    best = max(queues, key=lambda queue: queue.gpus)
    lines += _options(best, "  ")
    lines += [
        "  # How much a scheduler job takes that shares a node.",
        "  scheduler:",
        f"    cores: {max(1, best.cores // max(1, best.gpus) // 4)}",
    ]
    lines += ["# Other nodes with GPUs:"] * (len(queues) > 1)
    for queue in queues:
        if queue is not best:
            lines += ["#", *(f"# {line.strip()}" for line in _options(queue, ""))]
    if others:
        lines += ["# All queues:", *(f"#   {line}" for line in others.splitlines())]
    return "\n".join([*lines, ""])


def _options(queue: Queue, indent: str) -> list[str]:
    lines = [f"queue: {queue.name}" if queue.name else "# queue: "]
    lines += [f"gpus-per-node: {queue.gpus}"]
    first, *aliases = queue.gpu_type.strip("\"'").split(",")
    lines += [f"gpu-type: {first}"] * bool(first)
    lines += [f"# Other names of this type: {', '.join(aliases)}."] * bool(aliases)
    lines += [f"cores: {queue.cores}"] * bool(queue.cores)
    # A part is the system's own.
    lines += [f"memory: {int(queue.memory * 0.95)}MiB"] * (queue.memory >= 1024)
    lines += [f"# The longest walltime is {queue.limit}."] * bool(queue.limit)
    lines += [f"# Features of the nodes: {queue.features}"] * bool(queue.features)
    return [f"{indent}{line}" for line in lines]


def draft(system: str) -> str:
    """Ask the batch system, and return the draft.

    Raises
    ------
    BatchError
        It does not answer.
    """
    others = printable(_ask(["qstat", "-Q"]), 20_000, lines=True) if system == "pbs" else ""
    return render(system, queues(system), time.strftime("%Y-%m-%d"), others)


def queues(system: str) -> list[Queue]:
    """Ask the batch system for its queues with GPUs.

    Raises
    ------
    BatchError
        It does not answer.
    """
    if system == "slurm":
        return parse_sinfo(_ask(["sinfo", "--noheader", f"--format={_SINFO}"]))
    return parse_nodes(parse_pbsnodes(_ask(["pbsnodes", "-av"])))


def _ask(argv: list[str]) -> str:
    result = run(argv, timeout=60, extra_env={"LC_ALL": "C"})
    if result.returncode != 0:
        raise BatchError(f"`{' '.join(argv)}` failed: {result.words}")
    return result.stdout
