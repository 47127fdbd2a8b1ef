"""Whether any node of a PBS is large enough for a job, from the output of pbsnodes.

PBS reports "Can Never Run" only for a request that exceeds all nodes together. A chunk that is larger than every node
waits for ever, as "Not Running" (seen on OpenPBS 23.06.06). Pure functions; if a value is not known, they report no
shortage.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcgpu.posix.printable import printable

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
#: Resources of a chunk that set how it runs, not what it needs.
_SETTINGS = frozenset({"mpiprocs", "ompthreads"})
#: How a boolean may be written (OpenPBS, ``decode_b`` of ``attr_fn_b.c``).
_FALSE = frozenset({"false", "f", "n", "0"})


def parse_pbsnodes(stdout: str) -> dict[str, dict[str, str]]:
    """Return the attributes of each vnode from ``pbsnodes -av``.

    Its format is a name, indented ``name = value`` lines, and an empty line.
    """
    nodes: dict[str, dict[str, str]] = {}
    attributes: dict[str, str] = {}
    for line in printable(stdout, None, lines=True).split("\n"):
        if match := re.fullmatch(r"\s+([\w.]+) = (.*)", line):
            attributes[match[1]] = match[2]
        elif line.strip():
            attributes = nodes[line.strip()] = {}
    return nodes


def amount(text: str) -> float | None:
    """Return a number or a size (``4gb``, ``100kb``, ``16``) as a number; None for a word."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([kmgtp]?)b?", text.strip().lower())
    return float(match[1]) * _UNITS[match[2]] if match else None


def seconds(text: str) -> float | None:
    """Parse a walltime: ``[[hours:]minutes:]seconds``."""
    if not re.fullmatch(r"[0-9]{1,12}(:[0-9]{1,12}){0,2}", text):
        return None
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part)
    return float(total)


@dataclass(frozen=True)
class Shortage:
    """A request that no node of the queue, or not enough of them, can ever satisfy."""

    chunks: int
    chunk: str
    nodes: int

    def __str__(self) -> str:
        chunk = self.chunk.replace(":", " ")
        if self.nodes == 0:
            return f"no node has {chunk}"
        return f"the job requests {self.chunks} chunks of {chunk}, and the nodes can hold only {self.nodes}"

    @classmethod
    def of(cls, job: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> Shortage | None:
        """Return the first kind of chunk that can never be placed; None if there is none, or if that is not known.

        Parameters
        ----------
        job : mapping
            Attributes of a job, from ``qstat -f``.
        nodes : mapping of str to mapping
            Attributes of all vnodes. Nodes that are down count: they may come back.
        """
        own = [node for node in nodes.values() if node.get("queue") == job.get("queue")]
        eligible = own or [node for node in nodes.values() if "queue" not in node]
        if not eligible:
            return None
        place = job.get("Resource_List.place", "").split(":")
        vnodes = [_resources([node]) for node in eligible]
        hosts = [_resources(group) for group in by_host(eligible)]
        known = set().union(*vnodes)
        for chunk in split(job.get("Resource_List.select", ""), "+"):
            match = re.fullmatch(r"(?:([0-9]{1,9}):)?(\w+=.*)", chunk)
            if match is None:
                continue
            needs = dict(part.split("=", 1) for part in split(match[2], ":") if "=" in part)
            # A resource that no node has may be the server's or the queue's own.
            needs = {name: value for name, value in needs.items() if name in known and name not in _SETTINGS}
            places = [_room(needs, place_) for place_ in (vnodes if "vscatter" in place else hosts)]
            room = sum(min(n, 1) for n in places) if {"scatter", "vscatter"} & set(place) else sum(places)
            count = int(match[1] or 1)
            if needs and room < count:
                return cls(count, ":".join(f"{name}={value}" for name, value in needs.items()), room)
        return None


def split(text: str, separator: str) -> list[str]:
    """Return the parts of a request; text in double quotes is not split."""
    return re.findall(rf'(?:[^{separator}"]|"[^"]*"?)+', text)


def by_host(nodes: Iterable[Mapping[str, str]]) -> Iterable[list[Mapping[str, str]]]:
    """Group vnodes by their host: a chunk may be spread over those of one host, not over hosts."""
    hosts: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for i, node in enumerate(nodes):
        hosts[node.get("resources_available.host", str(i))].append(node)
    return hosts.values()


def _resources(nodes: Iterable[Mapping[str, str]]) -> dict[str, float | set[str]]:
    """Return the resources of vnodes together: numbers are added, words are joined."""
    total: dict[str, float | set[str]] = {}
    for node in nodes:
        for key, text in node.items():
            if not key.startswith("resources_available."):
                continue
            name = key.removeprefix("resources_available.")
            number, so_far = amount(text), total.get(name)
            if number is None or isinstance(so_far, set):
                total[name] = (so_far if isinstance(so_far, set) else set()) | _words(text)
            else:
                total[name] = number + (so_far or 0.0)
    return total


def _words(text: str) -> set[str]:
    return set(text.strip("\"'").lower().split(","))


def _room(needs: Mapping[str, str], there: Mapping[str, float | set[str]]) -> int:
    """How many such chunks fit into a node or host; a number that PBS does not know counts as 0, a boolean as False."""
    room = 10**9
    for name, value in needs.items():
        if name not in there and value.lower() in _FALSE:
            continue
        have = there.get(name, 0.0)
        need = amount(value)
        if isinstance(have, set):
            room = min(room, 10**9 if _words(value) & have else 0)
        elif need is None:
            room = min(room, 0)
        elif need > 0:
            room = min(room, int(have // need))
    return room
