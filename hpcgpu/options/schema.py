"""The one definition of every option: name, type, default, meaning, how it is read.

Keyword arguments, dask config, the configuration template, signatures, docstrings and error messages all come from the dataclasses
here. This room knows no batch system and submits nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import getpass
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import dask.config

from hpcgpu.errors import OptionError
from hpcgpu.options import origin, profiles, values

__all__ = [
    "DEFAULT",
    "ClusterOptions",
    "JobOptions",
    "Options",
    "SchedulerOptions",
    "WorkerOptions",
    "cluster_directories",
    "resolve",
    "resolve_group",
]

_T = TypeVar("_T")

#: Name of the worker group that every cluster has.
DEFAULT = "default"


def option(
    default: Any = None, *, parse: Callable[[str, Any], Any], doc: str, inherited: bool = False, flag: str = "", pbs_only: bool = False
) -> Any:
    """Declare an option.

    Parameters
    ----------
    default
        Its value when neither argument nor configuration gives one.
    parse : callable
        Turns ``(name, value)`` into the value kept, or raises `OptionError`.
    doc : str
        What it means, for people.
    inherited : bool, default False
        The scheduler job takes the worker's value unless it has its own.
    flag : str, optional
        The option of the worker command that this value is passed on with.
    pbs_only : bool, default False
        It means nothing to other batch systems, and is refused there.
    """
    return field(default=default, metadata={"parse": parse, "doc": doc, "inherited": inherited, "flag": flag, "pbs_only": pbs_only})


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks of the batch system, and how its script begins. Amounts are per node."""

    queue: str | None = option(parse=values.word, inherited=True, doc="Queue (Slurm: partition) to submit to; several joined by commas.")
    account: str | None = option(parse=values.word, inherited=True, doc="Account to charge.")
    qos: str | None = option(parse=values.word, inherited=True, doc="Quality of service.")
    reservation: str | None = option(parse=values.word, inherited=True, doc="Reservation to run in.")
    walltime: int | None = option(
        parse=values.walltime,
        inherited=True,
        doc="Longest run time of a job: '02:00:00', '1-12:00:00', '2h'. Without it the queue's default holds.",
    )
    cores: int | None = option(parse=values.positive, doc="CPU cores per node.")
    memory: int | None = option(
        parse=values.memory, doc="Memory per node, such as '60GB'. Without it none is asked for; on PBS 4 GiB for each GPU, at least 4 GiB."
    )
    gpus_per_node: int = option(1, parse=values.natural, doc="GPUs per node; one Dask worker runs on each. 0 makes CPU workers.")
    gpu_type: str | None = option(parse=values.word, doc="Type of GPU, by the batch system's name for it, such as 'a100'.")
    gpu_request: str = option(
        "gres",
        parse=values.choice("gres", "gpus-per-node", "gpus", "none"),
        inherited=True,
        doc="How GPUs are asked for in Slurm: --gres, --gpus-per-node, --gpus, or not at all (sites that give whole nodes). On PBS: ngpus, "
        "or not at all.",
    )
    select_extra: str | None = option(
        parse=values.chunk,
        pbs_only=True,
        doc="PBS: further resources of each chunk, such as 'system=polaris' or 'cputype=milan:job_type=x'.",
    )
    resource_list: tuple[tuple[str, str], ...] = option(
        (),
        parse=values.resource_list,
        inherited=True,
        pbs_only=True,
        doc="PBS: further resources of the job as a whole (-l), a dict such as {'filesystems': 'home:eagle'}.",
    )
    place: str | None = option(
        parse=values.word,
        pbs_only=True,
        doc="PBS: how chunks are placed (-l place), such as 'scatter:excl'. Default: 'scatter' for jobs of several nodes.",
    )
    pbs_shape: str = option(
        "select",
        parse=values.choice("select", "flat"),
        inherited=True,
        pbs_only=True,
        doc="PBS: how resources are asked for: in chunks (-l select=1:ncpus=...), or each by itself (-l ncpus=..., such as NCI's Gadi).",
    )
    constraint: str | None = option(parse=values.filled, doc="Node features that are required, in Slurm's syntax.")
    prefer: str | None = option(parse=values.filled, doc="Node features that are preferred but not required (Slurm 22.05 and later).")
    job_extra_directives: tuple[str, ...] = option(
        (), parse=values.lines, doc="Further directives, one option an entry: ['--exclusive', '--mail-type=END']."
    )
    job_directives_skip: tuple[str, ...] = option(
        (), parse=values.lines, inherited=True, doc="Directives to leave out, by option name: ['--mem', '-N']."
    )
    job_script_prologue: tuple[str, ...] | Path = option(
        (), parse=values.prologue, inherited=True, doc="Shell lines to run first (['module load cuda']), or the path of a file to source."
    )
    env: tuple[tuple[str, str], ...] = option(
        (), parse=values.environment, inherited=True, doc="Environment variables of the job, a dict; values arrive as they are, unexpanded."
    )
    python: str = option(
        sys.executable, parse=values.program, inherited=True, doc="Python to run in the job. Default: the one that runs this."
    )
    shebang: str = option("#!/usr/bin/env bash", parse=values.shebang, inherited=True, doc="First line of the job script.")
    local_directory: str | None = option(
        parse=values.path_on_node,
        inherited=True,
        doc="Fast directory on the node for spilling and temporary files of Dask; variables such as $TMPDIR are the job's.",
    )
    interface: str | None = option(
        parse=values.interface,
        inherited=True,
        doc="Network interface that workers and scheduler talk over, such as 'ib0'. Default, and 'auto': in the job, that of Slingshot or "
        "InfiniBand where it has an IPv4 address, else that of the default route.",
    )
    ucx_env: tuple[tuple[str, str], ...] = option(
        (),
        parse=values.ucx_environment,
        inherited=True,
        doc="Variables of UCX for scheduler and workers alike, a dict such as {'UCX_IB_GPU_DIRECT_RDMA': 'n'}.",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(JobOptions):
    """A worker job: one `dask cuda worker` on each node, one Dask worker on each GPU."""

    nodes_per_job: int = option(1, parse=values.positive, doc="Nodes of one job.")
    pbs_launcher: str = option(
        "pbsdsh",
        parse=values.command,
        pbs_only=True,
        doc="PBS: what starts a process on each node of a job of several: 'pbsdsh', or an MPI launcher such as 'mpiexec --ppn 1', which "
        "gets -n with the number of nodes.",
    )
    nthreads: int | None = option(
        parse=values.positive, doc="Threads of one Dask worker. Default: 1 with a GPU (dask-cuda's default), else `cores`."
    )
    resources: tuple[tuple[str, float], ...] | None = option(
        parse=values.resources, doc="Abstract resources of one Dask worker. Default: {'GPU': 1} with a GPU, else none."
    )
    death_timeout: float = option(
        300.0,
        parse=values.duration,
        inherited=True,
        doc="How long a running worker waits for the scheduler before it gives up, seconds or '5m'.",
    )
    walltime_margin: float | None = option(
        parse=values.duration,
        inherited=True,
        doc="How long before the end of a job's walltime its workers begin to retire, at least; more if they hold much data. Default: a "
        "tenth of the walltime, 30 s at least and 5 min at most.",
    )
    worker_extra_args: tuple[str, ...] = option(
        (), parse=values.lines, doc="Further arguments of the worker command; each reaches it as it is, unexpanded."
    )
    device_memory_limit: str | None = option(
        parse=values.size_or_fraction, flag="--device-memory-limit", doc="GPU memory at which a worker begins to spill (dask-cuda)."
    )
    rmm_pool_size: str | None = option(
        parse=values.size_or_fraction, flag="--rmm-pool-size", doc="GPU memory pool of a worker (dask-cuda, RMM)."
    )
    rmm_maximum_pool_size: str | None = option(
        parse=values.size_or_fraction, flag="--rmm-maximum-pool-size", doc="Upper limit of the GPU memory pool (dask-cuda, RMM)."
    )
    rmm_managed_memory: bool | None = option(
        parse=values.boolean, flag="--rmm-managed-memory", doc="Pool of managed memory (dask-cuda, RMM)."
    )
    rmm_async: bool | None = option(
        parse=values.boolean, flag="--rmm-async", doc="CUDA's stream-ordered allocator instead of a pool (dask-cuda, RMM)."
    )
    rmm_release_threshold: str | None = option(
        parse=values.size_or_fraction, flag="--rmm-release-threshold", doc="Memory kept by the stream-ordered allocator (dask-cuda, RMM)."
    )
    enable_cudf_spill: bool | None = option(
        parse=values.boolean, flag="--enable-cudf-spill", doc="cuDF's own spilling instead of dask-cuda's."
    )
    pre_import: str | None = option(
        parse=values.word, flag="--pre-import", doc="Modules to import on the workers first, joined by commas: 'cudf,rmm' (dask-cuda)."
    )
    enable_tcp_over_ucx: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag="--enable-tcp-over-ucx",
        doc="UCX over TCP (dask-cuda). Leave unset for automatic transports.",
    )
    enable_infiniband: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag="--enable-infiniband",
        doc="UCX over InfiniBand (dask-cuda). Leave unset for automatic transports.",
    )
    enable_nvlink: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag="--enable-nvlink",
        doc="UCX over NVLink (dask-cuda). Leave unset for automatic transports.",
    )
    enable_rdmacm: bool | None = option(
        parse=values.boolean, inherited=True, flag="--enable-rdmacm", doc="RDMA connection manager for UCX (dask-cuda)."
    )

    @property
    def workers_per_job(self) -> int:
        """Dask workers that one job brings."""
        return self.nodes_per_job * max(1, self.gpus_per_node)

    def worker_resources(self) -> tuple[tuple[str, float], ...]:
        """Abstract resources of one Dask worker, with the default applied."""
        if self.resources is not None:
            return self.resources
        return (("GPU", 1.0),) if self.gpus_per_node else ()

    def passed_on(self) -> Iterator[tuple[str, Any]]:
        """Flags of the worker command that come from options of the same name, with their values."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.metadata["flag"] and value is not None:
                yield f.metadata["flag"], value

    def __post_init__(self) -> None:
        if self.gpus_per_node == 0:
            for f in dataclasses.fields(self):
                if f.metadata["flag"] and getattr(self, f.name) is not None:
                    raise OptionError(f"{f.name} is an option of GPU workers, but gpus_per_node is 0")
        for i, argument in enumerate(self.worker_extra_args):
            flag = re.split(r"[=\s]", argument.strip(), maxsplit=1)[0]
            if owner := _OWNED_ARGUMENTS.get(flag):
                raise OptionError(f"worker_extra_args: {flag} is set by {owner}")
            if flag.startswith("-") and not argument.strip().startswith(f"{flag}=") and flag != argument.strip():
                name, _, value = argument.strip().partition(" ")
                raise OptionError(
                    f"worker_extra_args[{i}]={argument!r} holds an option and its value in one: write {name!r}, {value.strip()!r}"
                )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(JobOptions):
    """The scheduler job. What it does not set itself it takes from the workers, where that makes sense (`inherited`)."""

    dashboard_address: str | None = option(
        parse=values.listen_address,
        doc="Where the dashboard listens in the job, such as '127.0.0.1:0'. Default: a free port of the address by which clients reach the "
        "scheduler, and no other; ':0' is a free port of all addresses.",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The cluster as a whole."""

    name: str = option("", parse=values.cluster_name, doc="Name of the cluster: its directory, and the beginning of its jobs' names.")
    profile: str | None = option(parse=values.profile_name, doc="Profile of the site, such as 'perlmutter'; see `hpcgpu profiles list`.")
    jobs: int = option(0, parse=values.natural, doc="Worker jobs to submit at the start.")
    protocol: str = option(
        "auto",
        parse=values.choice("auto", "ucx", "tcp", "tls"),
        doc="What workers and scheduler talk: 'ucx', 'tcp' ('tls' is tcp, which is encrypted by default), or 'auto': ucx where the "
        "scheduler's node has all that it needs, else tcp.",
    )
    client_interface: str | None = option(
        parse=values.interface,
        doc="Interface of the scheduler's node by which clients reach it. Default, and 'auto': the one of its default route.",
    )
    security: bool = option(
        True, parse=values.boolean, doc="TLS with credentials made for this cluster. False lets anyone who reaches a port run code as you."
    )
    cluster_directory: Path = option(
        Path("~/.hpcgpu/clusters").expanduser(),
        parse=values.directory,
        doc="Directory on the shared filesystem in which each cluster has its own, by name; variables such as $SCRATCH are expanded.",
    )
    log_directory: Path | None = option(
        parse=values.directory, doc="Directory of the jobs' logs. Default: `logs` in the cluster's own directory."
    )
    template_directory: Path | None = option(
        parse=values.existing_directory, doc="Directory of your own templates; those not there are taken from hpcgpu."
    )
    idle_timeout: float | None = option(
        parse=values.duration, doc="The scheduler, and with it the cluster, ends after so long without work; seconds or '1h'."
    )
    lease: float | None = option(
        600.0,
        parse=values.duration_or_none,
        doc="The scheduler, and with it the cluster, ends when it has not heard of this program for so long: after a crash, or kill -9. "
        "0 lets it live.",
    )
    worker_restarts: int = option(
        2, parse=values.natural, doc="Worker jobs that may fail in a row and be replaced before the cluster pauses and says so."
    )
    poll_interval: float = option(
        10.0, parse=values.duration, doc="Seconds between two questions to the queue; four times as long while nothing is pending."
    )
    shutdown_on_close: bool = option(
        True,
        parse=values.boolean,
        doc="Cancel the cluster's jobs when it is closed, and when this program ends. False leaves them to idle_timeout and walltime; "
        "from_name takes the cluster up again.",
    )
    wait: bool = option(
        True,
        parse=values.boolean,
        doc="Wait for the scheduler before going on. False returns as soon as the scheduler job is submitted, for queues that take hours.",
    )
    if_exists: str = option(
        "error",
        parse=values.choice("error", "connect"),
        doc="Where a cluster of this name has jobs in the queue: 'error', or 'connect' to take it over as from_name does.",
    )
    environment_check: str = option(
        "error",
        parse=values.choice("error", "warn", "off"),
        doc="What differences in software and GPUs between client, scheduler and workers do that cannot work: 'error', or 'warn'. Lesser "
        "ones are warnings. 'off' compares nothing.",
    )
    quiet: bool = option(False, parse=values.boolean, doc="No progress messages.")


