"""The queues of a Grid Engine, and the GPUs of their hosts: qconf and qhost."""

from __future__ import annotations

import re

from hpcgpu.batch.queues import Queue, Queues, Rules, answer
from hpcgpu_gridengine.answers import tree
from hpcgpu_gridengine.directives import seconds

#: Names that sites give to GPUs.
_GPUS = ("gpu", "gpus", "ngpus", "ngpu")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def queues() -> Queues:
    """Query qhost for hosts and their queues, and qconf for the longest walltimes."""
    hosts = answer(["qhost", "-xml", "-q", "-F", ",".join(("num_proc", "mem_total", *_GPUS))])
    limits = parse_limits(answer(["qconf", "-sq", "*"]))
    found = parse_hosts(hosts)
    return Queues(
        gpus=[kind for kind in found if kind.gpus],
        without=[kind for kind in found if not kind.gpus],
        by_default=any(kind.gpus for kind in found),
        rules={
            name: Rules(limit=seconds(limit), limit_words=f"h_rt = {limit}" if seconds(limit) is not None else "")
            for name, limit in limits.items()
        },
    )


def parse_limits(stdout: str) -> dict[str, str]:
    """Return ``h_rt`` of each queue from ``qconf -sq``: its general value, before those of single hosts."""
    found, name = {}, ""
    for line in stdout.splitlines():
        if match := re.match(r"qname +(\S+)", line):
            name = match[1]
        elif (match := re.match(r"h_rt +([^\s,]+)", line)) and name:
            found[name] = match[1]
    return found


def parse_hosts(stdout: str) -> list[Queue]:
    """Return the kinds of nodes of each queue from ``qhost -xml -q -F``."""
    found: dict[Queue, None] = {}
    for host in tree(stdout).iterfind("host"):
        values = {value.get("name", ""): value.text or "" for value in host.iter("resourcevalue")}
        gpus = max((int(_amount(values.get(name, ""))) for name in _GPUS), default=0)
        cores, memory = int(_amount(values.get("num_proc", ""))), int(_amount(values.get("mem_total", "")) / 2**20)
        for queue in host.iterfind("queue"):
            found[Queue(queue.get("name", ""), gpus, cores, memory)] = None
    return list(found)


def _amount(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([KMGT]?)", text.strip(), re.ASCII)
    return float(match[1]) * _UNITS.get(match[2], 1) if match else 0.0
