"""Reads the options of a cluster: keyword arguments, dask's configuration, a site profile and the defaults."""

from __future__ import annotations

import dataclasses
import getpass
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcgpu.batch import system_registry
from hpcgpu.configuration.config_sections import check_names, configured, described, layered, plain
from hpcgpu.configuration.option_classes import OptionClasses, elsewhere, option_classes
from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import (
    ClusterOptions,
    JobOptions,
    Options,
    SchedulerOptions,
    WorkerOptions,
)
from hpcgpu.options.unknown_options import ALIASES, FOREIGN, unknown
from hpcgpu.profiles import site_profiles

_T = TypeVar("_T")
_J = TypeVar("_J", bound=JobOptions)
#: The interpreter in an image, unless the option `python` names another one.
_PYTHON_OF_IMAGE = "python3"


@dataclass(frozen=True)
class _Given:
    """Options as the user wrote them.

    Attributes
    ----------
    options : mapping
        Options of the cluster and its worker jobs, by name.
    origins : mapping
        The origin of each option's value, by name: the beginning of a message about the option.
    scheduler : mapping or "local"
        Options of the scheduler job.
    scheduler_sections : mapping
        The section of each scheduler option that dask's configuration sets, by name.
    """

    options: Mapping[str, Any]
    origins: Mapping[str, str]
    scheduler: Any
    scheduler_sections: Mapping[str, str]


def resolve(system: str, arguments: Mapping[str, Any]) -> Options:
    """Read all options: keyword arguments over dask config over the site profile over defaults.

    Parameters
    ----------
    system : str
        Name of the batch system and of its section of the configuration: ``hpcgpu.slurm.queue`` overrides
        ``hpcgpu.queue``.
    arguments : mapping
        Keyword arguments as the user gave them; None counts as not given. ``scheduler`` is a dict of
        `SchedulerOptions`, or "local".

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed.
    """
    classes = option_classes(system)
    return _read(classes, _joined(classes, arguments))


def of_profile(profile: site_profiles.Profile) -> Options:
    """Read the options of a profile alone, even if the user must still set some options.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed.
    """
    classes, where = option_classes(profile.system), f"profile {profile.name!r}: "
    known = plain(profile.options)
    scheduler = layered(known.pop("scheduler", None), None, None)
    options = _canonical(classes, known, where, ("cluster", "worker"))
    return _read(classes, _Given(options, dict.fromkeys(options, where), scheduler, {}))


def _read(classes: OptionClasses, given: _Given) -> Options:
    """Parse all options."""
    system = classes.system.name
    cluster = _build(
        ClusterOptions, {k: v for k, v in given.options.items() if k in names(ClusterOptions)}, given.origins
    )
    if not cluster.name:
        cluster = dataclasses.replace(cluster, name=f"{_user()}-{uuid.uuid4().hex[:8]}")
    worker = _build(
        classes.worker, {k: v for k, v in given.options.items() if k in names(classes.worker)}, given.origins
    )
    worker = _python_of_image(worker, given.options)
    _check_worker(worker, classes)
    if cluster.checkpoint_every and cluster.checkpoint_directory is None:
        raise OptionError(
            "checkpoint_every needs checkpoint_directory, for example '$SCRATCH/checkpoints': a directory that all "
            "nodes see, with room for the published datasets"
        )
    if given.scheduler == "local":
        if cluster.protocol == "ucx":
            raise OptionError(
                "scheduler='local' does not work with protocol='ucx': UCX would hold GPU memory in this program, "
                "and must start before anything else in it uses CUDA. Leave scheduler out, so that it gets a job "
                "with a GPU, or use protocol='tcp'"
            )
        return Options(cluster, worker, None, system)
    if not isinstance(given.scheduler, Mapping):
        raise OptionError(
            f"scheduler must be a dict of options of the scheduler job, or 'local', not {given.scheduler!r}"
        )
    return Options(cluster, worker, _scheduler_options(classes, given, cluster, worker), system)


def _joined(classes: OptionClasses, arguments: Mapping[str, Any]) -> _Given:
    """Join arguments, configuration and profile, and refuse unknown options."""
    system = classes.system.name
    own = ("cluster", "worker")
    given = _canonical(classes, {k: v for k, v in arguments.items() if v is not None and k != "scheduler"}, "", own)
    config, sections = configured(system)
    config.pop("host", None)  # see `hpcgpu.configuration.login_node`
    site = given.get("profile", config.get("profile"))
    profile = _profile(site, classes) if site is not None else None
    known = plain(profile.options) if profile is not None else {}
    where = f"profile {site!r}: "
    scheduler = arguments.get("scheduler")
    if isinstance(scheduler, Mapping):
        scheduler = _canonical(
            classes, {k: v for k, v in scheduler.items() if v is not None}, "scheduler: ", ("scheduler",)
        )
    above = scheduler if isinstance(scheduler, Mapping) else {}
    of_scheduler = {
        name.removeprefix("scheduler."): section for name, section in sections.items() if name.startswith("scheduler.")
    }
    scheduler = layered(known.pop("scheduler", None), config.pop("scheduler", None), scheduler)
    merged = _canonical(classes, config, "", own, sections) | given
    if profile is not None:
        profile.check(merged)
        merged = _canonical(classes, known, where, own) | merged
    origins = {
        **dict.fromkeys(known, where),
        **{name: f"dask config {section}: " for name, section in sections.items()},
        **dict.fromkeys(given, ""),
    }
    return _Given(
        merged, origins, scheduler, {name: section for name, section in of_scheduler.items() if name not in above}
    )


