"""The options of each batch system: those that all systems share, and its own."""

from __future__ import annotations

import functools
from dataclasses import Field, dataclass
from typing import Any

from hpcgpu.batch import system_registry
from hpcgpu.options.declare import added, names
from hpcgpu.options.shared_options_and_defaults import JobOptions, SchedulerOptions, WorkerOptions


@dataclass(frozen=True)
class OptionClasses:
    """The dataclasses of one batch system's job options.

    Attributes
    ----------
    system : System
    worker, scheduler : type
    """

    system: system_registry.System
    worker: type[WorkerOptions]
    scheduler: type[SchedulerOptions]

    def added(self) -> dict[str, Field[Any]]:
        """Return the options of worker and scheduler jobs that this system adds or redefines."""
        return added(self.scheduler, SchedulerOptions) | added(self.worker, WorkerOptions)

    def check(self, job: JobOptions, where: str = "") -> None:
        """Refuse options of a job that this batch system cannot serve.

        Raises
        ------
        OptionError
        """
        if self.system.check_options:
            system_registry.load(self.system.check_options)(job, where)


@functools.cache
def option_classes(system: str) -> OptionClasses:
    """Return the options of a batch system.

    Raises
    ------
    OptionError
        There is no such system.
    """
    found = system_registry.system(system)
    return OptionClasses(
        found, system_registry.load(found.worker_options), system_registry.load(found.scheduler_options)
    )


def elsewhere(name: str, classes: OptionClasses) -> str:
    """Return why this batch system does not have an option that others have; empty if none has it."""
    known = names(classes.worker).keys() | names(classes.scheduler).keys()
    others = [one for one in map(option_classes, system_registry.names()) if name not in known and name in one.added()]
    if not others:
        return ""
    titles = " and ".join(one.system.title for one in others)
    advice = classes.worker.instead.get(name)
    if advice:
        return f"{name} is an option of {titles} jobs: {advice}"
    return f"{name} is an option of {titles} jobs, and {classes.system.title} does not have it: remove it"
