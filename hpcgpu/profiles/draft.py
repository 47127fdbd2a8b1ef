"""Drafts a profile from what the batch system reports. `render` is pure; `draft` queries."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcgpu.batch.queues import Queue
from hpcgpu.batch.registry import System
from hpcgpu.errors import OptionError

__all__ = ["draft", "render"]


def draft(system: System) -> str:
    """Query the batch system, and return the draft.

    Raises
    ------
    BatchError
        It does not answer.
    OptionError
        It cannot list its queues.
    """
    if (found := system.discover()) is None:
        raise OptionError(
            f"profiles are for sites: {system.title} needs none, because all its jobs run on this machine"
        )
    return render(system.name, found.gpus, time.strftime("%Y-%m-%d"), found.notes)


def render(system: str, queues: Sequence[Queue], today: str, others: str = "") -> str:
    """Return the draft: the kind of node with the most GPUs is filled in, the others are comments."""
    lines = [
        "# A profile for hpcgpu, drafted from what the batch system says. Review it, and add what the site's pages "
        "say.",
        "about: ",
        "source: ",
        f"date: {today}",
        f"system: {system}",
        "# Options that each user must give.",
        "needs: [account, walltime]",
        "options:",
    ]
    if not queues:
        return "\n".join([*lines, "  # The batch system lists no nodes with GPUs.", "  gpus-per-node: 1", ""])
    best = max(queues, key=lambda queue: queue.gpus)
    lines += _options(best, "  ")
    lines += [
        "  # What a scheduler job requests on a shared node.",
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
