"""The queues of a PBS and the kinds of its nodes, from qstat and pbsnodes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hpcgpu.batch.pbs.estimate import parse_queue, unfolded
from hpcgpu.batch.pbs.nodes import amount, by_host, parse_pbsnodes, seconds
from hpcgpu.batch.pbs.reservations import Reservation, reservations
from hpcgpu.batch.queues import Queue, Queues, Rules, answer
from hpcgpu.errors import BatchError
from hpcgpu.posix.printable import printable

#: Attributes that limit who may use a queue.
_WHO = {"user": ("acl_user_enable", "acl_users"), "group": ("acl_group_enable", "acl_groups")}
#: Resources of ``resources_max`` and ``resources_min`` that limit an option of a job.
_LIMITED = {"ncpus": "cores", "mem": "memory", "ngpus": "gpus_per_node", "nodect": "nodes_per_job"}
#: Resources of a vnode that are words, and that no job requests to choose a kind of node.
_OWN_WORDS = frozenset({"host", "vnode", "gpu_type", "arch"})


class PBSQueue(Queue):
    """Nodes of a PBS. Their GPUs may have several types, ``a100,cc80``, and PBS accepts each in either case."""

    def has(self, gpu_type: str) -> bool:
        """Return whether its GPUs may be of this type; true where the type is not known."""
        return not self.gpu_type or gpu_type.lower() in self.gpu_type.strip("\"'").lower().split(",")

    def serves(self, names: Collection[str], known: Collection[str]) -> bool:
        """Return whether jobs of these queues may run on it. Many sites list a node's queues in its ``Qlist``."""
        named = {word.removeprefix("Qlist=") for word in self.features.split(",") if word.startswith("Qlist=")}
        if self.name or not named & set(known):
            return super().serves(names, known)
        return bool(named & set(names))


def queues() -> Queues:
    """Query pbsnodes, and qstat for the rules of the queues."""
    rules: dict[str, Rules] = {}
    with contextlib.suppress(BatchError):  # pbsnodes alone has what is needed
        rules = parse_queues(answer(["qstat", "-Qf"]), answer(["qstat", "-B", "-f"]))
        for name, reservation in reservations(rules).items():
            rules[name] = _reserved(rules.get(name, Rules()), reservation, time.time())
    found = parse_nodes(parse_pbsnodes(answer(["pbsnodes", "-av"])))
    return Queues(
        gpus=[kind for kind in found if kind.gpus],
        without=[kind for kind in found if not kind.gpus],
        by_default=any(kind.gpus for kind in found),
        rules=rules,
    )


def parse_queues(stdout: str, server: str = "") -> dict[str, Rules]:
    """Return the rules of each queue from ``qstat -Qf``, and from ``qstat -B -f`` those of the server; pure."""
    of_server = parse_queue(printable(unfolded(server), None, lines=True))
    text = printable(unfolded(stdout), None, lines=True)
    return {
        name: replace(_rules(parse_queue(attributes), of_server), default=name == of_server.get("default_queue"))
        for name, attributes in re.findall(r"^Queue: (\S+)[ \t]*\n((?:(?!Queue: ).*\n?)*)", text, re.MULTILINE)
    }


