"""The machinery that declares options: name, type, default, meaning, how each is read.

The options themselves are dataclasses: in `hpcgpu.options.common` those that all batch systems share, in ``hpcgpu.batch.NAME.options``
those of one batch system. Keyword arguments, dask config, its template, signatures, docstrings and messages come from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any

__all__ = ["names", "option"]


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


def names(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of one of the dataclasses, by name."""
    return {f.name: f for f in dataclasses.fields(cls)}
