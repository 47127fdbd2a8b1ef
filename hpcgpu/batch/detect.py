"""Which batch system this machine has, for every command."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from hpcgpu.batch import plugins_to_install
from hpcgpu.batch.system_registry import System, names, systems
from hpcgpu.errors import BatchError


@dataclass(frozen=True)
class Detected:
    """What this machine has.

    Attributes
    ----------
    system : System or None
        The batch system that answers.
    silent : sequence of str
        A sentence for each system that is installed and does not answer, or that needs a package.
    """

    system: System | None
    silent: Sequence[str] = ()


def detect() -> Detected:
    """Query each batch system whose commands are installed, once, until one answers."""
    silent = []
    for system in systems():
        if not system.command or shutil.which(system.command) is None:
            continue
        try:
            system.batch().probe()
        except BatchError as error:
            silent.append(f"`{system.command}` is installed, but {system.title} cannot be used: {error}")
        else:
            return Detected(system, silent)
    return Detected(None, [*silent, *plugins_to_install.found_here(names())])
