"""Reads the options of a cluster: keyword arguments, dask's configuration, a site profile and the defaults."""

from __future__ import annotations

import dataclasses
import getpass
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hpcgpu.configuration.sections import check_names, configured, described, layered, plain
from hpcgpu.errors import OptionError
from hpcgpu.options import profiles, values
from hpcgpu.options.common import SYSTEMS, ClusterOptions, JobOptions, Options, SchedulerOptions, WorkerOptions
from hpcgpu.options.schema import names
from hpcgpu.options.spelling import ALIASES, FOREIGN, unknown

__all__ = ["cluster_directories", "resolve", "resolve_group"]

_T = TypeVar("_T")

#: Options that PBS does not have, and what to write there.
_NOT_IN_PBS = {
    "qos": "PBS has none; many sites have a queue instead: set queue",
    "reservation": "in PBS a reservation is a queue: set queue to its name",
    "constraint": "set select_extra to the resources that a node must have, such as 'gpu_type=a100'",
    "prefer": "PBS has no preferences; set select_extra or gpu_type to what a node must have",
}


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
    config, sections = configured(system)
    site = given.get("profile", config.get("profile"))
    profile = profiles.load(site, system) if site is not None else None
    known = plain(profile.options) if profile is not None else {}
    where = f"profile {site!r}: "
    scheduler = arguments.get("scheduler")
    if isinstance(scheduler, Mapping):
        scheduler = _canonical({k: v for k, v in scheduler.items() if v is not None}, "scheduler: ", ("scheduler",))
    above = scheduler if isinstance(scheduler, Mapping) else {}
    of_scheduler = {name.removeprefix("scheduler."): section for name, section in sections.items() if name.startswith("scheduler.")}
    of_scheduler = {name: section for name, section in of_scheduler.items() if name not in above}
    scheduler = layered(known.pop("scheduler", None), config.pop("scheduler", None), scheduler)
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


def cluster_directories() -> list[Path]:
    """Return the directories in which clusters have theirs, as the configuration of each batch system says."""
    name = "cluster_directory"
    roots = []
    for system in SYSTEMS:
        config, sections = configured(system)
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


def _canonical(given: Mapping[str, Any], where: str, owners: tuple[str, ...], sections: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Replace aliases by their option's name and refuse unknown options; `sections` says which of them dask config holds, and where."""
    known: dict[str, set[str]] = {
        "cluster": set(names(ClusterOptions)),
        "worker": set(names(WorkerOptions)),
        "scheduler": set(names(SchedulerOptions)),
    }
    allowed = set().union(*(known[owner] for owner in owners))
    result: dict[str, Any] = {}
    check_names(given)
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name in result:
            raise OptionError(f"{where}{key} and {name} mean the same: give one of them")
        if name not in allowed:
            section = (sections or {}).get(key)
            if section is not None:
                where = f"{described(section, section, key, value)}: "
            if isinstance(value, Mapping) and section is not None and key not in FOREIGN:
                raise OptionError(f"{where}unknown section {key!r}: the sections are {', '.join(SYSTEMS)} and scheduler")
            raise OptionError(where + unknown(key, allowed, {o: n for o, n in known.items() if o not in owners}))
        result[name] = value
    return result


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
                parse(f"{described(section, section, name, value)}: {name}", value)
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