def _rules(attributes: Mapping[str, str], server: Mapping[str, str]) -> Rules:
    """Return the rules of a queue. The server's maximum applies if the queue has none (``chk_svr_resc_limit``)."""

    def most(resource: str) -> tuple[str, str]:
        name = f"resources_max.{resource}"
        return attributes.get(name, server.get(name, "")), name if name in attributes else f"the server's {name}"

    closed = [f"{name} = False" for name in ("enabled", "started") if attributes.get(name) == "False"]
    allowed: dict[str, frozenset[str]] = {}
    denied: dict[str, frozenset[str]] = {}
    for what, (switch, names) in _WHO.items():
        for who in (attributes, server) if what == "user" else (attributes,):
            if who.get(switch) == "True":
                entries = {entry.strip().partition("@")[0] for entry in who.get(names, "").split(",")} - {""}
                named = frozenset(entry.removeprefix("+") for entry in entries if not entry.startswith("-"))
                allowed[what] = allowed.get(what, named) & named
                taken = frozenset(entry.removeprefix("-") for entry in entries if entry.startswith("-"))
                denied[what] = denied.get(what, frozenset()) | taken
    limit, limit_words = most("walltime")
    highest = {option: amount(most(name)[0]) for name, option in _LIMITED.items()}
    lowest = {option: amount(attributes.get(f"resources_min.{name}", "")) for name, option in _LIMITED.items()}
    lowest["walltime"] = seconds(attributes.get("resources_min.walltime", ""))
    return Rules(
        limit=seconds(limit),
        limit_words=f"{limit_words} = {limit}" if limit else "",
        closed=", ".join(closed),
        only_routed="from_route_only = True" * (attributes.get("from_route_only") == "True"),
        routes=tuple(name.strip() for name in attributes.get("route_destinations", "").split(",") if name.strip()),
        allowed=allowed,
        denied=denied,
        most={option: value for option, value in highest.items() if value is not None},
        least={option: value for option, value in lowest.items() if value is not None},
        of_job=True,
    )


def _reserved(rule: Rules, reservation: Reservation, now: float) -> Rules:
    """Return the rules of a reservation's queue: before its start the queue accepts jobs, and starts them then."""
    closed = ", ".join(set(rule.closed.split(", ")) - {"started = False"}) if now < reservation.start else rule.closed
    return replace(rule, closed=closed, reserved=str(reservation))


def parse_nodes(nodes: Mapping[str, Mapping[str, str]]) -> list[PBSQueue]:
    """Return the kinds of nodes, from the vnodes that pbsnodes lists.

    A host may have one vnode for each socket.

    Nodes of one kind may differ a little in memory.
    """

    def total(vnodes: Iterable[Mapping[str, str]], resource: str) -> int:
        return int(sum(amount(vnode.get(f"resources_available.{resource}", "0")) or 0 for vnode in vnodes))

    kinds: dict[PBSQueue, PBSQueue] = {}  # by the values that all nodes of a kind share
    words: dict[PBSQueue, dict[str, None]] = {}
    for host in by_host(nodes.values()):
        of_queue: dict[tuple[str, str], list[Mapping[str, str]]] = {}
        with_gpus = [vnode for vnode in host if total([vnode], "ngpus")]
        for vnode in with_gpus or host:
            named = (vnode.get("queue", ""), vnode.get("resources_available.gpu_type", ""))
            of_queue.setdefault(named, []).append(vnode)
        for (queue, gpu_type), own in of_queue.items():
            # a chunk may span the vnodes of a host
            vnodes = own + [v for v in host if with_gpus and v not in with_gpus and v.get("queue", "") == queue]
            gpus, cores = total(vnodes, "ngpus"), total(vnodes, "ncpus")
            if not gpus and not cores:  # a host whose vnodes have all
                continue
            others = sum(total(v, "ngpus") for (name, _), v in of_queue.items() if name == queue) - gpus
            kind = PBSQueue(queue, gpus, cores, 0, gpu_type if gpus else "", others=others)
            memory = total(vnodes, "mem") // 2**20
            known = kinds.get(kind, replace(kind, memory=memory))
            kinds[kind] = replace(known, memory=min(known.memory, memory), largest=max(known.largest, memory))
            words.setdefault(kind, {}).update(dict.fromkeys(word for vnode in vnodes for word in _words(vnode)))
    return [replace(found, features=",".join(words[kind])) for kind, found in kinds.items()]


def _words(vnode: Mapping[str, str]) -> Iterable[str]:
    """Yield what a job may request of a vnode by a word, ``model=mil_a100``."""
    for key, text in vnode.items():
        name = key.removeprefix("resources_available.")
        if name != key and name not in _OWN_WORDS and amount(text) is None:
            yield from (f"{name}={word}" for word in text.strip("\"'").split(","))
