"""What the user wants of the worker groups of a cluster, and the commands that change it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpcgpu.errors import OptionError
from hpcgpu.scaling.model import Limits

__all__ = ["Adapt", "AddGroup", "Command", "DeleteGroup", "Resume", "Scale", "Wanted", "WantedGroup", "apply"]


@dataclass(frozen=True, kw_only=True)
class WantedGroup:
    """What the user wants of one group of workers.

    Attributes
    ----------
    limits : Limits
    target_duration : float or None
        Seconds in which the known work should be done; None for a fixed size.
    generation : int
        Number of the command that was the last for this group. Failures from before it no longer count.
    """

    limits: Limits
    target_duration: float | None = None
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user wants of a cluster.

    Attributes
    ----------
    groups : dict of str to WantedGroup
    generation : int
        Number of the last command.
    unattended : bool
        Whether the scheduler job runs a manager while no other program manages the cluster.
    """

    groups: dict[str, WantedGroup] = field(default_factory=dict)
    generation: int = 0
    unattended: bool = False

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of jobs of each group that has a fixed size."""
        return {name: group.limits.maximum for name, group in self.groups.items() if group.limits.fixed}


@dataclass(frozen=True)
class AddGroup:
    """Add a group of workers."""

    group: str
    jobs: int


@dataclass(frozen=True)
class DeleteGroup:
    """Drain all jobs of a group, and forget the group."""

    group: str


@dataclass(frozen=True)
class Scale:
    """Give a group a fixed size."""

    group: str
    jobs: int


@dataclass(frozen=True)
class Adapt:
    """Let the work decide the size of a group."""

    group: str
    limits: Limits
    target_duration: float


@dataclass(frozen=True)
class Resume:
    """Submit jobs of a group again after a pause because of failures."""

    group: str


Command = AddGroup | DeleteGroup | Scale | Adapt | Resume


def apply(wanted: Wanted, command: Command) -> Wanted:
    """Return what is wanted after a command.

    Raises
    ------
    OptionError
        There is no such group, or there is one already.
    """
    name, groups, generation = command.group, wanted.groups, wanted.generation + 1
    if isinstance(command, AddGroup) and name in groups:
        raise OptionError(
            f"there is a worker group named {name!r} already. To change its size, call scale(jobs=..., "
            f"worker_group={name!r})"
        )
    if not isinstance(command, AddGroup) and name not in groups:
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
