"""The queues of a batch system that have GPUs, as it describes them; each system's own `queues` function finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgpu.batch.command import run
from hpcgpu.errors import BatchError

__all__ = ["Queue", "Queues", "answer"]


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
        Empty where there is none.
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

    def has(self, gpu_type: str) -> bool:
        """Return whether its GPUs may be of this type; true where the type is not known."""
        return self.gpu_type in ("", gpu_type)


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What a batch system says of its queues.

    Attributes
    ----------
    gpus : sequence of Queue
        Those with GPUs.
    by_default : bool
        A job that names no queue can get GPUs.
    route : bool
        A queue may hand its jobs on to others, which have the nodes.
    notes : str
        The batch system's own list of all queues, if it has more to say.
    """

    gpus: Sequence[Queue]
    by_default: bool
    route: bool = False
    notes: str = ""


def answer(argv: Sequence[str]) -> str:
    """Return what a command of the batch system prints.

    Raises
    ------
    BatchError
        It failed.
    """
    result = run(argv, timeout=60, extra_env={"LC_ALL": "C"})
    if result.returncode != 0:
        raise BatchError(f"`{' '.join(argv)}` failed: {result.words}")
    return result.stdout
