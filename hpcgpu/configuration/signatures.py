"""Writes the options of a batch system as type checkers and editors read them.

``python -m hpcgpu.configuration.signatures abacus > hpcgpu_abacus/typed.py`` does so for a system that a plugin adds.
`hpcgpu.configuration.typed` is made in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

from hpcgpu.batch import registry
from hpcgpu.configuration.classes import option_classes
from hpcgpu.options.schema import accepted, names
from hpcgpu.options.spelling import ALIASES

__all__ = ["module", "of_system", "typed_dict"]

_HEAD = '''"""What users may write for each option, as type checkers and editors read it.

{made}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict
{imports}
__all__ = [
{exported}
]
'''


def module(made: str, classes: Mapping[str, str], imports: str = "") -> str:
    """Return the source of a module.

    Parameters
    ----------
    made : str
        How it is made, for its docstring.
    classes : mapping
        Source by name.
    imports : str, optional
        Further lines that import.
    """
    exported = "\n".join(f'    "{name}",' for name in sorted(classes))
    return _HEAD.format(made=made, imports=f"\n{imports}\n" if imports else "", exported=exported) + "".join(
        classes.values()
    )


def of_system(system: str, prefix: str) -> dict[str, str]:
    """Return the sources of the classes of one batch system, by name: for its worker jobs, its scheduler job and its
    clusters.
    """
    found = option_classes(system)
    worker, scheduler, cluster = (f"{prefix}{kind}Arguments" for kind in ("Worker", "Scheduler", ""))
    return {
        worker: typed_dict(worker, names(found.worker)),
        scheduler: typed_dict(scheduler, names(found.scheduler)),
        cluster: typed_dict(cluster, {}, f"ClusterArguments, {worker}"),
    }


def typed_dict(
    name: str, fields: Mapping[str, Field[Any]], bases: str = "TypedDict", aliases: Mapping[str, str] = ALIASES
) -> str:
    """Return the source of a `TypedDict` of options."""
    also = {alias: fields[of] for alias, of in aliases.items() if of in fields}
    kinds = {option: accepted(f).replace("'", '"') for option, f in {**fields, **also}.items()}
    lines: Iterator[str] = (f"    {option}: {kind} | None" for option, kind in kinds.items())
    return "\n".join(["", "", f"class {name}({bases}, total=False):", *(lines if kinds else ["    pass"]), ""])


def _main(system: str) -> None:
    prefix = registry.system(system).cluster_class.rpartition(":")[2].removesuffix("GPUCluster")
    made = f"Made by: python -m hpcgpu.configuration.signatures {system}"
    imports = "from hpcgpu.configuration.typed import ClusterArguments"
    sys.stdout.write(module(made, of_system(system, prefix), imports))


if __name__ == "__main__":
    _main(sys.argv[1])
