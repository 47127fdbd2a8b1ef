"""The configuration template: every option as a commented line of YAML, made from the definitions in `hpcgpu.options`.

``python -m hpcgpu.config > ~/.config/dask/hpcgpu.yaml`` begins a configuration file.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from hpcgpu.options import ClusterOptions, JobOptions, SchedulerOptions, WorkerOptions, names

__all__ = ["template"]

_HEAD = """\
## Configuration of hpcgpu, read by dask: ~/.config/dask/hpcgpu.yaml, /etc/dask/hpcgpu.yaml, or $DASK_CONFIG/hpcgpu.yaml.
## Remove the "# " in front of what you set; null means not set. A section `slurm:`, `pbs:` or `local:` under `hpcgpu:` may
## hold any of these keys too, and counts for that batch system alone, before the general ones.
"""


def template() -> str:
    """Return the template; with every line's comment mark removed it is valid YAML that sets the defaults."""
    own = {name: f for name, f in names(SchedulerOptions).items() if name not in names(JobOptions)}
    lines = ["hpcgpu:", "", "  ## The cluster", "", *_entries(names(ClusterOptions).values(), 2)]
    lines += ["  ## Worker jobs; amounts are per node", "", *_entries(names(WorkerOptions).values(), 2)]
    lines += ["  ## The scheduler job: these, and all of a worker job's options down to `interface`", "", "  # scheduler:"]
    lines += _entries(own.values(), 4)
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _entries(fields: Iterable[Field[Any]], indent: int) -> Iterator[str]:
    margin = " " * indent
    for f in fields:
        yield from textwrap.wrap(f.metadata["doc"], 110, initial_indent=f"{margin}## ", subsequent_indent=f"{margin}## ")
        yield f"{margin}# {f.name.replace('_', '-')}: {_default(f)}"
        yield ""


def _default(f: Field[Any]) -> str:
    if f.default in (None, (), "") or f.name == "python":  # the interpreter of whoever prints this is nobody's default
        return "null"
    return json.dumps(str(f.default).replace(str(Path.home()), "~") if isinstance(f.default, Path) else f.default)


if __name__ == "__main__":
    print(template(), end="")
