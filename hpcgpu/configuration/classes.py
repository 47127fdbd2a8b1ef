"""The options of each batch system: those that all systems share, and its own."""

from __future__ import annotations

import functools
from dataclasses import Field, dataclass
from typing import Any

from hpcgpu.batch import registry
from hpcgpu.options.common import JobOptions, SchedulerOptions, WorkerOptions
from hpcgpu.options.schema import names, own

__all__ = ["OptionClasses", "elsewhere", "option_classes"]


@dataclass(frozen=True)
class OptionClasses:
    """The dataclasses of one batch system's job options.

    Attributes
    ----------
    system : System
    worker, scheduler : type
    """

    system: registry.System
    worker: type[WorkerOptions]
    scheduler: type[SchedulerOptions]

    def own(self) -> dict[str, Field[Any]]:
        """Return the options that this system adds or declares anew, of worker and scheduler jobs."""
        return own(self.scheduler, SchedulerOptions) | own(self.worker, WorkerOptions)

    def check(self, job: JobOptions, where: str = "") -> None:
        """Refuse options of a job that this batch system cannot serve.

        Raises
        ------
        OptionError
        """
        if self.system.check_options:
            registry.load(self.system.check_options)(job, where)


@functools.cache
def option_classes(system: str) -> OptionClasses:
    """Return the options of a batch system.

    Raises
    ------
    OptionError
        There is no such system.
    """
    found = registry.system(system)
    return OptionClasses(found, registry.load(found.worker_options), registry.load(found.scheduler_options))


def elsewhere(name: str, classes: OptionClasses) -> str:
    """Return why this batch system does not have an option that others have; empty if none has it."""
    known = names(classes.worker).keys() | names(classes.scheduler).keys()
    others = [one for one in map(option_classes, registry.names()) if name not in known and name in one.own()]
    if not others:
        return ""
    titles = " and ".join(one.system.title for one in others)
    advice = classes.worker.instead.get(name)
    if advice:
        return f"{name} is an option of {titles} jobs: {advice}"
    return f"{name} is an option of {titles} jobs, and {classes.system.title} does not have it: remove it"
