"""The partitions of a Slurm, from sinfo and scontrol."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import replace

from hpcgpu.batch.queues import Queue, Queues, Rules, answer
from hpcgpu.batch.slurm.estimate import seconds
from hpcgpu.errors import BatchError
from hpcgpu.posix.printable import printable

#: Partition (with a star behind it: the default one), GRES, CPUs, MB of memory, longest time, features.
_SINFO = "%P|%G|%c|%m|%l|%f"
#: What limits who may use a partition, by the word after ``Allow`` and ``Deny``.
_WHO = {"Accounts": "account", "Qos": "qos", "Groups": "group"}
_MIB = 2**20


class _SlurmQueue(Queue):
    """Nodes of a Slurm. Slurm refuses a GPU type for nodes that list GPUs without a type (seen on 22.05)."""

    def has(self, gpu_type: str) -> bool:
        """Return whether its GPUs are of this type."""
        return self.gpu_type == gpu_type


def queues() -> Queues:
    """Query sinfo, and scontrol for the rules of the partitions."""
    rules: dict[str, Rules] = {}
    # --exact: without it nodes that differ share a line, with the least amount and a +
    found = parse_sinfo(answer(["sinfo", "--exact", "--noheader", f"--format={_SINFO}"]))
    with contextlib.suppress(BatchError):  # sinfo alone has what is needed
        # --all: also partitions that are hidden, or not open to the user's groups
        rules = parse_partitions(answer(["scontrol", "--all", "--oneliner", "show", "partition"]))
    return replace(found, rules=rules)


def parse_sinfo(stdout: str) -> Queues:
    """Parse the answer; pure."""
    found: dict[Queue, Queue] = {}  # by the values that all nodes of a kind share
    default: list[bool] = []  # of each line of the default partition: it has GPUs
    for line in printable(stdout, None, lines=True).split("\n"):
        parts = line.strip().split("|")
        if len(parts) != 6:
            continue
        name, gres, cores, memory, limit, features = parts
        types: Counter[str] = Counter()
        for match in re.finditer(r"(?:^|,)gpu:(?:([\w.-]+):)?([0-9]{1,9})", gres):
            types[match[1] or ""] += int(match[2])
        default += [bool(types)] * name.endswith("*")
        for gpu_type, gpus in types.items() or [("", 0)]:
            kind = _SlurmQueue(
                name.removesuffix("*"),
                gpus,
                _number(cores),
                0,
                gpu_type,
                "" if limit == "infinite" else limit,
                "" if features == "(null)" else features,
                types.total() - gpus,
            )
            of_node = _number(memory)
            known = found.get(kind, replace(kind, memory=of_node))
            found[kind] = replace(known, memory=min(known.memory, of_node), largest=max(known.largest, of_node))
    return Queues(
        gpus=[queue for queue in found.values() if queue.gpus],
        without=[queue for queue in found.values() if not queue.gpus],
        by_default=any(default) if default else any(queue.gpus for queue in found.values()),
    )


def parse_partitions(stdout: str) -> dict[str, Rules]:
    """Return the rules of each partition from ``scontrol --oneliner show partition``; pure."""
    found = {}
    for line in printable(stdout, None, lines=True).split("\n"):
        attributes = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if name := attributes.get("PartitionName"):
            found[name] = _rules(attributes)
    return found


def _rules(attributes: dict[str, str]) -> Rules:
    closed = [f"State={attributes['State']}"] if attributes.get("State", "UP") != "UP" else []
    closed += ["RootOnly=YES"] * (attributes.get("RootOnly") == "YES")
    who = {
        verb: {
            what: frozenset((text if what == "group" else text.lower()).split(","))
            for words, what in _WHO.items()
            if (text := attributes.get(f"{verb}{words}", "ALL")) not in ("ALL", "(null)", "NONE", "")
        }
        for verb in ("Allow", "Deny")
    }
    most = {"cores": _amount(attributes, "MaxCPUsPerNode")}
    if memory := _amount(attributes, "MaxMemPerNode"):
        most["memory"] = memory * _MIB
    limit = attributes.get("MaxTime", "UNLIMITED")
    return Rules(
        default=attributes.get("Default") == "YES",
        limit=seconds(limit),
        limit_words="" if limit == "UNLIMITED" else f"MaxTime={limit}",
        closed=", ".join(closed),
        allowed=who["Allow"],
        denied=who["Deny"],
        most={option: amount for option, amount in most.items() if amount},
    )


def _amount(attributes: dict[str, str], name: str) -> float:
    """Return a limit of nodes; 0 for ``UNLIMITED``."""
    return float(_number(attributes.get(name, "")))


def _number(text: str) -> int:
    """Return the number that sinfo means by ``16+``: at least 16."""
    match = re.match("[0-9]{1,18}", text)
    return int(match[0]) if match else 0
