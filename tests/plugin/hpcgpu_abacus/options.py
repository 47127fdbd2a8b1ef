"""Options of Abacus' jobs, beside those that all batch systems share."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.options.declare import option
from hpcgpu.options.shared_options_and_defaults import JobOptions, SchedulerOptions, WorkerOptions

__all__ = ["AbacusSchedulerOptions", "AbacusWorkerOptions", "check"]


@dataclass(frozen=True, kw_only=True)
class AbacusJobOptions(JobOptions):
    """What a job asks of Abacus."""

    tier: str | None = option(
        parse=values.choice("wood", "brass"), inherited=True, doc="Tier of beads: 'wood' or 'brass'."
    )


@dataclass(frozen=True, kw_only=True)
class AbacusWorkerOptions(AbacusJobOptions, WorkerOptions):
    """A worker job on Abacus."""


@dataclass(frozen=True, kw_only=True)
class AbacusSchedulerOptions(AbacusJobOptions, SchedulerOptions):
    """The scheduler job on Abacus."""


def check(job: AbacusJobOptions, where: str) -> None:
    """Refuse options that Abacus cannot serve."""
    if isinstance(job, WorkerOptions) and job.nodes_per_job > 1:
        raise OptionError(f"{where}nodes_per_job={job.nodes_per_job}: an Abacus has one frame, so write 1")
