"""The options that all batch systems share: of a job, a worker job, the scheduler job and the cluster.

The options of one batch system, such as Slurm's `reservation`, are in ``hpcgpu/batch/SYSTEM/options.py``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.options.declare import flag_of, option

#: Name of the worker group that every cluster has.
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job requests from the batch system, and how its script begins. Amounts are per node."""

    #: What to write instead of options that only other batch systems have.
    instead: ClassVar[Mapping[str, str]] = {}

    queue: str | None = option(
        parse=values.word,
        inherited=True,
        nodes="chosen",
        doc="Queue (Slurm: partition) to submit to; several joined by commas.",
    )
    account: str | None = option(parse=values.word, inherited=True, doc="Account to charge.")
    walltime: int | None = option(
        parse=values.walltime,
        inherited=True,
        doc="Longest run time of a job: '02:00:00', '1-12:00:00', '2h'. Default: that of the queue.",
    )
    cores: int | None = option(parse=values.positive, doc="CPU cores per node.")
    memory: int | None = option(
        parse=values.memory,
        doc="Memory per node, such as '60GB'. Default: none is requested. On PBS: 4 GiB per GPU, or 4 GiB if "
        "the job has no GPUs.",
    )
    gpus_per_node: int = option(
        1, parse=values.natural, doc="GPUs per node; one Dask worker runs on each. 0 makes CPU workers."
    )
    gpu_type: str | None = option(
        parse=values.word, nodes="inherited", doc="Type of GPU, by the batch system's name for it, such as 'a100'."
    )
    gpu_request: str | None = option(
        parse=values.choice("none"),
        inherited=True,
        doc="How GPUs are requested. Default: by the batch system's own option; 'none' requests none, for sites "
        "that give whole nodes.",
    )
    job_extra_directives: tuple[str, ...] = option(
        (), parse=values.lines, doc="Further directives, one option in each entry: ['--exclusive', '--mail-type=END']."
    )
    job_directives_skip: tuple[str, ...] = option(
        (), parse=values.lines, inherited=True, doc="Directives to leave out, by option name: ['--mem', '-N']."
    )
    job_script_prologue: tuple[str, ...] | Path = option(
        (),
        parse=values.prologue,
        inherited=True,
        doc="Shell lines to run first (['module load cuda']), or the path of a file to source.",
    )
    env: tuple[tuple[str, str], ...] = option(
        (),
        parse=values.environment,
        inherited=True,
        doc="Environment variables of the job, a dict. Values are not expanded.",
    )
    python: str = option(
        sys.executable,
        parse=values.program,
        inherited=True,
        doc="Python interpreter of the job. Default: the one of this program; in a container, the image's python3.",
    )
    container: str | None = option(
        parse=values.image,
        inherited=True,
        doc="Image of the container in which the Dask processes run: a path such as '/shared/rapids.sif', or a name "
        "that the container runtime knows.",
    )
    container_runtime: str = option(
        "apptainer",
        parse=values.word,
        inherited=True,
        doc="What runs the container: 'apptainer', 'singularity', 'charliecloud', 'podman', 'podman-hpc', 'shifter', "
        "on Slurm 'pyxis', or a name in `container_runtimes`.",
    )
    container_mounts: tuple[str, ...] = option(
        (),
        parse=values.container_mounts,
        inherited=True,
        doc="Further directories of the node to mount in the container: ['/data', '/scratch/me:/scratch:ro']. The job "
        "expands variables such as $SCRATCH. Your home directory, the working directory, the cluster directory, "
        "$TMPDIR and `local_directory` need no entry, except with shifter, where the site decides.",
    )
    container_args: tuple[str, ...] = option(
        (),
        parse=values.lines,
        inherited=True,
        doc="Further arguments of the container runtime, one in each entry. They are not expanded.",
    )
    stage: Path | None = option(
        parse=values.archive,
        inherited=True,
        doc="Archive of the jobs' environment, made by conda-pack or venv-pack: '.tar.zst', '.tar.gz' or '.tar'. Each "
        "node unpacks it on its own disk, and your jobs that run there at the same time share it. The interpreter "
        "`python` only unpacks it.",
    )
    shebang: str = option(
        "#!/usr/bin/env bash", parse=values.shebang, inherited=True, doc="First line of the job script."
    )
    local_directory: str | None = option(
        parse=values.path_on_node,
        inherited=True,
        doc="Fast directory on the node for spilled data and temporary files of Dask. The job expands variables "
        "such as $TMPDIR.",
    )
    interface: str | None = option(
        parse=values.interface,
        inherited=True,
        doc="Network interface between workers and scheduler, such as 'ib0'. By default (or with 'auto') the job "
        "chooses a Slingshot or InfiniBand interface that has an IPv4 address, or else the interface of the "
        "default route.",
    )
    ucx_env: tuple[tuple[str, str], ...] = option(
        (),
        parse=values.ucx_environment,
        inherited=True,
        doc="Environment variables of UCX for scheduler and workers, a dict such as {'UCX_IB_GPU_DIRECT_RDMA': 'n'}.",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(JobOptions):
    """A worker job: one `dask cuda worker` on each node, one Dask worker on each GPU."""

    nodes_per_job: int = option(1, parse=values.positive, doc="Nodes of one job.")
    nthreads: int | None = option(
        parse=values.positive,
        doc="Threads of one Dask worker. Default: 1 with a GPU (dask-cuda's default), else `cores`.",
    )
    resources: tuple[tuple[str, float], ...] | None = option(
        parse=values.resources,
        doc="Abstract resources of one Dask worker, a dict. Default: {'GPU': 1} with a GPU, else none.",
    )
    death_timeout: float = option(
        300.0,
        parse=values.duration,
        inherited=True,
        doc="How long a running job waits for the scheduler before it ends, and how long the cluster waits for a "
        "missing worker before it replaces the job; seconds or '5m'.",
    )
    walltime_margin: float | None = option(
        parse=values.duration,
        inherited=True,
        doc="How long before the end of the walltime the workers of a job begin to retire, at least. They begin "
        "earlier if they hold much data. Default: a tenth of the walltime, between 30 s and 5 min.",
    )
    worker_start: str = option(
        "forkserver",
        parse=values.choice("forkserver", "spawn"),
        doc="How the workers of a node start: 'forkserver' imports Dask once and forks the workers, 'spawn' starts a "
        "new Python for each, which is slower and needs more memory. Where a fork could do harm, the job spawns, and "
        "its log says why.",
    )
    worker_extra_args: tuple[str, ...] = option(
        (), parse=values.lines, doc="Further arguments of the worker command. They are not expanded."
    )
    device_memory_limit: str | None = option(
        parse=values.size_or_fraction, flag=True, doc="GPU memory at which a worker begins to spill (dask-cuda)."
    )
    rmm_pool_size: str | None = option(
        parse=values.size_or_fraction, flag=True, doc="GPU memory pool of a worker (dask-cuda, RMM)."
    )
    rmm_maximum_pool_size: str | None = option(
        parse=values.size_or_fraction, flag=True, doc="Upper limit of the GPU memory pool (dask-cuda, RMM)."
    )
    rmm_managed_memory: bool | None = option(
        parse=values.boolean, flag=True, doc="Use managed memory for the pool (dask-cuda, RMM)."
    )
    rmm_async: bool | None = option(
        parse=values.boolean, flag=True, doc="Use CUDA's stream-ordered allocator instead of a pool (dask-cuda, RMM)."
    )
    rmm_release_threshold: str | None = option(
        parse=values.size_or_fraction,
        flag=True,
        doc="How much free GPU memory the stream-ordered allocator keeps for itself (dask-cuda, RMM).",
    )
    enable_cudf_spill: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag=True,
        doc="Use cuDF's own spilling instead of dask-cuda's; the same for all groups. If your program has a GPU and "
        "gets tables of cuDF, it needs the environment variable CUDF_SPILL=on.",
    )
    pre_import: str | None = option(
        parse=values.word,
        flag=True,
        doc="Modules that workers import at their start, joined by commas: 'cudf,rmm' (dask-cuda).",
    )
    enable_tcp_over_ucx: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag=True,
        doc="Let UCX use TCP (dask-cuda). Default: UCX chooses its transports.",
    )
    enable_infiniband: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag=True,
        doc="Let UCX use InfiniBand (dask-cuda). Default: UCX chooses its transports.",
    )
    enable_nvlink: bool | None = option(
        parse=values.boolean,
        inherited=True,
        flag=True,
        doc="Let UCX use NVLink (dask-cuda). Default: UCX chooses its transports.",
    )
    enable_rdmacm: bool | None = option(
        parse=values.boolean, inherited=True, flag=True, doc="Let UCX use the RDMA connection manager (dask-cuda)."
    )

    @property
    def workers_per_job(self) -> int:
        """Number of Dask workers of one job."""
        return self.nodes_per_job * max(1, self.gpus_per_node)

    @property
    def memory_per_worker(self) -> int | None:
        """Bytes of one Dask worker, its memory limit; None if the memory of a node is not known."""
        return self.memory // max(1, self.gpus_per_node) if self.memory is not None else None

    def worker_resources(self) -> tuple[tuple[str, float], ...]:
        """Abstract resources of one Dask worker, with the default applied."""
        if self.resources is not None:
            return self.resources
        return (("GPU", 1.0),) if self.gpus_per_node else ()

    def ucx_transports(self) -> dict[str, bool | None]:
        """UCX transports by the names of their options. If a user only switches some off, the others are on."""
        flags = {name: getattr(self, name) for name in ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")}
        only_off = False in flags.values() and True not in flags.values()
        return {name: True if only_off and value is None else value for name, value in flags.items()}

    def passed_on(self) -> Iterator[tuple[str, Any]]:
        """Flags of the worker command that come from options of the same name, with their values."""
        transports = self.ucx_transports()
        for f in dataclasses.fields(self):
            value = transports.get(f.name, getattr(self, f.name))
            if f.metadata["flag"] and value is not None:
                yield flag_of(f), value

    def __post_init__(self) -> None:
        if self.gpus_per_node == 0:
            for f in dataclasses.fields(self):
                if f.metadata["flag"] and getattr(self, f.name) is not None:
                    raise OptionError(
                        f"{f.name} is an option of GPU workers, but gpus_per_node is 0: remove one of the two"
                    )
        for i, argument in enumerate(self.worker_extra_args):
            flag = re.split(r"[=\s]", argument.strip(), maxsplit=1)[0]
            if owner := _OWNED_ARGUMENTS.get(flag):
                raise OptionError(f"worker_extra_args: {flag} is set by {owner}")
            if flag.startswith("-") and not argument.strip().startswith(f"{flag}=") and flag != argument.strip():
                name, _, value = argument.strip().partition(" ")
                raise OptionError(
                    f"worker_extra_args[{i}]={argument!r} holds an option and its value in one: write {name!r}, "
                    f"{value.strip()!r}"
                )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(JobOptions):
    """The scheduler job. It takes the options that are marked `inherited` from the workers unless it has its own."""

    dashboard_address: str | None = option(
        parse=values.listen_address,
        doc="Address on which the dashboard listens in the job, such as '127.0.0.1:0'. Default: a free port on the "
        "address by which clients reach the scheduler. ':0' is a free port on all addresses.",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The cluster as a whole."""

    name: str = option(
        "", parse=values.new_name, doc="Name of the cluster, of its directory, and the beginning of its jobs' names."
    )
    profile: str | None = option(
        parse=values.profile_name, doc="Profile of the site, such as 'perlmutter'; see `hpcgpu profiles list`."
    )
    jobs: int = option(0, parse=values.natural, doc="Worker jobs to submit at the start.")
    protocol: str = option(
        "auto",
        parse=values.choice("auto", "ucx", "tcp", "tls"),
        doc="Protocol between workers and scheduler: 'ucx', 'tcp' ('tls' means tcp, which is encrypted by "
        "default), or 'auto': ucx if the scheduler's node has all that ucx needs, else tcp.",
    )
    client_interface: str | None = option(
        parse=values.interface,
        doc="Interface of the scheduler's node by which clients reach it. By default (or with 'auto') this is the "
        "interface of its default route.",
    )
    security: bool | str = option(
        True,
        parse=values.boolean_or("authenticated"),
        doc="True is TLS with credentials made for this cluster. 'authenticated' keeps strangers out, and neither "
        "encrypts nor signs: for networks that only root can read or change. False lets anyone who reaches a port run "
        "code as you.",
    )
    cluster_directory: Path = option(
        Path("~/.hpcgpu/clusters").expanduser(),
        parse=values.directory,
        doc="Directory on the shared filesystem. Each cluster has a directory of its name in it. Variables such as "
        "$SCRATCH are expanded.",
    )
    log_directory: Path | None = option(
        parse=values.directory, doc="Directory of the jobs' logs. Default: `logs` in the cluster's own directory."
    )
    checkpoint_directory: Path | None = option(
        parse=values.directory,
        doc="Directory on the shared filesystem, with room for the data, in which `cluster.checkpoint` saves and from "
        "which `cluster.restore` reads, such as '$SCRATCH/checkpoints'.",
    )
    checkpoint_every: float | None = option(
        parse=values.duration,
        doc="Save published datasets in checkpoint_directory this often if they have changed, seconds or '10m', and "
        "before the walltime of the scheduler job ends. A scheduler that was restarted publishes them again.",
    )
    template_directory: Path | None = option(
        parse=values.existing_directory,
        doc="Directory of your own templates. Templates that it does not have come from hpcgpu.",
    )
    idle_timeout: float | None = option(
        parse=values.duration,
        doc="The scheduler and the cluster end after this time without work, seconds or '1h'. Default: never.",
    )
    lease: float | None = option(
        600.0,
        parse=values.duration_or_none,
        doc="The scheduler and the cluster end when the scheduler has received nothing from this program for this "
        "time, as after a crash or kill -9. 0 means never.",
    )
    worker_restarts: int = option(
        2,
        parse=values.natural,
        doc="How many failed worker jobs in a row are replaced. After one more failure the cluster pauses and warns.",
    )
    on_scheduler_end: str = option(
        "end",
        parse=values.choice("end", "restart"),
        doc="What happens when the scheduler job ends too early: its walltime, a failed node, too little memory, "
        "preemption. 'end' ends the cluster. 'restart' submits another scheduler job, some time before the end of the "
        "walltime; the worker jobs stay and wait for it. Then the scheduler job manages a cluster that its program has "
        "left. Results that only the workers had are lost in any case: see checkpoint_every.",
    )
    restart_wait: float | None = option(
        parse=values.duration,
        doc="How long a worker job waits for another scheduler with on_scheduler_end='restart', seconds or '30m'. "
        "Default: as long as the job has waited in the queue itself, and death_timeout more.",
    )
    poll_interval: float = option(
        10.0,
        parse=values.duration,
        doc="Seconds between two polls of the queue; up to four times as long while nothing is pending or nothing "
        "changes.",
    )
    shutdown_on_close: bool = option(
        True,
        parse=values.boolean,
        doc="Cancel the cluster's jobs when it is closed, and when this program ends. With False they run until "
        "idle_timeout or the walltime of the scheduler job ends them; from_name attaches to the cluster again.",
    )
    wait: bool = option(
        True,
        parse=values.boolean,
        doc="Wait until the scheduler runs. False returns as soon as the queue has accepted the jobs, for queues that "
        "take hours.",
    )
    if_exists: str = option(
        "error",
        parse=values.choice("error", "connect"),
        doc="What to do if a cluster of this name has jobs in the queue: 'error', or 'connect' to take it over as "
        "from_name does.",
    )
    environment_check: str = option(
        "error",
        parse=values.choice("error", "warn", "off"),
        doc="What to do if client, scheduler and workers have software or GPUs that do not work together: 'error', "
        "or 'warn'. Smaller differences are warnings. 'off' compares nothing.",
    )
    container_runtimes: tuple[tuple[str, str], ...] = option(
        (),
        parse=values.container_runtimes,
        doc="Commands of further container runtimes, a dict of names and templates; see the page on containers.",
    )
    notify: str | None = option(
        parse=values.notification,
        doc="A command that is run when the cluster is ready, has lost a job, is paused, ends soon, or has ended. sh "
        "runs it with HPCGPU_EVENT, HPCGPU_CLUSTER and HPCGPU_MESSAGE in its environment, and the message on its "
        "stdin. In Python also a function, which is called with the event.",
    )
    ending_notice: float = option(
        900.0,
        parse=values.duration,
        doc="How long before the end of the scheduler job's walltime `notify` gets a notice, and `on_ending` is "
        "called; seconds or '15m'. Half the walltime if that is shorter.",
    )
    quiet: bool = option(False, parse=values.boolean, doc="Show no progress messages.")


@dataclass(frozen=True)
class Options:
    """All options of one cluster, read and checked.

    `scheduler` is None if the scheduler runs in the client's process.
    """

    cluster: ClusterOptions
    worker: WorkerOptions
    scheduler: SchedulerOptions | None
    system: str = "slurm"


#: Arguments of the worker command that hpcgpu sets itself, and the option that each comes from.
_OWNED_ARGUMENTS = {
    "--name": "hpcgpu: workers are named after their job",
    "--memory-limit": "the option memory",
    **dict.fromkeys(
        ("--lifetime", "--lifetime-stagger", "--lifetime-restart", "--no-lifetime-restart"),
        "hpcgpu, from the walltime of the job: remove it. The option walltime_margin says how long before the end "
        "of the walltime workers retire and a new job replaces theirs",
    ),
    **dict.fromkeys(("--nanny", "--no-nanny"), "hpcgpu: workers always have a nanny"),
    "--host": "the option interface",
    "--protocol": "the option protocol",
    "--scheduler-file": "hpcgpu, from the cluster's contact file",
    "--nworkers": "the option gpus_per_node",
    **dict.fromkeys(("--tls-ca-file", "--tls-cert", "--tls-key"), "the option security"),
} | {
    spelling: f"the option {f.name}"
    for f in dataclasses.fields(WorkerOptions)
    if f.metadata["flag"] or f.name in ("nthreads", "resources", "death_timeout", "local_directory", "interface")
    for spelling in (
        flag_of(f),
        flag_of(f).replace("--enable-", "--disable-"),
        flag_of(f).replace("--", "--no-"),
    )
}