@dataclass(frozen=True)
class Options:
    """All options of one cluster, read and checked. `scheduler` is None when the scheduler runs in the client's process."""

    cluster: ClusterOptions
    worker: WorkerOptions
    scheduler: SchedulerOptions | None
    system: str = "slurm"


#: Batch systems, each with a section of the configuration.
SYSTEMS = ("slurm", "pbs", "local")

#: Options that PBS does not have, and what to write there.
_NOT_IN_PBS = {
    "qos": "PBS has none; many sites have a queue instead: set queue",
    "reservation": "in PBS a reservation is a queue: set queue to its name",
    "constraint": "set select_extra to the resources that a node must have, such as 'gpu_type=a100'",
    "prefer": "PBS has no preferences; set select_extra or gpu_type to what a node must have",
}

#: Names that mean the same as one of ours.
ALIASES = {"partition": "queue", "n_jobs": "jobs", "project": "account"}

#: Names that other tools use, and what to write here.
_FOREIGN = {
    "processes": "one Dask worker runs per GPU: set gpus_per_node (and nodes_per_job)",
    "n_workers": "workers come by whole jobs: set jobs, or call scale(n)",
    "job_cpu": "set cores",
    "job_mem": "set memory",
    "job_name": "set name: jobs are named after the cluster",
    "gpus": "set gpus_per_node (and nodes_per_job, jobs)",
    "n_gpus": "set gpus_per_node (and nodes_per_job, jobs)",
    "nodes": "set nodes_per_job and jobs",
    "time": "set walltime",
    "job_extra": "set job_extra_directives",
    "header_skip": "set job_directives_skip",
    "env_extra": "set env, or job_script_prologue for shell lines",
    "extra": "set worker_extra_args",
    "host": "set interface",
    "shared_temp_directory": "set cluster_directory",
    "scheduler_options": "set scheduler={...}",
    "nanny": "workers always have a nanny",
    "worker_command": "workers always run `dask cuda worker`, with gpus_per_node=0 `dask worker`: leave it out",
    "config_name": "there is none: the sections of the configuration are hpcgpu.slurm, hpcgpu.pbs and hpcgpu.local",
    "resource_spec": "set cores, memory and gpus_per_node; on PBS select_extra, resource_list and place hold the rest",
    "job_script_epilogue": "there is none: the Dask command replaces the script of the job, so nothing can run after it",
    "job_cls": "the class of the cluster decides: SlurmGPUCluster, PBSGPUCluster, LocalGPUCluster; scripts of your own: template_directory",
    "gres": "set gpus_per_node and gpu_type; gpu_request says how they are asked for",
    "port": "the scheduler takes a free port, which clients find in the cluster directory: leave it out",
    "mem": "set memory",
    "cpus": "set cores",
    "ncpus": "set cores",
    "cpus_per_task": "set cores",
    "ngpus": "set gpus_per_node (and nodes_per_job, jobs)",
    "silence_logs": "set quiet=True",
    "scheduler_cls": "set scheduler={...}, or scheduler='local' for a scheduler in this program",
    "lifetime": "workers retire before the walltime ends by themselves: set walltime and walltime_margin",
    "memory_limit": "set memory: each worker gets its share",
    "threads_per_worker": "set nthreads",
    "dashboard_address": "it is an option of the scheduler job: scheduler={'dashboard_address': ...}",
}

