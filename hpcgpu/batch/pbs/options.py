"""Options of PBS jobs, beside those that all batch systems share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hpcgpu.batch.pbs.directive_syntax import scattered
from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.options.declare import option
from hpcgpu.options.shared_options_and_defaults import JobOptions, SchedulerOptions, WorkerOptions

_RESOURCE = r'[A-Za-z]\w*=(?:[\w.@+%/^-]+|"[^"\s]+")'
#: Resources that have an option of their own.
_OWNED_RESOURCES = {
    "select": "cores, memory, gpus_per_node, gpu_type and select_extra",
    "place": "place",
    "walltime": "walltime",
    "ncpus": "cores",
    "ngpus": "gpus_per_node",
    "mem": "memory",
    "nodes": "nodes_per_job",
}


def chunk(name: str, value: str) -> str:
    """Resources of a chunk: ``name=value``, several joined by colons; a value with a comma stands in double quotes."""
    line = values.text(name, value)
    if not re.fullmatch(rf"{_RESOURCE}(:{_RESOURCE})*", line):
        raise OptionError(
            f"{name}={line!r} is not a list of resources: write 'gpu_type=a100', several joined by colons"
        )
    if "ncpus=" in line or "ngpus=" in line or re.search(r"(^|:)(mem|mpiprocs)=", line):
        raise OptionError(
            f"{name}={line!r}: do not write ncpus, ngpus, mem or mpiprocs here: use the options cores, gpus_per_node "
            "and memory (hpcgpu always sets mpiprocs=1)"
        )
    return line


def resource_list(name: str, value: Mapping[str, str | int]) -> tuple[tuple[str, str], ...]:
    """Resources of a job as a whole, for ``-l name=value``."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a dict such as {{'filesystems': 'home:eagle'}}, not {value!r}")
    for key, amount in value.items():
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise OptionError(f"{name}: {key!r} is not a valid name of a resource")
        if owner := _OWNED_RESOURCES.get(key):
            raise OptionError(f"{name}: leave out {key}: the option {owner} sets it")
        if (
            isinstance(amount, bool)
            or not isinstance(amount, str | int)
            or not re.fullmatch(r'[\w.@+%/:^=-]+|"[^"\s]+"', str(amount))
        ):
            raise OptionError(
                f"{name}[{key!r}]={amount!r} is not allowed: write letters, digits and . _ - + : @ % = / ^, and "
                "commas in double quotes"
            )
    return tuple((key, str(amount)) for key, amount in value.items())


@dataclass(frozen=True, kw_only=True)
class PBSJobOptions(JobOptions):
    """What a job requests from PBS."""

    instead: ClassVar[Mapping[str, str]] = {
        "qos": "PBS has none; many sites have a queue instead: set queue",
        "reservation": "in PBS a reservation is a queue: set queue to its name",
        "constraint": "set select_extra to the resources that a node must have, such as 'gpu_type=a100'",
        "prefer": "PBS has no preferences; set select_extra or gpu_type to what a node must have",
    }

    select_extra: str | None = option(
        parse=chunk,
        nodes="inherited",
        doc="Further resources of each chunk, such as 'system=polaris' or 'cputype=milan:job_type=x'.",
    )
    resource_list: tuple[tuple[str, str], ...] = option(
        (),
        parse=resource_list,
        inherited=True,
        doc="Further resources of the job as a whole (-l), a dict such as {'filesystems': 'home:eagle'}.",
    )
    place: str | None = option(
        parse=values.word,
        doc="How chunks are placed (-l place), such as 'scatter:excl'. Jobs of several nodes are always scattered.",
    )
    pbs_shape: str = option(
        "select",
        parse=values.choice("select", "flat"),
        inherited=True,
        doc="How resources are requested: 'select' in chunks (-l select=1:ncpus=...), 'flat' each by itself (-l "
        "ncpus=..., as on NCI's Gadi).",
    )


@dataclass(frozen=True, kw_only=True)
class PBSWorkerOptions(PBSJobOptions, WorkerOptions):
    """A worker job on PBS."""

    pbs_launcher: str = option(
        "pbsdsh",
        parse=values.command,
        doc="What starts a process on each node of a job of several nodes: 'pbsdsh', or an MPI launcher such as "
        "'mpiexec --ppn 1'. hpcgpu adds -n with the number of nodes.",
    )


@dataclass(frozen=True, kw_only=True)
class PBSSchedulerOptions(PBSJobOptions, SchedulerOptions):
    """The scheduler job on PBS."""


def check(job: PBSJobOptions, where: str) -> None:
    """Refuse options that exclude one another.

    Raises
    ------
    OptionError
    """
    if isinstance(job, PBSWorkerOptions) and job.nodes_per_job > 1 and scattered(job.place) is None:
        raise OptionError(
            f"{where}place={job.place!r} may put two of the {job.nodes_per_job} nodes of a job on one host, where "
            "their workers would use the same GPUs: write scatter, such as 'scatter:excl'"
        )
    if job.pbs_shape != "flat":
        return
    if isinstance(job, PBSWorkerOptions) and job.nodes_per_job > 1:
        raise OptionError(
            f"{where}nodes_per_job={job.nodes_per_job} does not work with pbs_shape='flat': request more jobs instead"
        )
    if job.select_extra:
        raise OptionError(
            f"{where}select_extra belongs to chunks, and pbs_shape='flat' has none: write resource_list={{...}}"
        )
