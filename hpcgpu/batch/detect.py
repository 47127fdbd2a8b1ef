"""Which batch system this machine has: the one function that decides it, for every command."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from hpcgpu.batch.pbs.client import PBS
from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.errors import BatchError

__all__ = ["Detected", "detect"]

#: Seconds for one command of the question.
_TIMEOUT = 20.0


@dataclass(frozen=True)
class Detected:
    """What this machine has.

    Attributes
    ----------
    system : str or None
        The batch system that answers: ``"slurm"`` or ``"pbs"``.
    silent : sequence of str
        A sentence for each one that is installed and does not answer: what was found, and what it said.
    """

    system: str | None
    silent: Sequence[str] = ()


def detect() -> Detected:
    """Ask each batch system whose commands are installed, once, until one answers."""
    silent = []
    for batch in (Slurm(timeout=_TIMEOUT), PBS(timeout=_TIMEOUT)):
        if shutil.which(batch.submits) is None:
            continue
        try:
            batch.probe()
        except BatchError as error:
            silent.append(f"`{batch.submits}` is installed, but {batch.title} cannot be used: {error}")
        else:
            return Detected(batch.name, silent)
    return Detected(None, silent)
