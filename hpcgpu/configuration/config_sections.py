"""The sections of dask's configuration that hold options: ``hpcgpu``, and ``hpcgpu.NAME`` for one batch system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import dask.config

from hpcgpu.batch import system_registry
from hpcgpu.errors import OptionError
from hpcgpu.options.unknown_options import spelled


def layered(*layers: Any) -> Any:
    """Return the options of the scheduler job.

    The last layer that sets an option counts. "local" replaces all layers before it.
    """
    result: Any = {}
    for layer in layers:
        if isinstance(layer, Mapping) and isinstance(result, Mapping):
            result = {**result, **layer}
        elif layer is not None:
            result = layer
    return result


def configured(system: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that dask's configuration sets for this batch system, and the section of each.

    The section of the system takes precedence over the general one.

    Null counts as not given.
    """
    general = _section("hpcgpu", dask.config.get("hpcgpu", None))
    merged: dict[str, Any] = {}
    found: dict[str, str] = {}
    own_sections = system_registry.names()
    layers = {
        "hpcgpu": {k: v for k, v in general.items() if k not in own_sections},
        f"hpcgpu.{system}": general.get(system),
    }
    for section, layer in layers.items():
        own = plain(_section(section, layer), section)
        merged |= own | {"scheduler": layered(merged.get("scheduler"), own["scheduler"])} if "scheduler" in own else own
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
            f"{described(name, above, last, content)} must hold options and their values, such as `cores: 4`, not "
            f"{content!r:.100}"
        )
    return content


def plain(layer: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return YAML options under their Python names, with underscores and without null values; the scheduler's too."""
    check_names(layer, section)
    named = {spelled(key): value for key, value in layer.items() if value is not None}
    if isinstance(named.get("scheduler"), Mapping):
        named["scheduler"] = plain(named["scheduler"], section and f"{section}.scheduler")
    return named


def described(shown: str, section: str, name: str, value: Any) -> str:
    """Return the beginning of a message about a configured value: its section, and its file if that is known."""
    file = file_of(section, name, value)
    return f"dask config {shown} in {file}" if file else f"dask config {shown}"


def check_names(given: Mapping[Any, Any], section: str = "") -> None:
    if (odd := next((key for key in given if not isinstance(key, str)), None)) is not None:
        where = f"{described(section, section, odd, given[odd])}: " if section else ""
        raise OptionError(f"{where}{odd!r} is not the name of an option: write names such as `cores`")


def file_of(section: str, name: str, value: Any) -> str:
    """Return the path of the file of dask's configuration that sets this value, or "the environment".

    Empty if neither sets it. Dask merges all files and does not keep the origin of a value.

    Parameters
    ----------
    section : str
        Such as "hpcgpu.slurm"; empty for the whole configuration.
    name : str
        Name of an option, or of a section inside `section`.
    value : object
        The value that the configuration has now: a program may have replaced the file's value.
    """
    layers: list[tuple[str, Any]] = []
    with suppress(OSError, ValueError):  # a file was changed since dask read it
        layers = [
            (str(path), content) for path, content in dask.config.collect_yaml(dask.config.paths, return_paths=True)
        ]
    layers.append(("the environment", dask.config.collect_env(os.environ)))
    for where, content in reversed(layers):  # the last one counts
        part = content
        for key in section.split(".") if section else []:
            part = part.get(key) if isinstance(part, Mapping) else None
        for key, held in part.items() if isinstance(part, Mapping) else ():
            if key == name or (isinstance(key, str) and spelled(key) == name):
                return where if repr(held) == repr(value) else ""
    return ""
