"""The queues of a batch system, as it describes them; each system's own `queues` function finds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.batch.run_command import run
from hpcgpu.errors import BatchError


@dataclass(frozen=True)
class Queue:
    """One kind of GPU in one kind of node of a queue; or nodes without GPUs.

    Attributes
    ----------
    name : str
        Name of the queue; empty if it is not known.
    gpus : int
        GPUs of this type in a node.
    cores : int
        Cores of a node.
    memory : int
        MiB of a node; if nodes differ a little, the smallest amount.
    gpu_type, limit, features : str
        Empty where there is none.
    others : int
        GPUs of other types in the same node.
    largest : int
        MiB of the node with the most memory, if nodes differ a little.
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
        """Return whether its GPUs may be of this type; true if the type is not known."""
        return self.gpu_type in ("", gpu_type)

    def serves(self, names: Collection[str], known: Collection[str]) -> bool:
        """Return whether jobs of these queues may run on it; true if that is not known. `known` has all queues."""
        return not self.name or self.name in names


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a batch system reports about one queue, beside its nodes.

    Attributes
    ----------
    default : bool
        Jobs that name no queue go to it.
    limit : float or None
        The longest walltime of a job in seconds; None if there is none, or if it is not known.
    limit_words : str
        The same in the batch system's words.
    closed : str
        Why it takes no jobs or starts none, in the batch system's words; empty if it takes and starts jobs.
    routes : tuple of str
        The queues that it hands its jobs on to.
    allowed, denied : mapping of str to frozenset of str
        Who and what may use it, by ``"account"``, ``"qos"``, ``"group"`` or ``"user"``. What is not in `allowed` is not
        limited. Names of accounts and QOS are in lower case.
    most, least : mapping of str to float
        The most and the least that one node of a job may request, by option: ``"cores"``, ``"memory"`` in bytes,
        ``"gpus_per_node"``; for a job ``"nodes_per_job"`` and ``"walltime"`` in seconds (only in `least`).
    of_job : bool
        `most` and `least` count all nodes of a job together.
    only_routed : str
        Why it takes only jobs that another queue hands on, in the batch system's words; empty if it takes others too.
    reserved : str
        Its start and its end, if it is the queue of a reservation.
    """

    default: bool = False
    limit: float | None = None
    limit_words: str = ""
    closed: str = ""
    routes: tuple[str, ...] = ()
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    denied: Mapping[str, frozenset[str]] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    of_job: bool = False
    only_routed: str = ""
    reserved: str = ""

    def refuses(self, what: str, names: frozenset[str]) -> str:
        """Return why it is not open to any of these users, groups, accounts or QOS; empty if it is."""
        if what in self.allowed and not names & self.allowed[what]:
            return f"it is open only to {what} {', '.join(sorted(self.allowed[what]))}"
        if taken := names & self.denied.get(what, frozenset()):
            return f"it is closed to {what} {', '.join(sorted(taken))}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """What this user may name in a job, in lower case. Without arguments: the batch system does not report it.

    Attributes
    ----------
    qos : mapping of str to frozenset of str, optional
        By account, the QOS that this user may use with it; None if it is not known.
    limits : mapping of str to (float or None)
        By QOS, the longest walltime in seconds, None if it has none. It has all QOS; it is empty if they are not known.
    beyond : frozenset of str
        The QOS whose jobs may have a longer walltime than their queue.
    enforced : frozenset of str
        What the batch system refuses if it is wrong: ``"account"``, ``"qos"``.
    unknown : str
        Why not everything is known, in the batch system's words.
    silent : bool
        There is an accounting, and it did not answer.
    """

    qos: Mapping[str, frozenset[str]] | None = None
    limits: Mapping[str, float | None] = field(default_factory=dict)
    beyond: frozenset[str] = frozenset()
    enforced: frozenset[str] = frozenset()
    unknown: str = ""
    silent: bool = False


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What a batch system reports about its queues.

    Attributes
    ----------
    gpus : sequence of Queue
        Those nodes that have GPUs.
    without : sequence of Queue
        Nodes without GPUs, or with GPUs that the batch system does not list.
    by_default : bool
        A job that names no queue can get GPUs.
    rules : mapping of str to Rules
        By name, of all queues; empty if they are not known.
    """

    gpus: Sequence[Queue]
    without: Sequence[Queue] = ()
    by_default: bool
    rules: Mapping[str, Rules] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """What the batch system of this machine reports, and which user it is for.

    Attributes
    ----------
    queues : Queues
    accounts : Accounts
    user : str
    groups : frozenset of str
    """

    queues: Queues
    accounts: Accounts = field(default_factory=Accounts)
    user: str = ""
    groups: frozenset[str] = frozenset()

    def why_closed(self, queue: str, *, routed: bool = False) -> str:
        """Return why this user's jobs cannot run in a queue, with any account; empty if they can.

        Parameters
        ----------
        queue : str
        routed : bool, default False
            Another queue hands them on.
        """
        rule = self.queues.rules.get(queue, Rules())
        if not routed and rule.only_routed:
            return rule.only_routed
        if why := rule.closed or rule.refuses("user", frozenset({self.user})) or rule.refuses("group", self.groups):
            return why
        yours = self.accounts.qos or {}
        for what, names in (("account", set(yours)), ("qos", set[str]().union(*yours.values()))):
            refused = [rule.refuses(what, frozenset({name})) for name in sorted(names)]
            if refused and all(refused):
                return refused[0]
        return ""

    def open(self) -> list[str]:
        """Return the queues with GPUs that this user's jobs can use."""
        names = dict.fromkeys(kind.name for kind in self.queues.gpus if kind.name) or self.queues.rules
        return [name for name in names if not self.why_closed(name)]


def answer(argv: Sequence[str]) -> str:
    """Return what a command of the batch system prints.

    Raises
    ------
    BatchError
        It failed.
    """
    result = run(argv, extra_env={"LC_ALL": "C"})
    if result.returncode != 0:
        raise BatchError(f"`{' '.join(argv)}` failed: {result.words}")
    return result.stdout
