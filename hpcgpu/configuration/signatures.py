"""Writes the options of a batch system as type checkers and editors read them.

``python -m hpcgpu.configuration.signatures abacus > hpcgpu_abacus/typed.py`` writes those of a system of a plugin.
`hpcgpu.configuration.typed` is made in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

from hpcgpu.batch import system_registry
from hpcgpu.configuration.option_classes import option_classes
from hpcgpu.options.declare import accepted, added, names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions, JobOptions, SchedulerOptions, WorkerOptions
from hpcgpu.options.unknown_options import ALIASES

#: The option whose allowed values differ between batch systems.
_DIFFERS = "gpu_request"

_HEAD = '''"""What users may write for each option, as type checkers and editors read it.

{made}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict
{imports}'''


def module(made: str, classes: Mapping[str, str], imports: str = "") -> str:
    """Return the source of a module.

    Parameters
    ----------
    made : str
        How the module is generated, for its docstring.
    classes : mapping
        Source by name.
    imports : str, optional
        Further import lines.
    """
    return _HEAD.format(made=made, imports=f"\n{imports}\n" if imports else "") + "".join(classes.values())


def shared() -> dict[str, str]:
    """Return the sources of the classes that all batch systems share, by name."""
    job = typed_dict("JobArguments", _alike(JobOptions))
    worker = typed_dict("WorkerArguments", added(WorkerOptions, JobOptions), "JobArguments")
    scheduler = typed_dict("SchedulerArguments", added(SchedulerOptions, JobOptions), "JobArguments")
    cluster = typed_dict("ClusterArguments", names(ClusterOptions))
    return {
        "JobArguments": job,
        "WorkerArguments": worker,
        "SchedulerArguments": scheduler,
        "ClusterArguments": cluster,
    }


def of_system(system: str, prefix: str) -> dict[str, str]:
    """Return the sources of the classes of one batch system, by name: for its worker jobs, its scheduler job and its
    clusters.
    """
    found = option_classes(system)
    worker, scheduler, cluster = (f"{prefix}{kind}Arguments" for kind in ("Worker", "Scheduler", ""))
    return {
        worker: _job_arguments(worker, found.worker, WorkerOptions, "WorkerArguments"),
        scheduler: _job_arguments(scheduler, found.scheduler, SchedulerOptions, "SchedulerArguments"),
        cluster: typed_dict(cluster, {}, f"ClusterArguments, {worker}"),
    }


def _alike(cls: type[JobOptions]) -> dict[str, Field[Any]]:
    """Return the options of a dataclass that have the same values on all batch systems."""
    return {name: f for name, f in names(cls).items() if name != _DIFFERS}


def _job_arguments(name: str, cls: type[JobOptions], base: type[JobOptions], typed_base: str) -> str:
    """Return the source of the class of a job: the options that the batch system adds to the shared class.

    A `TypedDict` cannot change the type of an option: if a plugin redefines one, its class lists all of them.
    """
    further = added(cls, base) | {_DIFFERS: names(cls)[_DIFFERS]}
    if further.keys() & _alike(base).keys():
        return typed_dict(name, names(cls))
    return typed_dict(name, further, typed_base)


def typed_dict(
    name: str, fields: Mapping[str, Field[Any]], bases: str = "TypedDict", aliases: Mapping[str, str] = ALIASES
) -> str:
    """Return the source of a `TypedDict` of options."""
    also = {alias: fields[of] for alias, of in aliases.items() if of in fields}
    kinds = {option: accepted(f).replace("'", '"') for option, f in {**fields, **also}.items()}
    lines: Iterator[str] = (f"    {option}: {kind} | None" for option, kind in kinds.items())
    return "\n".join(["", "", f"class {name}({bases}, total=False):", *(lines if kinds else ["    pass"]), ""])


def _main(system: str) -> None:
    prefix = system_registry.system(system).cluster_class.rpartition(":")[2].removesuffix("GPUCluster")
    made = f"Made by: python -m hpcgpu.configuration.signatures {system}"
    imports = "from hpcgpu.configuration.typed import ClusterArguments, SchedulerArguments, WorkerArguments"
    sys.stdout.write(module(made, of_system(system, prefix), imports))


if __name__ == "__main__":
    _main(sys.argv[1])