#: Arguments of the worker command that hpcgpu sets itself, and by which option.
_OWNED_ARGUMENTS = {
    "--name": "hpcgpu: workers are named after their job",
    "--nthreads": "the option nthreads",
    "--resources": "the option resources",
    "--memory-limit": "the option memory",
    "--death-timeout": "the option death_timeout",
    **dict.fromkeys(
        ("--lifetime", "--lifetime-stagger", "--lifetime-restart", "--no-lifetime-restart"),
        "hpcgpu, from the walltime of the job: remove it. The option walltime_margin says how long before the end of the walltime workers "
        "retire and a new job replaces theirs",
    ),
    **dict.fromkeys(("--nanny", "--no-nanny"), "hpcgpu: workers always have a nanny"),
    "--host": "the option interface",
    "--local-directory": "the option local_directory",
    "--interface": "the option interface",
    "--protocol": "the option protocol",
    "--scheduler-file": "hpcgpu, from the cluster's contact file",
    "--nworkers": "the option gpus_per_node",
    "--tls-ca-file": "the option security",
    "--tls-cert": "the option security",
    "--tls-key": "the option security",
} | {
    spelling: f"the option {f.name}"
    for f in dataclasses.fields(WorkerOptions)
    if f.metadata["flag"]
    for spelling in (f.metadata["flag"], f.metadata["flag"].replace("--enable-", "--disable-"), f.metadata["flag"].replace("--", "--no-"))
}


