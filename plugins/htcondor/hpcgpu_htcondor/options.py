"""Options of HTCondor's jobs, beside those that all batch systems share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.options.declare import option
from hpcgpu.options.shared_options_and_defaults import JobOptions, SchedulerOptions, WorkerOptions


def expression(name: str, value: str) -> str:
    """An expression of HTCondor, which HTCondor itself checks."""
    return values.filled(name, value)


def capability(name: str, value: str | float) -> str:
    """A compute capability of CUDA, such as '8.0'."""
    try:
        number = float(value) if not isinstance(value, bool) else 0.0
    except (TypeError, ValueError):
        number = 0.0
    if not 1 <= number < 100:
        raise OptionError(f"{name}={value!r} is not a compute capability, such as '8.0'")
    return f"{number:.1f}"


@dataclass(frozen=True, kw_only=True)
class HTCondorJobOptions(JobOptions):
    """What a job requests from HTCondor."""

    instead: ClassVar[Mapping[str, str]] = {
        "qos": "HTCondor has none; many sites have accounting groups instead: set account",
        "reservation": "HTCondor has none",
        "constraint": "set requirements, an expression of HTCondor",
        "prefer": "write job_extra_directives=['rank = EXPRESSION']",
    }

    requirements: str | None = option(
        parse=expression,
        inherited=True,
        doc="What a machine must have, as an expression of HTCondor: 'HasInfiniBand && (Site == \"here\")'.",
    )
    gpus_minimum_capability: str | None = option(
        parse=capability, inherited=True, doc="The least compute capability of the GPUs, such as '8.0'."
    )
    gpus_minimum_memory: int | None = option(
        parse=values.memory, inherited=True, doc="The least memory of each GPU, such as '40GB'."
    )
    concurrency_limits: str | None = option(
        parse=values.word, inherited=True, doc="Names of limits of the pool that the job counts in: 'licence:2'."
    )
    walltime_command: str = option(
        "allowed_job_duration",
        parse=values.choice("allowed_job_duration", "allowed_execute_duration", "+MaxRuntime"),
        inherited=True,
        doc="The command of the submit description that holds `walltime` in seconds; some sites have '+MaxRuntime'.",
    )


@dataclass(frozen=True, kw_only=True)
class HTCondorWorkerOptions(HTCondorJobOptions, WorkerOptions):
    """A worker job on HTCondor."""


@dataclass(frozen=True, kw_only=True)
class HTCondorSchedulerOptions(HTCondorJobOptions, SchedulerOptions):
    """The scheduler job on HTCondor."""


def check(job: HTCondorJobOptions, where: str) -> None:
    """Refuse options that HTCondor cannot serve.

    Raises
    ------
    OptionError
    """
    if job.queue:
        raise OptionError(
            f"{where}queue={job.queue!r}: HTCondor has no queues. Set requirements, or account (its group)"
        )
    if isinstance(job, HTCondorWorkerOptions) and job.nodes_per_job > 1:
        raise OptionError(
            f"{where}nodes_per_job={job.nodes_per_job}: a job of HTCondor has one node. Start more jobs instead"
        )
