"""Options of Grid Engine's jobs, beside those that all batch systems share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.options.declare import option
from hpcgpu.options.shared_options_and_defaults import JobOptions, SchedulerOptions, WorkerOptions


@dataclass(frozen=True, kw_only=True)
class GridEngineJobOptions(JobOptions):
    """What a job requests from Grid Engine."""

    instead: ClassVar[Mapping[str, str]] = {
        "qos": "Grid Engine has none; many sites have a queue or a project instead: set queue or account",
        "reservation": "write job_extra_directives=['-ar ID']",
        "constraint": "write a resource of the site: job_extra_directives=['-l gpu_model=a100']",
    }

    node_type: str | None = option(
        parse=values.word,
        nodes="inherited",
        doc="For sites that give fixed shares of a node, such as 'node_f': a job requests as many as it has nodes (-l "
        "node_f=1), and nothing else by which nodes are chosen. `cores`, `memory` and `gpus_per_node` then only tell "
        "Dask what such a share has. Options that name what else to request are refused beside it.",
    )
    account_as: str = option(
        "project",
        parse=values.choice("project", "group"),
        inherited=True,
        doc="What `account` is at this site: a 'project' (-P), or a 'group' (-g), which qsub takes on its command line "
        "only.",
    )
    parallel_environment: str = option(
        "smp",
        parse=values.word,
        doc="Parallel environment (-pe) of a job of several cores on one node. It must keep all slots on one host "
        "($pe_slots).",
    )
    gpu_resource: str = option(
        "gpu", parse=values.word, inherited=True, doc="The site's name for GPUs (-l gpu=2), such as 'gpu' or 'ngpus'."
    )
    gpus_counted: str = option(
        "job",
        parse=values.choice("job", "node", "slot"),
        inherited=True,
        doc="What the site counts the requested GPUs for, as the column 'consumable' of `qconf -sc` says: each 'job' "
        "(JOB), each 'node' (HOST) or each 'slot' (YES). JOB counts them on the first node only, so it is refused for "
        "a job of several nodes: another job could get the GPUs of its other nodes.",
    )
    memory_resource: str = option(
        "h_vmem",
        parse=values.word,
        inherited=True,
        doc="The site's name for memory, such as 'h_vmem' or 'mem_req'; it is requested for each slot. h_vmem limits "
        "address space, of which CUDA reserves much more than it uses.",
    )

    def slots_gpus(self) -> int:
        """Return the GPUs to request, as the site counts them."""
        return self.gpus_per_node // (self.cores or 1) if self.gpus_counted == "slot" else self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class GridEngineWorkerOptions(GridEngineJobOptions, WorkerOptions):
    """A worker job on Grid Engine."""

    nodes_environment: str | None = option(
        parse=values.word,
        doc="Parallel environment (-pe) of a job of several nodes. Its allocation rule must be the number of `cores`, "
        "so that each node gives as many slots; and it must start processes on all of them (control_slaves TRUE).",
    )


@dataclass(frozen=True, kw_only=True)
class GridEngineSchedulerOptions(GridEngineJobOptions, SchedulerOptions):
    """The scheduler job on Grid Engine."""


def check(job: GridEngineJobOptions, where: str) -> None:
    """Refuse options that exclude one another.

    Raises
    ------
    OptionError
    """
    if (
        isinstance(job, GridEngineWorkerOptions)
        and job.nodes_per_job > 1
        and not (job.nodes_environment or job.node_type)
    ):
        raise OptionError(
            f"{where}nodes_per_job={job.nodes_per_job} needs nodes_environment: the parallel environment that gives "
            "`cores` slots of each node (`qconf -spl` lists them, `qconf -sp NAME` shows one)"
        )
    if job.node_type:
        usual = GridEngineWorkerOptions()
        for name in ("parallel_environment", "nodes_environment", "gpu_resource", "gpus_counted", "memory_resource"):
            if (given := getattr(job, name, None)) not in (None, getattr(usual, name)):
                raise OptionError(
                    f"{where}{name}={given!r} has no effect beside node_type={job.node_type!r}, which is all that a "
                    "job requests of a node: remove one of the two"
                )
    asked = job.gpus_per_node > 0 and job.gpu_request != "none" and not job.node_type
    if isinstance(job, GridEngineWorkerOptions) and job.nodes_per_job > 1 and asked and job.gpus_counted == "job":
        raise OptionError(
            f"{where}nodes_per_job={job.nodes_per_job} needs gpus_counted='slot' or 'node': see the column "
            f"'consumable' of {job.gpu_resource} in `qconf -sc`. YES is 'slot' and HOST is 'node'. If it is JOB, Grid "
            "Engine counts the GPUs of the first node only, and gives the others to other jobs too: ask your site"
        )
    if job.gpus_counted == "slot" and job.gpu_request != "none" and job.gpus_per_node % (job.cores or 1):
        raise OptionError(
            f"{where}gpus_per_node={job.gpus_per_node} with gpus_counted='slot' must be a multiple of the slots, "
            f"which are cores={job.cores or 1}"
        )
