"""Options of Slurm's jobs, beside those that all batch systems share."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgpu.options import values
from hpcgpu.options.declare import option
from hpcgpu.options.shared_options_and_defaults import JobOptions, SchedulerOptions, WorkerOptions


@dataclass(frozen=True, kw_only=True)
class SlurmJobOptions(JobOptions):
    """What a job requests from Slurm."""

    gpu_request: str | None = option(
        "gres",
        parse=values.choice("gres", "gpus-per-node", "gpus", "none"),
        inherited=True,
        doc="How GPUs are requested: by --gres, --gpus-per-node or --gpus; 'none' requests none, for sites that "
        "give whole nodes.",
    )
    qos: str | None = option(parse=values.word, inherited=True, doc="Quality of service.")
    reservation: str | None = option(parse=values.word, inherited=True, doc="Reservation to run in.")
    constraint: str | None = option(
        parse=values.filled, nodes="chosen", doc="Node features that are required, in Slurm's syntax."
    )
    prefer: str | None = option(
        parse=values.filled,
        nodes="chosen",
        doc="Node features that are preferred but not required (Slurm 22.05 and later).",
    )


@dataclass(frozen=True, kw_only=True)
class SlurmWorkerOptions(SlurmJobOptions, WorkerOptions):
    """A worker job on Slurm."""


@dataclass(frozen=True, kw_only=True)
class SlurmSchedulerOptions(SlurmJobOptions, SchedulerOptions):
    """The scheduler job on Slurm."""
