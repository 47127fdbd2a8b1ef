"""Which file sets a value of the configuration, for messages.

dask merges all files and does not keep the origin of a value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import dask.config


def file_of(section: str, name: str, value: Any, spell: Callable[[str], str]) -> str:
    """Return the path of the file of dask's configuration that sets this value, or "the environment".

    Empty if neither sets it.

    Parameters
    ----------
    section : str
        Such as "hpcgpu.slurm"; empty for the whole configuration.
    name : str
        Name of an option, or of a section inside `section`.
    value : object
        The value that the configuration has now: a program may have replaced the file's value.
    spell : callable
        Turns a key of a file into the name that it means.
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
            if key == name or (isinstance(key, str) and spell(key) == name):
                return where if repr(held) == repr(value) else ""
    return ""
