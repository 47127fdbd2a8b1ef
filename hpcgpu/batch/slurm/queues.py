"""The partitions of a Slurm that have GPUs, from sinfo."""

from __future__ import annotations

import re
from collections import Counter

from hpcgpu.batch.queues import Queue, Queues, answer
from hpcgpu.posix.printable import printable

__all__ = ["parse_sinfo", "queues"]

#: Partition (with a star behind it: the default one), GRES, CPUs, MB of memory, longest time, features.
_SINFO = "%P|%G|%c|%m|%l|%f"


def queues() -> Queues:
    """Query sinfo."""
    return parse_sinfo(answer(["sinfo", "--noheader", f"--format={_SINFO}"]))


def parse_sinfo(stdout: str) -> Queues:
    """Parse the answer; pure."""
    found: list[Queue] = []
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
        for gpu_type, gpus in types.items():
            queue = Queue(
                name.removesuffix("*"),
                gpus,
                _number(cores),
                _number(memory),
                gpu_type,
                "" if limit == "infinite" else limit,
                "" if features == "(null)" else features,
                types.total() - gpus,
            )
            if queue not in found:
                found.append(queue)
    return Queues(gpus=found, by_default=any(default) if default else bool(found))


def _number(text: str) -> int:
    """Return the number that sinfo means by ``16+``: at least 16."""
    match = re.match("[0-9]{1,18}", text)
    return int(match[0]) if match else 0