def _profile(site: Any, classes: OptionClasses) -> site_profiles.Profile:
    """Return a site profile, which must be for this batch system."""
    profile = site_profiles.load(site)
    if profile.system != classes.system.name:
        other = system_registry.system(profile.system)
        raise OptionError(f"profile {site!r} is for {other.title}: use {other.cluster_class.rpartition(':')[2]}")
    return profile


def cluster_directories() -> list[Path]:
    """Return the directories that hold cluster directories, from the configuration of each batch system."""
    name = "cluster_directory"
    roots = []
    for system in system_registry.names():
        config, sections = configured(system)
        own = {k: v for k, v in config.items() if k == name}
        roots.append(_build(ClusterOptions, own, {name: f"dask config {sections.get(name)}: "}).cluster_directory)
    return list(dict.fromkeys(roots))


def resolve_group(name: str, arguments: Mapping[str, Any], base: Options) -> WorkerOptions:
    """Read the options of another group of workers.

    The group inherits account, walltime, environment and similar options from the default group.

    Parameters
    ----------
    name : str
        Name of the group.
    arguments : mapping
        Options of a worker job; None counts as not given.
    base : Options
        Options of the cluster.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed.
    """
    values.new_name("worker group", name)
    where = f"worker group {name!r}: "
    classes = option_classes(base.system)
    own = _canonical(classes, {k: v for k, v in arguments.items() if v is not None}, where, ("worker",))
    built = _build(classes.worker, own, dict.fromkeys(own, where))
    inherited = _inherited(own, built, base.worker)
    group = _python_of_image(dataclasses.replace(built, **inherited), own, base.worker)
    without_gpu = base.scheduler is not None and base.scheduler.gpus_per_node == 0
    if base.cluster.protocol == "ucx" and group.gpus_per_node and without_gpu:
        raise OptionError(
            f"{where}GPUs do not work with protocol='ucx' and a scheduler without a GPU: over UCX the scheduler "
            "itself holds GPU memory. Start the cluster with scheduler={'gpus_per_node': 1}, or with "
            "protocol='tcp'"
        )
    if group.gpus_per_node and bool(group.enable_cudf_spill) is not bool(base.worker.enable_cudf_spill):
        if base.worker.gpus_per_node:
            raise OptionError(
                f"{where}enable_cudf_spill={group.enable_cudf_spill}, but {base.worker.enable_cudf_spill} for the "
                "workers that the cluster was started with: workers that spill by cuDF cannot exchange tables with "
                "others. Start the cluster with the same value"
            )
        if base.scheduler is not None and not without_gpu:
            raise OptionError(
                f"{where}enable_cudf_spill works only if the scheduler spills by cuDF too, and it learns that from the "
                "workers that the cluster is started with. Start the cluster with GPU workers, and add those without "
                "a GPU as a group"
            )
    _check_worker(group, classes, where)
    return group


def _scheduler_options(
    classes: OptionClasses, given: _Given, cluster: ClusterOptions, worker: WorkerOptions
) -> SchedulerOptions:
    """Return the options of the scheduler job: its own, inherited ones, and one GPU if the workers have GPUs."""
    own = {k: v for k, v in given.scheduler.items() if v is not None}
    own = _canonical(classes, own, "scheduler: ", ("scheduler",), given.scheduler_sections)
    sections = {name: f"dask config {section}: " for name, section in given.scheduler_sections.items()}
    built = _build(classes.scheduler, own, {**dict.fromkeys(own, "scheduler: "), **sections})
    inherited = _inherited(own, built, worker) | _nodes_of(own, built, worker)
    options = _python_of_image(dataclasses.replace(built, **inherited), own, worker)
    if options.gpus_per_node > 1:
        raise OptionError(
            f"scheduler: gpus_per_node={options.gpus_per_node}, but the scheduler uses one GPU: write 1 or 0"
        )
    if cluster.protocol == "ucx" and options.gpus_per_node == 0 and worker.gpus_per_node:
        raise OptionError(
            "scheduler: gpus_per_node=0 does not work with protocol='ucx': over UCX the scheduler itself holds GPU "
            "memory. Give it a GPU, or use protocol='tcp'"
        )
    _check_job(options, classes, "scheduler: ")
    return options


