"""Gives the cluster classes the signature and the parameter list of their options.

Both come from the one definition in `hpcgpu.options.declare`.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import MISSING, Field
from typing import Any

from hpcgpu.options.declare import accepted, names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions, SchedulerOptions, WorkerOptions

#: What the constructors raise.
RAISES = """Raises
------
OptionError
    An unknown option, or a value that is not allowed. Nothing was submitted.
ClusterExists
    A cluster of this name has jobs in the queue; see `if_exists`.
BatchError
    The batch system is not installed here, or it does not answer.
NotTrusted
    Another user can write to the cluster directory, or to a file that the jobs run.
ClusterError
    The batch system refused a job, or the scheduler job ended before its scheduler answered. No job is left then.
"""


def parameters(cls: type) -> str:
    """Return the options of a dataclass as the body of a numpydoc section."""
    entries = []
    for name, f in names(cls).items():
        default = "" if f.default in (None, (), "", MISSING) else f", default {f.default!r}"
        kind = kind_of(f)
        entries.append(
            f"{name} : "
            f"{kind}{default or ', optional'}\n{textwrap.indent(textwrap.fill(f.metadata['doc'], 100), '    ')}"
        )
    return "\n".join(entries)


def kind_of(f: Field[Any]) -> str:
    """Return what a user may write for an option, in words: "str or timedelta", "list of str", "{'ucx', 'tcp'}"."""
    kind = accepted(f)
    for annotation, words in {
        "Mapping[str, str | float]": "dict",
        "Mapping[str, str | int]": "dict",
        "Mapping[str, float]": "dict",
        "Callable[[Any], object]": "callable",
    }.items():
        kind = kind.replace(annotation, words)
    kind = kind.replace("list[str] | tuple[str, ...]", "list of str").replace("Path", "path")
    if kind.startswith("Literal"):
        return "{" + kind.removeprefix("Literal[").removesuffix("]") + "}"
    return kind.replace(" | ", " or ")


def describe(cls: Any, worker: type[WorkerOptions], scheduler: type[SchedulerOptions]) -> None:
    """Set ``__signature__`` and ``__doc__`` of a cluster class.

    Parameters
    ----------
    cls : type
    worker, scheduler : type
        The options of its jobs.
    """
    options = names(ClusterOptions) | names(worker)
    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = [
        inspect.Parameter("host", keyword, default=None),
        inspect.Parameter("scheduler", keyword, default=None),
        inspect.Parameter("asynchronous", keyword, default=False),
        inspect.Parameter("on_ending", keyword, default=None),
    ]
    signature += [inspect.Parameter(name, keyword, default=None) for name in options]
    cls.__signature__ = inspect.Signature(signature)
    cls.__doc__ = f"""{inspect.getdoc(cls)}

Every option may also come from dask's configuration (``hpcgpu.{cls.system}.*``, ``hpcgpu.*``).
None counts as not given.

Parameters
----------
host : str, optional
    A login node, as `ssh` knows it: the cluster is there, and this program uses it by ssh. See the page on laptops.
scheduler : dict or "local", optional
    Options of the scheduler job (see below), or "local" to run the scheduler in this process.
asynchronous : bool, default False
    Use from a running event loop, with ``await`` and ``async with``.
on_ending : callable, optional
    Is called with the cluster, in a thread, before the walltime of the scheduler job ends; see `ending_notice`.
{parameters(ClusterOptions)}
{parameters(worker)}

{RAISES}

Notes
-----
Options of the scheduler job. Those marked "inherited" have the workers' value unless you set them for the scheduler:

{_scheduler_notes(scheduler)}
"""


def _scheduler_notes(scheduler: type[SchedulerOptions]) -> str:
    lines = []
    for name, f in names(scheduler).items():
        lines.append(f"- {name}{' (inherited)' if f.metadata['inherited'] else ''}")
    return "\n".join(lines)
