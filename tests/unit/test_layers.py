"""Imports go one way: each module belongs to a layer, and imports from its own layer or from lower ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpcgpu"

#: From the bottom up. A layer is a package, or a module that stands alone.
LAYERS = (
    "errors",
    "releases",
    "posix",
    "display",
    "ssh",
    "options",
    "batch",
    "polling",
    "fabric",
    "profiles",
    "configuration",
    "software",
    "scaling",
    "store",
    "scripts",
    "runtime",
    "dask_worker",
    "checkpoints",
    "dask_scheduler",
    "existing_clusters",
    "client",
    "report",
    "widget",
    "checks",
    "jobs",
    "state",
    "notify",
    "manager",
    "orders",
    "plan",
    "cluster",
    "runner",
    "jupyter",
    "cli",
    "sphinx",
    "__main__",
)
#: What these layers must not import though it comes from outside: whole distributions.
FORBIDDEN = {
    "errors": ("dask", "distributed"),
    "posix": ("dask", "distributed"),
    "display": ("dask", "distributed"),
    "ssh": ("dask", "distributed"),
    "batch": ("dask", "distributed"),
    "polling": ("dask", "distributed"),
    "scaling": ("distributed", "time", "random", "os", "subprocess", "asyncio"),
    "profiles": ("dask", "distributed"),
    "existing_clusters": ("distributed",),
    "report": ("distributed",),
    "checks": ("distributed",),
}
#: Importing these must load neither Dask nor a GPU library: they run on the login node, or first in every job.
CHEAP = (
    "hpcgpu",
    "hpcgpu.errors",
    "hpcgpu.runtime.launch",
    "hpcgpu.batch.slurm.client",
    "hpcgpu.batch.pbs.client",
    "hpcgpu.batch.local.queue",
)
HEAVY = ("dask", "distributed", "cuda", "cupy", "cudf", "rmm", "ucxx", "pynvml")


def module(path: Path) -> str:
    parts = ("hpcgpu", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, *, types: bool = True) -> set[str]:
    """All modules that one imports, wherever in it: the late imports inside functions count. `types`: also those for
    type checkers alone.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not types:
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{name} has a relative import: the other modules have none"
                whole = {alias.name: f"{child.module}.{alias.name}" for alias in child.names}
                found.update(full if full in MODULES else str(child.module) for full in whole.values())
            visit(child)

    visit(ast.parse(MODULES[name].read_text()))
    return found


def layer(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


INNER = [name for name in MODULES if layer(name)]


@pytest.mark.parametrize("name", INNER)
def test_no_module_imports_from_a_layer_above_its_own(name: str) -> None:
    assert layer(name) in LAYERS, f"{name} belongs to no layer: see LAYERS, and docs/architecture.md"
    allowed = LAYERS[: LAYERS.index(layer(name)) + 1]
    wrong = [used for used in imports(name) if used.startswith("hpcgpu.") and layer(used) not in allowed]
    assert not wrong, f"{name} is in the layer {layer(name)!r} and imports {', '.join(wrong)} from above"


@pytest.mark.parametrize("name", [name for name in INNER if layer(name) in FORBIDDEN])
def test_no_module_imports_a_library_that_its_layer_must_not_use(name: str) -> None:
    wrong = {used for used in imports(name) if used.split(".")[0] in FORBIDDEN[layer(name)]}
    assert not wrong, f"{name} imports {', '.join(wrong)}"


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = {name: {used for used in imports(name) if layer(used) and used in MODULES} for name in INNER}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", CHEAP)
def test_importing_it_loads_neither_dask_nor_cuda(name: str) -> None:
    # Compared with a bare start: .pth files of installed packages load some names by themselves.
    code = f"import sys; before = set(sys.modules); import {name}; new = set(sys.modules) - before"
    code += f"; print(*sorted({{m.split('.')[0] for m in new}} & set({HEAVY!r})))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""


def test_what_the_package_exports_is_there() -> None:
    import hpcgpu
    import hpcgpu.errors

    assert all(getattr(hpcgpu, name) is not None for name in hpcgpu.__all__)
    assert set(hpcgpu.errors.__all__) <= set(hpcgpu.__all__)
    raised = [getattr(hpcgpu, name) for name in hpcgpu.errors.__all__ if name != "ClusterWarning"]
    assert all(issubclass(error, hpcgpu.HpcgpuError) for error in raised)
    drawn = hpcgpu.errors.__doc__ or ""
    assert [name for name in hpcgpu.errors.__all__ if name not in drawn] == []
