"""What PBS tells of a job before it is submitted: the limits of its queue, and whether enough nodes are free now.

PBS has no test of a submit, and estimates the start of submitted jobs only. Pure functions; what is not known is left
out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.pbs.nodes import Shortage, amount, seconds

__all__ = ["estimate", "parse_queue", "request", "unfolded"]

_NO_TEST = "PBS says when a job starts only after it is submitted"


def request(script: str, queue: str) -> dict[str, str]:
    """Return what a job script requests, as ``qstat -f`` names it."""
    asked = {"queue": queue}
    for name, value in re.findall(r"^#PBS -l \"?(select|place)=([^\s\"]*)", script, re.MULTILINE):
        asked.setdefault(f"Resource_List.{name}", value)
    return asked


def unfolded(stdout: str) -> str:
    """Return what qstat prints, with long lines in one piece."""
    return stdout.replace("\r\n", "\n").replace("\n\t", "")


def parse_queue(stdout: str) -> dict[str, str]:
    """Return the attributes of a queue from ``qstat -Qf QUEUE``. Long lines are folded by a newline and a tab."""
    lines = unfolded(stdout).split("\n")
    return {match[1]: match[2].strip() for line in lines if (match := re.fullmatch(r"    ([\w.]+) = (.*)", line))}


def estimate(
    asked: Mapping[str, str],
    walltime: float | None,
    queue: Mapping[str, str],
    nodes: Mapping[str, Mapping[str, str]],
) -> Estimate:
    """Return what is known of a job.

    Parameters
    ----------
    asked : mapping
        See `request`.
    walltime : float or None
        Seconds.
    queue : mapping
        Attributes of its queue; empty if they are not known.
    nodes : mapping of str to mapping
        Attributes of all vnodes; empty if they are not known.
    """
    limits, known = _queue_limits(queue, walltime), [_NO_TEST]
    if shortage := Shortage.of(asked, nodes):
        limits.append(f"no node of its queue is large enough: {shortage}")
    elif nodes and asked.get("Resource_List.select"):
        free = {name: _free(node) for name, node in nodes.items()}
        enough = Shortage.of(asked, free) is None
        known.append(f"{'enough' if enough else 'not enough'} of its nodes' resources are free now")
    if waiting := re.search(r"Queued:(\d+)", queue.get("state_count", "")):
        known.append(f"jobs that wait in its queue: {waiting[1]}")
    return Estimate(limits=tuple(limits), known=tuple(known))


def _queue_limits(queue: Mapping[str, str], walltime: float | None) -> list[str]:
    limits = []
    longest = queue.get("resources_max.walltime", "")
    if walltime is not None and (most := seconds(longest)) is not None and walltime > most:
        limits.append(
            "its walltime is above the queue's limit: request a shorter `walltime` "
            f"[resources_max.walltime = {longest}]"
        )
    if queue.get("enabled") == "False":
        limits.append("its queue accepts no jobs [enabled = False]")
    if queue.get("started") == "False":
        limits.append("its queue starts no jobs [started = False]")
    return limits


def _free(node: Mapping[str, str]) -> dict[str, str]:
    """Return a vnode with what is not assigned; with nothing unless its state is free."""
    up = node.get("state") == "free"
    result = dict(node)
    for key, text in node.items():
        resource = key.removeprefix("resources_available.")
        if resource == key or (number := amount(text)) is None:
            continue
        taken = amount(node.get(f"resources_assigned.{resource}", "0")) or 0.0
        result[key] = f"{max(0.0, number - taken):.0f}" if up else "0"
    return result
