"""The machinery that declares options: name, type, default, meaning, how each is read.

The options themselves are dataclasses: in `hpcgpu.options.common` those that all batch systems share, in
``hpcgpu.batch.NAME.options`` those of one batch system. Keyword arguments, dask config, its template, signatures,
docstrings and messages come from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any

__all__ = ["accepted", "names", "option", "own"]


def option(
    default: Any = None,
    *,
    parse: Callable[[str, Any], Any],
    doc: str,
    inherited: bool = False,
    flag: str = "",
    nodes: str = "",
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
    nodes : {"", "chosen", "inherited"}
        ``"chosen"``: it chooses the nodes of a job. ``"inherited"``: likewise, and the scheduler job takes the worker's
        value unless it chooses its nodes itself, by any such option.
    """
    return field(
        default=default, metadata={"parse": parse, "doc": doc, "inherited": inherited, "flag": flag, "nodes": nodes}
    )


def names(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of one of the dataclasses, by name."""
    return {f.name: f for f in dataclasses.fields(cls)}


def own(cls: type[Any], shared: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options that a dataclass adds to the ones of a base, or declares anew."""
    base = names(shared)
    return {name: f for name, f in names(cls).items() if f is not base.get(name)}


def accepted(f: dataclasses.Field[Any]) -> str:
    """Return what a user may write for an option, as a type annotation."""
    return str(f.metadata["parse"].__annotations__["value"])
