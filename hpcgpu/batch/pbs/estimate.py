"""When PBS expects to start a job, or could start one: whether nodes are large enough, and enough of them free.

PBS has no test of a submit, and estimates the start of submitted jobs only. The rules of its queues are in
`hpcgpu.batch.pbs.queues`. Pure functions; what is not known is left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.pbs.nodes import Shortage, amount
from hpcgpu.batch.pbs.reservations import epoch

_NO_TEST = "PBS says when a job starts only after it is submitted"


def expected_start(job: Mapping[str, str]) -> float | None:
    """Return when PBS expects to start a job; it has an estimate for a few jobs only (``man pbs_est``)."""
    text = job.get("estimated.start_time", "")
    return epoch(text) or (float(text) if re.fullmatch("[0-9]{1,18}", text) else None)


def request(script: str, queue: str) -> dict[str, str]:
    """Return what a job script requests, as ``qstat -f`` names it: resources without a chunk are a chunk."""
    given: dict[str, str] = {}
    for line in re.findall(r"^#PBS -l (.*)$", script, re.MULTILINE):
        name, _, value = " ".join(shlex.split(line)).partition("=")
        given.setdefault(name, value)
    place, walltime = given.pop("place", ""), given.pop("walltime", "")
    flat = ":".join(["1", *(f"{name}={value}" for name, value in given.items() if name != "select")])
    request = {"select": given.get("select", flat), "place": place, "walltime": walltime}
    return {"queue": queue, **{f"Resource_List.{name}": value for name, value in request.items() if value}}


def unfolded(stdout: str) -> str:
    """Return what qstat prints, with long lines in one piece."""
    return stdout.replace("\r\n", "\n").replace("\n\t", "")


def parse_queue(stdout: str) -> dict[str, str]:
    """Return the attributes of a queue from ``qstat -Qf QUEUE``. Long lines are folded by a newline and a tab."""
    lines = unfolded(stdout).split("\n")
    return {match[1]: match[2].strip() for line in lines if (match := re.fullmatch(r"    ([\w.]+) = (.*)", line))}


def estimate(request: Mapping[str, str], queue: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> Estimate:
    """Return what is known about a job.

    Parameters
    ----------
    request : mapping
        See `request`.
    queue : mapping
        Attributes of its queue; empty if they are not known.
    nodes : mapping of str to mapping
        Attributes of all vnodes; empty if they are not known.
    """
    limits, known = [], [_NO_TEST]
    if shortage := Shortage.of(request, nodes):
        limits.append(f"no node of its queue is large enough: {shortage}")
    elif nodes and request.get("Resource_List.select"):
        free = {name: _free(node) for name, node in nodes.items()}
        enough = Shortage.of(request, free) is None
        known.append(f"{'enough' if enough else 'not enough'} of its nodes' resources are free now")
    if waiting := re.search(r"Queued:(\d+)", queue.get("state_count", "")):
        known.append(f"jobs that wait in its queue: {waiting[1]}")
    return Estimate(limits=tuple(limits), known=tuple(known))


def _free(node: Mapping[str, str]) -> dict[str, str]:
    """Return a vnode with its free resources only; none are free unless the vnode's state is free."""
    up = node.get("state") == "free"
    result = dict(node)
    for key, text in node.items():
        resource = key.removeprefix("resources_available.")
        if resource == key or (number := amount(text)) is None:
            continue
        taken = amount(node.get(f"resources_assigned.{resource}", "0")) or 0.0
        result[key] = f"{max(0.0, number - taken):.0f}" if up else "0"
    return result