def _inherited(own: Mapping[str, Any], built: JobOptions, worker: WorkerOptions) -> dict[str, Any]:
    """Return the options that a job inherits from the workers, such as account, walltime and environment.

    Parameters
    ----------
    own : mapping
        Its own options, as the user wrote them.
    built : JobOptions
        The same, with defaults.
    worker : WorkerOptions
    """
    fields = {name: f for name, f in names(type(built)).items() if name in names(type(worker)) and name not in own}
    inherited = {
        name: getattr(worker, name)
        for name, f in fields.items()
        if f.metadata["inherited"] and not (f.metadata["flag"] and built.gpus_per_node == 0)
    }
    if "container" in own:
        inherited.pop("stage", None)
    if "env" in own:
        inherited["env"] = tuple((dict(worker.env) | dict(built.env)).items())
    return inherited


def _nodes_of(own: Mapping[str, Any], built: SchedulerOptions, worker: WorkerOptions) -> dict[str, Any]:
    """Return the options for the choice of nodes that the scheduler job inherits: none if it sets one itself."""
    gpus = built.gpus_per_node if "gpus_per_node" in own else min(1, worker.gpus_per_node)
    inherited: dict[str, Any] = {"gpus_per_node": gpus}
    choosing = {name: f.metadata["nodes"] for name, f in names(type(built)).items() if f.metadata["nodes"]}
    if not choosing.keys() & own.keys():
        inherited |= {name: getattr(worker, name) for name, how in choosing.items() if how == "inherited"}
        if not gpus:
            inherited["gpu_type"] = None
    return inherited


def _python_of_image(job: _J, own: Mapping[str, Any], above: JobOptions | None = None) -> _J:
    """Return the options of a job. A container's Python is the image's, unless the user names a Python.

    Parameters
    ----------
    job : JobOptions
    own : mapping
        Its own options, as the user wrote them.
    above : JobOptions, optional
        The options that the job inherits from. If they have a container too, their Python is the image's.
    """
    if not job.container or "python" in own or (above is not None and above.container):
        return job
    return dataclasses.replace(job, python=_PYTHON_OF_IMAGE)


def _check_worker(worker: WorkerOptions, classes: OptionClasses, where: str = "") -> None:
    if worker.gpu_type and worker.gpus_per_node == 0:
        raise OptionError(f"gpu_type={worker.gpu_type!r}, but gpus_per_node is 0: remove one of the two")
    _check_job(worker, classes, where)


def _check_job(job: JobOptions, classes: OptionClasses, where: str) -> None:
    if job.container and job.stage:
        raise OptionError(
            f"{where}container and stage are both set, but a job runs in one environment: remove one of the two"
        )
    classes.check(job, where)


def _canonical(
    classes: OptionClasses,
    given: Mapping[str, Any],
    where: str,
    owners: tuple[str, ...],
    sections: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Replace aliases by the option's name, and refuse unknown options.

    `sections` maps each option that dask's configuration sets to its section.
    """
    known: dict[str, set[str]] = {
        "cluster": set(names(ClusterOptions)),
        "worker": set(names(classes.worker)),
        "scheduler": set(names(classes.scheduler)),
    }
    allowed = set().union(*(known[owner] for owner in owners))
    result: dict[str, Any] = {}
    check_names(given)
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name in result:
            other = next(earlier for earlier in given if ALIASES.get(earlier, earlier) == name)
            raise OptionError(f"{where}{other} and {key} mean the same: give one of them")
        if name not in allowed:
            section = (sections or {}).get(key)
            if section is not None:
                where = f"{described(section, section, key, value)}: "
            if reason := elsewhere(name, classes):
                raise OptionError(where + reason)
            if isinstance(value, Mapping) and section is not None and key not in FOREIGN:
                known_sections = ", ".join(system_registry.names())
                raise OptionError(f"{where}unknown section {key!r}: the sections are {known_sections} and scheduler")
            raise OptionError(where + unknown(key, allowed, {o: n for o, n in known.items() if o not in owners}))
        result[name] = value
    return result


def _build(cls: type[_T], given: Mapping[str, Any], origins: Mapping[str, str]) -> _T:
    """Read options; `origins` has the origin of each value by the option's name, for the beginning of a message."""
    fields = names(cls)
    parsed = {}
    for name, value in given.items():
        parse, where = fields[name].metadata["parse"], origins.get(name, "")
        try:
            parsed[name] = parse(where + name, value)
        except OptionError:
            # raise the error again with the name of the file: to find the file takes time
            if where.startswith("dask config "):
                section = where.removeprefix("dask config ").removesuffix(": ")
                parse(f"{described(section, section, name, value)}: {name}", value)
            raise
    return cls(**parsed)


def _user() -> str:
    """Return the ASCII letters and digits of the user's name, for a cluster's name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no entry in the password database, as in some containers
        name = "user"
    kept = "".join(c for c in name if c.isalnum() and c.isascii())
    return kept[:20] or "user"
