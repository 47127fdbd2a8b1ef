"""The wanted state of a cluster, and the commands that change it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from hpcgpu.errors import ClusterError, OptionError
from hpcgpu.posix.json_records import convert
from hpcgpu.scaling.policy_data import Limits


@dataclass(frozen=True, kw_only=True)
class WantedGroup:
    """The wanted state of one group of workers.

    Attributes
    ----------
    limits : Limits
    target_duration : float or None
        Seconds in which the known work should be done; None for a fixed size.
    generation : int
        Number of the last command for this group. Earlier failures do not count any more.
    """

    limits: Limits
    target_duration: float | None = None
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The wanted state of a cluster.

    Attributes
    ----------
    groups : dict of str to WantedGroup
    generation : int
        Number of the last command.
    manager_in_scheduler_job : bool
        Whether the scheduler job runs a manager while no other program manages the cluster.
    detached : bool
        Whether the cluster outlives its managers.
    closing : bool
        Whether all jobs of the cluster must end for good. No other command is possible then.
    """

    groups: dict[str, WantedGroup] = field(default_factory=dict)
    generation: int = 0
    manager_in_scheduler_job: bool = False
    detached: bool = False
    closing: bool = False

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of jobs of each group that has a fixed size."""
        return {name: group.limits.maximum for name, group in self.groups.items() if group.limits.fixed}


@dataclass(frozen=True)
class AddGroup:
    """Add a group of workers, whose job script is `script`.

    If another program sends it, it has all options of a worker job of the group.
    """

    group: str
    jobs: int
    options: dict[str, Any] = field(default_factory=dict)
    script: str = ""

    def __str__(self) -> str:
        return f"add_worker_group({self.group!r}, jobs={self.jobs}, ...)"


@dataclass(frozen=True)
class DeleteGroup:
    """Drain all jobs of a group, and forget the group."""

    group: str

    def __str__(self) -> str:
        return f"delete_worker_group({self.group!r})"


@dataclass(frozen=True)
class Scale:
    """Give a group a fixed size."""

    group: str
    jobs: int

    def __str__(self) -> str:
        return f"scale(jobs={self.jobs}, worker_group={self.group!r})"


@dataclass(frozen=True)
class Adapt:
    """Let the amount of work determine the size of a group."""

    group: str
    limits: Limits
    target_duration: float

    def __str__(self) -> str:
        size = f"minimum_jobs={self.limits.minimum}, maximum_jobs={self.limits.maximum}"
        return f"adapt({size}, worker_group={self.group!r})"


@dataclass(frozen=True)
class Resume:
    """Submit jobs of a group again after a pause because of failures."""

    group: str

    def __str__(self) -> str:
        return f"resume(worker_group={self.group!r})"


@dataclass(frozen=True)
class Detach:
    """Let the cluster outlive its managers."""

    #: Whether the scheduler job runs a manager from now on.
    manager_in_scheduler_job: bool = False

    def __str__(self) -> str:
        return "detach()"


@dataclass(frozen=True)
class Close:
    """End all jobs of the cluster for good."""


#: The commands that a program sends to the manager of a cluster. `hpcgpu stop` needs no manager.
Sent = AddGroup | DeleteGroup | Scale | Adapt | Resume | Detach
Command = Sent | Close
_SENT: dict[str, type[Sent]] = {shape.__name__.lower(): shape for shape in get_args(Sent)}


def to_json(command: Sent) -> dict[str, Any]:
    """Return a command in the form in which a program sends it."""
    return {"command": type(command).__name__.lower(), **asdict(command)}


def from_json(sent: Mapping[str, Any]) -> Sent:
    """Return a command that a program has sent.

    Raises
    ------
    ValueError
        It is not a command, or has the wrong fields.
    """
    shape = _SENT.get(str(sent.get("command")))
    if shape is None:
        raise ValueError(f"the program that manages the cluster does not know the command {str(sent)[:60]}")
    command: Sent = convert(dict(sent), shape)
    return command


def check_new(group: str, groups: Collection[str]) -> None:
    """Raise `OptionError` if there is a worker group of this name."""
    if group in groups:
        raise OptionError(
            f"there is a worker group named {group!r} already. To change its size, call scale(jobs=..., "
            f"worker_group={group!r})"
        )


def apply(wanted: Wanted, command: Command) -> Wanted:
    """Return the wanted state after a command.

    Raises
    ------
    OptionError
        There is no such group, or the new group exists already.
    ClusterError
        The cluster was closed.
    """
    if isinstance(command, Close):
        return replace(wanted, closing=True)
    if wanted.closing:
        raise ClusterError("the cluster was closed, by its program or by `hpcgpu stop`: start a new one")
    generation = wanted.generation + 1
    if isinstance(command, Detach):
        in_job = wanted.manager_in_scheduler_job or command.manager_in_scheduler_job
        return replace(wanted, detached=True, manager_in_scheduler_job=in_job, generation=generation)
    name, groups = command.group, wanted.groups
    if isinstance(command, AddGroup):
        check_new(name, groups)
    elif name not in groups:
        raise OptionError(f"no worker group named {name!r}: the groups are {', '.join(groups)}")
    match command:
        case DeleteGroup():
            kept = {other: group for other, group in groups.items() if other != name}
            return replace(wanted, groups=kept, generation=generation)
        case Scale(jobs=jobs) | AddGroup(jobs=jobs):
            group = WantedGroup(limits=Limits(maximum=jobs, fixed=True), generation=generation)
        case Adapt(limits=limits, target_duration=duration):
            group = WantedGroup(limits=limits, target_duration=duration, generation=generation)
        case Resume():
            group = replace(groups[name], generation=generation)
    return replace(wanted, groups={**groups, name: group}, generation=generation)
