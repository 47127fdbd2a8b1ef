"""The configuration template, and the options in effect.

The template has every option as a commented line of YAML. Each option in effect has its origin.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from hpcgpu.batch import system_registry
from hpcgpu.configuration.config_sections import configured, file_of
from hpcgpu.configuration.option_classes import option_classes
from hpcgpu.configuration.resolve import resolve
from hpcgpu.options.declare import added, names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions, JobOptions, SchedulerOptions, WorkerOptions
from hpcgpu.options.unknown_options import spelled
from hpcgpu.profiles import site_profiles

_HEAD = """\
## Configuration of hpcgpu. Dask reads it from ~/.config/dask/hpcgpu.yaml, /etc/dask/hpcgpu.yaml, or
## $DASK_CONFIG/hpcgpu.yaml.
## Remove the "# " in front of what you set; null means not set. The section of a batch system, such as `slurm:`, may
## hold any of these keys too. They apply to that batch system only, and take precedence.
"""


def template() -> str:
    """Return the template. Without the comment marks it is valid YAML that sets the defaults."""
    lines = ["hpcgpu:", "", "  ## The cluster", "", *_entries(names(ClusterOptions).values(), 2)]
    lines += ["  ## Worker jobs; amounts are per node", "", *_entries(names(WorkerOptions).values(), 2)]
    lines += [
        "  ## The scheduler job: the options below, and those of a worker job from `queue` to `ucx-env`",
        "",
        "  # scheduler:",
    ]
    lines += _entries(added(SchedulerOptions, JobOptions).values(), 4)
    for system in system_registry.systems():
        options = option_classes(system.name).added()
        lines += (
            [f"  ## Jobs of {system.title} alone", "", f"  # {system.name}:", *_entries(options.values(), 4)]
            if options
            else []
        )
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _entries(fields: Iterable[Field[Any]], indent: int) -> Iterator[str]:
    margin = " " * indent
    for f in fields:
        yield from textwrap.wrap(
            f.metadata["doc"], 110, initial_indent=f"{margin}## ", subsequent_indent=f"{margin}## "
        )
        yield f"{margin}# {f.name.replace('_', '-')}: {_default(f)}"
        yield ""


def _default(f: Field[Any]) -> str:
    if f.default in (None, (), "") or f.name == "python":  # this interpreter is no default for other users
        return "null"
    return json.dumps(str(f.default).replace(str(Path.home()), "~") if isinstance(f.default, Path) else f.default)


@dataclass(frozen=True)
class Effective:
    """One option that a cluster would have; those of the scheduler job are named ``scheduler.NAME``.

    Attributes
    ----------
    name : str
    value : object
    source : str
        ``"argument"``, ``"environment"``, a configuration file, ``"inherited"`` (by the scheduler job from the worker
        jobs), or ``"default"``.
    """

    name: str
    value: Any
    source: str


def effective(system: str, arguments: Mapping[str, Any]) -> list[Effective]:
    """Return every option of a cluster with these arguments, and where it comes from.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed.
    """
    options = resolve(system, arguments)
    sources = _sources(system, arguments)
    result = [
        Effective(name, _shown(getattr(part, name)), sources.get(name, "default"))
        for part in (options.cluster, options.worker)
        for name in names(type(part))
        if not (name == "name" and "name" not in sources)
    ]
    if options.scheduler is None:
        return [*result, Effective("scheduler", "local", sources.get("scheduler", "default"))]
    for name, f in names(type(options.scheduler)).items():
        inherited = f.metadata["inherited"] and sources.get(name, "default") != "default"
        source = sources.get(f"scheduler.{name}") or ("inherited" if inherited else "default")
        result.append(Effective(f"scheduler.{name}", _shown(getattr(options.scheduler, name)), source))
    return result


def _sources(system: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each option's value."""
    config, sections = configured(system)
    scheduler = config.get("scheduler")
    values = {f"scheduler.{name}": value for name, value in scheduler.items()} if isinstance(scheduler, Mapping) else {}
    result = {}
    for name, value in (config | values).items():
        where = file_of(sections[name], name.removeprefix("scheduler."), value)
        result[name] = where.removeprefix("the ") or "dask.config.set"
    if site := arguments.get("profile", config.get("profile")):
        result = dict.fromkeys(_given(site_profiles.load(site).options), f"profile {site}") | result
    return result | dict.fromkeys(_given(arguments), "argument")


def _given(section: Mapping[str, Any]) -> Iterator[str]:
    for key, value in section.items():
        name = spelled(key)
        if name == "scheduler" and isinstance(value, Mapping):
            yield from (f"scheduler.{inner}" for inner in _given(value))
        elif value is not None:
            yield name


def _shown(value: Any) -> Any:
    """Return a value as a user writes it: pairs as a dict, paths as text."""
    if isinstance(value, tuple):
        return dict(value) if value and isinstance(value[0], tuple) else list(value)
    return str(value) if isinstance(value, Path) else value
