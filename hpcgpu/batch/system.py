"""All that hpcgpu knows about one batch system, in one object; `hpcgpu.batch.registry` finds the objects.

A `System` is made when its package is imported, in every job and for every command. So it holds references,
``"module:name"``, and what they name is imported when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.batch.base import BatchSystem
    from hpcgpu.batch.directives import Syntax
    from hpcgpu.batch.queues import Queues

__all__ = ["System", "common_templates", "load"]


@dataclass(frozen=True, kw_only=True)
class System:
    """One batch system.

    Attributes
    ----------
    name : str
        Its name in commands, in the configuration and in ``cluster.json``: ``"slurm"``.
    title : str
        Its name in messages: ``"Slurm"``.
    client : str
        Reference to the `BatchSystem` class.
    syntax : str
        Reference to the `hpcgpu.batch.directives.Syntax` of its job scripts.
    cluster_class : str
        Reference to the class of its clusters.
    templates : Path
        Directory of its templates: ``scheduler.SUFFIX.j2`` and ``worker.SUFFIX.j2``; for `hpcgpu render` also
        ``launch.sh.j2`` and ``stop.sh.j2``.
    suffix : str
        Of the names of its job scripts: ``"sbatch"``.
    command : str, optional
        Command that shows that it is installed. A system without one is never chosen by itself, unless it is a
        `fallback`.
    rank : int, default 0
        Of several systems that are installed, the one with the lowest rank is queried first.
    fallback : bool, default False
        It is chosen where no other system is installed.
    queues : str, optional
        Reference to a function that queries its queues, and returns `hpcgpu.batch.queues.Queues`. Without it they are
        not known.
    one_machine : bool, default False
        All its jobs run on the machine that submits them.
    worker_options, scheduler_options : str, optional
        References to the dataclasses of its job options: those that all systems share, or subclasses of them with more.
    check_options : str, optional
        Reference to a function of a job's options and of the beginning of a message. It raises `OptionError` for
        options that this batch system cannot serve.
    """

    name: str
    title: str
    client: str
    syntax: str
    cluster_class: str
    templates: Path
    suffix: str
    command: str = ""
    rank: int = 0
    fallback: bool = False
    queues: str = ""
    one_machine: bool = False
    worker_options: str = "hpcgpu.options.common:WorkerOptions"
    scheduler_options: str = "hpcgpu.options.common:SchedulerOptions"
    check_options: str = ""

    def scripts(self) -> Syntax:
        """Return how its job scripts are written."""
        syntax: Syntax = load(self.syntax)
        return syntax

    def discover(self) -> Queues | None:
        """Query the batch system for its queues with GPUs; None if it cannot list them.

        Raises
        ------
        BatchError
            It does not answer.
        """
        if not self.queues:
            return None
        found: Queues = load(self.queues)()
        return found

    def batch(self, **parameters: Any) -> BatchSystem:
        """Return a client of the batch system."""
        make: Callable[..., BatchSystem] = load(self.client)
        return make(**parameters)


def load(reference: str) -> Any:
    """Return what a reference names, ``"module:name"``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def common_templates() -> Path:
    """Return the directory of the templates that all systems share.

    It is inside the wheel, or beside the package in a checkout.
    """
    package = Path(__file__).parents[1]
    packaged = package / "templates"
    return packaged if packaged.is_dir() else package.parent / "templates"
