"""Gives the cluster classes the signature and the parameter list of their options, from the one definition in `hpcgpu.options.schema`."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import MISSING
from typing import Any

from hpcgpu.options.common import ClusterOptions, SchedulerOptions, WorkerOptions
from hpcgpu.options.schema import names

__all__ = ["describe", "parameters"]


def parameters(cls: type) -> str:
    """Return the options of a dataclass as the body of a numpydoc section."""
    entries = []
    for name, f in names(cls).items():
        default = "" if f.default in (None, (), "", MISSING) else f", default {f.default!r}"
        kind = str(f.type).replace(" | None", "").replace("tuple[tuple[str, str], ...]", "dict")
        kind = kind.replace("tuple[tuple[str, float], ...]", "dict").replace("tuple[str, ...]", "list of str")
        entries.append(f"{name} : {kind}{default or ', optional'}\n{textwrap.indent(textwrap.fill(f.metadata['doc'], 100), '    ')}")
    return "\n".join(entries)


def describe(cls: Any) -> None:
    """Set ``__signature__`` and ``__doc__`` of a cluster class."""
    options = names(ClusterOptions) | names(WorkerOptions)
    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = [inspect.Parameter("scheduler", keyword, default=None), inspect.Parameter("asynchronous", keyword, default=False)]
    signature += [inspect.Parameter(name, keyword, default=None) for name in options]
    cls.__signature__ = inspect.Signature(signature)
    cls.__doc__ = f"""{inspect.getdoc(cls)}

Every option may also come from dask's configuration (``hpcgpu.{cls.system}.*``, ``hpcgpu.*``). None counts as not given.

Parameters
----------
scheduler : dict or "local", optional
    Options of the scheduler job (see below), or "local" to run the scheduler in this process.
asynchronous : bool, default False
    Use from a running event loop, with ``await`` and ``async with``.
{parameters(ClusterOptions)}
{parameters(WorkerOptions)}

Raises
------
OptionError
    An option that cannot be, before anything is submitted.
ClusterError
    The batch system refused a job, or the scheduler job ended before the scheduler could be reached. No job is left then.

Notes
-----
Options of the scheduler job; those marked "inherited" it takes from the workers unless it has its own:

{_scheduler_notes()}
"""


def _scheduler_notes() -> str:
    lines = []
    for name, f in names(SchedulerOptions).items():
        lines.append(f"- {name}{' (inherited)' if f.metadata['inherited'] else ''}")
    return "\n".join(lines)