def names(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of one of the dataclasses, by name."""
    return {f.name: f for f in dataclasses.fields(cls)}


def resolve(system: str, arguments: Mapping[str, Any]) -> Options:
    """Read all options: keyword arguments over dask config over defaults.

    Parameters
    ----------
    system : str
        The batch system, which names the section of the configuration: ``hpcgpu.slurm.queue`` counts before ``hpcgpu.queue``.
    arguments : mapping
        Keyword arguments as the user gave them; None counts as not given. ``scheduler`` is a dict of `SchedulerOptions`, or "local".

    Raises
    ------
    OptionError
        Unknown option, or a value that cannot be.
    """
    given = _canonical({k: v for k, v in arguments.items() if v is not None and k != "scheduler"}, "", ("cluster", "worker"))
    config, sections = _configured(system)
    site = given.get("profile", config.get("profile"))
    profile = profiles.load(site, system) if site is not None else None
    known = _plain(profile.options) if profile is not None else {}
    where = f"profile {site!r}: "
    scheduler = arguments.get("scheduler")
    if isinstance(scheduler, Mapping):
        scheduler = _canonical({k: v for k, v in scheduler.items() if v is not None}, "scheduler: ", ("scheduler",))
    above = scheduler if isinstance(scheduler, Mapping) else {}
    of_scheduler = {name.removeprefix("scheduler."): section for name, section in sections.items() if name.startswith("scheduler.")}
    of_scheduler = {name: section for name, section in of_scheduler.items() if name not in above}
    scheduler = _layered(known.pop("scheduler", None), config.pop("scheduler", None), scheduler)
    merged = _canonical(config, "", ("cluster", "worker"), sections) | given
    if profile is not None:
        profile.check(merged)
        merged = _canonical(known, where, ("cluster", "worker")) | merged
    origins = {
        **dict.fromkeys(known, where),
        **{name: f"dask config {section}: " for name, section in sections.items()},
        **dict.fromkeys(given, ""),
    }

    cluster = _build(ClusterOptions, {k: v for k, v in merged.items() if k in names(ClusterOptions)}, origins)
    if not cluster.name:
        cluster = dataclasses.replace(cluster, name=f"{_user()}-{uuid.uuid4().hex[:8]}")
    worker = _build(WorkerOptions, {k: v for k, v in merged.items() if k in names(WorkerOptions)}, origins)
    _check_together(cluster, worker)
    _check_system(system, worker)
    if scheduler == "local":
        if cluster.protocol == "ucx":
            raise OptionError(
                "scheduler='local' cannot be with protocol='ucx': UCX would hold GPU memory in this program, and must start before "
                "anything else in it uses CUDA. Leave scheduler out, so that it gets a job with a GPU, or use protocol='tcp'"
            )
        return Options(cluster, worker, None, system)
    if not isinstance(scheduler, Mapping):
        raise OptionError(f"scheduler must be a dict of options of the scheduler job, or 'local', not {scheduler!r}")
    own = _canonical({k: v for k, v in scheduler.items() if v is not None}, "scheduler: ", ("scheduler",), of_scheduler)
    built = _scheduler_options(own, cluster, worker, {name: f"dask config {section}: " for name, section in of_scheduler.items()})
    _check_system(system, built, "scheduler: ")
    return Options(cluster, worker, built, system)


def _layered(*layers: Any) -> Any:
    """Return the options of the scheduler job: of the layers, the last that names one counts; "local" replaces what is before it."""
    result: Any = {}
    for layer in layers:
        if isinstance(layer, Mapping) and isinstance(result, Mapping):
            result = {**result, **layer}
        elif layer is not None:
            result = layer
    return result


def cluster_directories() -> list[Path]:
    """Return the directories in which clusters have theirs, as the configuration of each batch system says."""
    name = "cluster_directory"
    roots = []
    for system in SYSTEMS:
        config, sections = _configured(system)
        own = {k: v for k, v in config.items() if k == name}
        roots.append(_build(ClusterOptions, own, {name: f"dask config {sections.get(name)}: "}).cluster_directory)
    return list(dict.fromkeys(roots))


def resolve_group(name: str, arguments: Mapping[str, Any], base: Options) -> WorkerOptions:
    """Read the options of a further group of workers; account, walltime, environment and the like are the default group's.

    Parameters
    ----------
    name : str
        Of the group.
    arguments : mapping
        Options of a worker job; None counts as not given.
    base : Options
        Of the cluster.

    Raises
    ------
    OptionError
        Unknown option, or a value that cannot be.
    """
    values.cluster_name("worker group", name)
    where = f"worker group {name!r}: "
    own = _canonical({k: v for k, v in arguments.items() if v is not None}, where, ("worker",))
    built = _build(WorkerOptions, own, dict.fromkeys(own, where))
    inherited = {
        field: getattr(base.worker, field)
        for field, f in names(WorkerOptions).items()
        if f.metadata["inherited"] and field not in own and not (f.metadata["flag"] and built.gpus_per_node == 0)
    }
    if "env" in own:
        inherited["env"] = tuple((dict(base.worker.env) | dict(built.env)).items())
    group = dataclasses.replace(built, **inherited)
    without_gpu = base.scheduler is not None and base.scheduler.gpus_per_node == 0
    if base.cluster.protocol == "ucx" and group.gpus_per_node and without_gpu:
        raise OptionError(
            f"{where}GPUs cannot be with protocol='ucx' and a scheduler that has none: over UCX the scheduler itself holds GPU memory. "
            f"Start the cluster with scheduler={{'gpus_per_node': 1}}, or with protocol='tcp'"
        )
    _check_together(base.cluster, group)
    _check_system(base.system, group, where)
    return group


def _scheduler_options(
    own: Mapping[str, Any], cluster: ClusterOptions, worker: WorkerOptions, origins: Mapping[str, str]
) -> SchedulerOptions:
    """Options of the scheduler job: its own, what it inherits, and one GPU where the workers have GPUs."""
    built = _build(SchedulerOptions, own, {**dict.fromkeys(own, "scheduler: "), **origins})
    inherited = {name: getattr(worker, name) for name, f in names(JobOptions).items() if f.metadata["inherited"] and name not in own}
    if "env" in own:
        inherited["env"] = tuple((dict(worker.env) | dict(built.env)).items())
    if "gpus_per_node" not in own:
        inherited["gpus_per_node"] = min(1, worker.gpus_per_node)
    if not {"gpu_type", "prefer", "constraint", "queue", "select_extra"} & own.keys():
        inherited["select_extra"] = worker.select_extra
        inherited["gpu_type"] = worker.gpu_type if inherited.get("gpus_per_node") else None
    options = dataclasses.replace(built, **inherited)
    if options.gpus_per_node > 1:
        raise OptionError(f"scheduler: gpus_per_node={options.gpus_per_node}, but the scheduler uses one GPU: write 1 or 0")
    if cluster.protocol == "ucx" and options.gpus_per_node == 0 and worker.gpus_per_node:
        raise OptionError(
            "scheduler: gpus_per_node=0 cannot be with protocol='ucx': over UCX the scheduler itself holds GPU memory. "
            "Give it a GPU, or use protocol='tcp'"
        )
    return options


def _check_together(cluster: ClusterOptions, worker: WorkerOptions) -> None:
    if worker.gpu_type and worker.gpus_per_node == 0:
        raise OptionError(f"gpu_type={worker.gpu_type!r}, but gpus_per_node is 0: remove one of the two")


def _check_system(system: str, job: JobOptions, where: str = "") -> None:
    """Refuse what this batch system does not have and must not be passed over in silence."""
    for name, f in names(type(job)).items():
        value = getattr(job, name)
        if value == f.default:
            continue
        if f.metadata["pbs_only"] and system != "pbs":
            raise OptionError(f"{where}{name} is an option of PBS jobs, and means nothing here: remove it")
        if system == "pbs" and (advice := _NOT_IN_PBS.get(name)):
            raise OptionError(f"{where}{name}={value!r} is an option of Slurm jobs: {advice}")
    if system == "pbs" and job.gpu_request not in ("gres", "none"):
        raise OptionError(f"{where}gpu_request={job.gpu_request!r} is Slurm's: leave it out, or write 'none' to ask for no GPUs")
    if job.pbs_shape == "flat":
        if isinstance(job, WorkerOptions) and job.nodes_per_job > 1:
            raise OptionError(f"{where}nodes_per_job={job.nodes_per_job} cannot be with pbs_shape='flat': ask for more jobs instead")
        if job.select_extra:
            raise OptionError(f"{where}select_extra belongs to chunks, and pbs_shape='flat' has none: write resource_list={{...}}")


def _configured(system: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what dask config says for this batch system, its own section before the general one, and by option the section.

    Null counts as not given.
    """
    general = _section("hpcgpu", dask.config.get("hpcgpu", None))
    merged: dict[str, Any] = {}
    found: dict[str, str] = {}
    layers = {"hpcgpu": {k: v for k, v in general.items() if k not in SYSTEMS}, f"hpcgpu.{system}": general.get(system)}
    for section, layer in layers.items():
        own = _plain(_section(section, layer), section)
        merged |= own | {"scheduler": _layered(merged.get("scheduler"), own["scheduler"])} if "scheduler" in own else own
        found |= dict.fromkeys(own, section)
        if isinstance(own.get("scheduler"), Mapping):
            found |= {f"scheduler.{name}": f"{section}.scheduler" for name in own["scheduler"]}
    return merged, found


def _section(name: str, content: Any) -> Mapping[str, Any]:
    """Return a section of the configuration, empty if it is not there."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        above, _, last = name.rpartition(".")
        raise OptionError(
            f"{_configuration(name, above, last, content)} must hold options and their values, such as `cores: 4`, not {content!r:.100}"
        )
    return content


def _plain(layer: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return options of YAML by our own names: with underscores, null counts as not given; the scheduler's likewise."""
    _check_names(layer, section)
    named = {_spelled(key): value for key, value in layer.items() if value is not None}
    if isinstance(named.get("scheduler"), Mapping):
        named["scheduler"] = _plain(named["scheduler"], section and f"{section}.scheduler")
    return named


def _spelled(key: str) -> str:
    """Return the name of the option that a key of YAML means."""
    name = key.replace("-", "_")
    return ALIASES.get(name, name)


def _configuration(shown: str, section: str, name: str, value: Any) -> str:
    """Return what a message on a value of the configuration begins with: the section, and the file if that is known."""
    file = origin.file_of(section, name, value, _spelled)
    return f"dask config {shown} in {file}" if file else f"dask config {shown}"


def _check_names(given: Mapping[Any, Any], section: str = "") -> None:
    if (odd := next((key for key in given if not isinstance(key, str)), None)) is not None:
        where = f"{_configuration(section, section, odd, given[odd])}: " if section else ""
        raise OptionError(f"{where}{odd!r} is not the name of an option: write names such as `cores`")


def _canonical(given: Mapping[str, Any], where: str, owners: tuple[str, ...], sections: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Replace aliases by their option's name and refuse unknown options; `sections` says which of them dask config holds, and where."""
    known: dict[str, set[str]] = {
        "cluster": set(names(ClusterOptions)),
        "worker": set(names(WorkerOptions)),
        "scheduler": set(names(SchedulerOptions)),
    }
    allowed = set().union(*(known[owner] for owner in owners))
    result: dict[str, Any] = {}
    _check_names(given)
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name in result:
            raise OptionError(f"{where}{key} and {name} mean the same: give one of them")
        if name not in allowed:
            section = (sections or {}).get(key)
            if section is not None:
                where = f"{_configuration(section, section, key, value)}: "
            if isinstance(value, Mapping) and section is not None and key not in _FOREIGN:
                raise OptionError(f"{where}unknown section {key!r}: the sections are {', '.join(SYSTEMS)} and scheduler")
            raise OptionError(where + _unknown(key, allowed, {o: n for o, n in known.items() if o not in owners}))
        result[name] = value
    return result


def _unknown(key: str, allowed: set[str], elsewhere: Mapping[str, set[str]]) -> str:
    if owner := next((o for o, n in elsewhere.items() if key in n), None):
        if owner == "scheduler":
            return f"{key} is an option of the scheduler job: write scheduler={{{key!r}: ...}}"
        return f"{key} is not an option of the scheduler job, but of the {owner}: write it beside scheduler="
    if advice := _FOREIGN.get(key):
        return f"unknown option {key!r}: {advice}"
    near = difflib.get_close_matches(key, sorted(allowed | set(ALIASES)), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(sorted(allowed))}"
    return f"unknown option {key!r}: {hint}"


def _build(cls: type[_T], given: Mapping[str, Any], origins: Mapping[str, str]) -> _T:
    """Read options; `origins` says by name what to put before it in a message: where its value comes from."""
    fields = names(cls)
    parsed = {}
    for name, value in given.items():
        parse, where = fields[name].metadata["parse"], origins.get(name, "")
        try:
            parsed[name] = parse(where + name, value)
        except OptionError:
            if where.startswith("dask config "):  # refuse it again by a message that names the file, which takes time to find
                section = where.removeprefix("dask config ").removesuffix(": ")
                parse(f"{_configuration(section, section, name, value)}: {name}", value)
            raise
    return cls(**parsed)


def _user() -> str:
    """Return the user's name as far as it can stand in a cluster's name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no entry in the password database, as in some containers
        name = "user"
    kept = "".join(c for c in name if c.isalnum() and c.isascii())
    return kept[:20] or "user"
