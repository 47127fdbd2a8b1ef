"""The machinery that declares options: name, type, default, meaning, how each is read.

The options themselves are dataclasses: `hpcgpu.options.shared_options_and_defaults` has those that all batch systems
share, ``hpcgpu.batch.NAME.options`` has those of one batch system. Keyword arguments, dask config, its template,
signatures, docstrings and messages come from these dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any


def option(
    default: Any = None,
    *,
    parse: Callable[[str, Any], Any],
    doc: str,
    inherited: bool = False,
    flag: bool = False,
    nodes: str = "",
) -> Any:
    """Declare an option.

    Parameters
    ----------
    default
        Its value if neither an argument nor the configuration sets one.
    parse : callable
        Turns ``(name, value)`` into the value kept, or raises `OptionError`.
    doc : str
        What it means, for people.
    inherited : bool, default False
        The scheduler job takes the worker's value unless it has its own.
    flag : bool, default False
        It is passed on with the option of the worker command that has its name, see `flag_of`.
    nodes : {"", "chosen", "inherited"}
        ``"chosen"``: it chooses the nodes of a job. ``"inherited"``: it does, and the scheduler job takes the worker's
        value unless the scheduler job sets any option that chooses nodes.
    """
    return field(
        default=default, metadata={"parse": parse, "doc": doc, "inherited": inherited, "flag": flag, "nodes": nodes}
    )


def names(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of one of the dataclasses, by name."""
    return {f.name: f for f in dataclasses.fields(cls)}


def added(cls: type[Any], shared: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options that a dataclass adds to those of a base, or redefines."""
    base = names(shared)
    return {name: f for name, f in names(cls).items() if f is not base.get(name)}


def flag_of(f: dataclasses.Field[Any]) -> str:
    """Return the option of a command that an option is written as."""
    return f"--{f.name.replace('_', '-')}"


def accepted(f: dataclasses.Field[Any]) -> str:
    """Return what a user may write for an option, as a type annotation."""
    return str(f.metadata["parse"].__annotations__["value"])
