"""The queues of a batch system, as it describes them; each system's own `queues` function finds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.batch.command import run
from hpcgpu.errors import BatchError

__all__ = ["Accounts", "Queue", "Queues", "Rules", "answer"]


#: Names that Slurm compares in any case (assoc_mgr.c).
_IN_ANY_CASE = ("account", "qos")


@dataclass(frozen=True)
class Queue:
    """One kind of GPU in one kind of node of a queue; or nodes without GPUs.

    Attributes
    ----------
    name : str
        Of the queue; empty where it is not known.
    gpus : int
        Of this type in a node.
    cores : int
        Of a node.
    memory : int
        MiB of a node; of nodes that differ a little, the least.
    gpu_type, limit, features : str
        Empty where there is none.
    others : int
        GPUs of other types in the same node.
    largest : int
        MiB of the node with the most memory, where they differ a little.
    """

    name: str
    gpus: int
    cores: int
    memory: int
    gpu_type: str = ""
    limit: str = ""
    features: str = ""
    others: int = 0
    largest: int = 0

    def has(self, gpu_type: str) -> bool:
        """Return whether its GPUs may be of this type; true where the type is not known."""
        return self.gpu_type in ("", gpu_type)

    def serves(self, names: Collection[str], known: Collection[str]) -> bool:
        """Return whether jobs of these queues may run on it; true where that is not known. `known`: of all queues."""
        return not self.name or self.name in names


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a batch system says of one queue, beside its nodes.

    Attributes
    ----------
    default : bool
        Jobs that name no queue go to it.
    limit : float or None
        The longest walltime of a job in seconds; None if there is none, or if it is not known.
    said : str
        The same in the batch system's words.
    closed : str
        Why it takes no jobs or starts none, in the batch system's words; empty if it does.
    routes : tuple of str
        The queues that it hands its jobs on to.
    allowed, denied : mapping of str to frozenset of str
        Who and what may use it, by ``"account"``, ``"qos"``, ``"group"`` or ``"user"``. What is not in `allowed` is not
        limited.
    most : mapping of str to float
        The most that one node of a job may request, by option: ``"cores"``, ``"memory"`` in bytes, ``"gpus_per_node"``.
    """

    default: bool = False
    limit: float | None = None
    said: str = ""
    closed: str = ""
    routes: tuple[str, ...] = ()
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    denied: Mapping[str, frozenset[str]] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    def refuses(self, what: str, names: frozenset[str]) -> str:
        """Return why it is not open to any of these users, groups, accounts or QOS; empty if it is."""
        same = str.lower if what in _IN_ANY_CASE else str
        given = set(map(same, names))
        if what in self.allowed and not given & set(map(same, self.allowed[what])):
            return f"it is open only to {what} {', '.join(sorted(self.allowed[what]))}"
        if taken := given & set(map(same, self.denied.get(what, ()))):
            return f"it is closed to {what} {', '.join(sorted(taken))}"
        return ""

    def shut(self, user: str, groups: frozenset[str]) -> str:
        """Return why this user's jobs cannot run in it; empty if they can."""
        return self.closed or self.refuses("user", frozenset({user})) or self.refuses("group", groups)


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """What this user may name in a job.

    Attributes
    ----------
    qos : mapping of str to frozenset of str, optional
        By account, the QOS that this user may use with it; None if it is not known.
    limits : mapping of str to (float or None), optional
        By QOS, the longest walltime in seconds, None if it has none. Of all QOS; None if they are not known.
    beyond : frozenset of str
        The QOS whose jobs may have a longer walltime than their queue.
    enforced : frozenset of str
        What the batch system refuses if it is wrong: ``"account"``, ``"qos"``.
    unknown : str
        Why not everything is known, in the batch system's words.
    """

    qos: Mapping[str, frozenset[str]] | None = None
    limits: Mapping[str, float | None] | None = None
    beyond: frozenset[str] = frozenset()
    enforced: frozenset[str] = frozenset()
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What a batch system says of its queues.

    Attributes
    ----------
    gpus : sequence of Queue
        Those with GPUs.
    without : sequence of Queue
        Nodes without GPUs, or with GPUs that the batch system does not list.
    by_default : bool
        A job that names no queue can get GPUs.
    rules : mapping of str to Rules
        By name, of all queues; empty if they are not known.
    route : bool
        A queue may hand its jobs on to others, which have the nodes.
    notes : str
        The batch system's own list of all queues, if it has more to say.
    """

    gpus: Sequence[Queue]
    without: Sequence[Queue] = ()
    by_default: bool
    rules: Mapping[str, Rules] = field(default_factory=dict)
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
