"""Imports go one way, and the login node pays for nothing it does not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpcgpu"
#: Every layer may use these.
ERRORS = {"hpcgpu.errors", "hpcgpu.errors.ClusterWarning"}
HEAVY = ("dask", "distributed", "cuda", "cupy", "cudf", "rmm", "ucxx", "pynvml")


@pytest.mark.parametrize("module", ["hpcgpu", "hpcgpu.runtime.launch", "hpcgpu.batch.slurm", "hpcgpu.batch.pbs", "hpcgpu.batch.local"])
def test_importing_it_loads_neither_dask_nor_cuda(module: str) -> None:
    # Compared with a bare start: .pth files of installed packages load some names by themselves.
    code = f"import sys; before = set(sys.modules); import {module}; new = set(sys.modules) - before"
    code += f"; print(*sorted({{m.split('.')[0] for m in new}} & set({HEAVY!r})))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("batch", ["dask", "distributed", "hpcgpu.cluster", "hpcgpu.jobs", "hpcgpu.options", "hpcgpu.scripts", "hpcgpu.runtime"]),
        ("runtime", ["hpcgpu.cluster", "hpcgpu.lifecycle", "hpcgpu.manager", "hpcgpu.jobs", "hpcgpu.options", "hpcgpu.scripts"]),
        ("fabric", ["hpcgpu.cluster", "hpcgpu.jobs", "hpcgpu.options", "hpcgpu.runtime"]),
        ("checks", ["distributed", "hpcgpu.cluster", "hpcgpu.lifecycle", "hpcgpu.manager", "hpcgpu.cli"]),
        ("checks/environment.py", ["dask", "hpcgpu.options", "hpcgpu.scripts", "hpcgpu.runtime"]),
        ("agreement.py", ["distributed", "hpcgpu.cluster", "hpcgpu.lifecycle", "hpcgpu.manager"]),
        ("options.py", ["hpcgpu.batch", "hpcgpu.jobs", "hpcgpu.cluster", "hpcgpu.scripts"]),
        ("scripts.py", ["hpcgpu.batch", "hpcgpu.jobs", "hpcgpu.cluster"]),
        ("jobs.py", ["hpcgpu.cluster", "hpcgpu.scripts", "hpcgpu.options"]),
        ("directory.py", ["dask", "distributed", "hpcgpu.batch", "hpcgpu.options", "hpcgpu.jobs", "hpcgpu.credentials", "hpcgpu.clusters"]),
        ("errors.py", ["dask", "distributed", "hpcgpu"]),
        ("printable.py", ["dask", "distributed", "hpcgpu"]),
        ("ownership.py", ["dask", "distributed", "hpcgpu"]),
        ("records.py", ["dask", "distributed", "hpcgpu"]),
        ("processes.py", ["dask", "distributed", "hpcgpu"]),
        ("pbsname.py", ["dask", "distributed", "hpcgpu"]),
        ("policy.py", ["dask", "distributed", "hpcgpu", "time", "random", "os"]),
        ("walltime.py", ["dask", "distributed", "hpcgpu", "time"]),
        ("troubles.py", ["dask", "distributed", "time", "hpcgpu.jobs", "hpcgpu.cluster", "hpcgpu.manager"]),
        ("groups.py", ["distributed", "hpcgpu.cluster", "hpcgpu.manager", "hpcgpu.scripts"]),
        ("retire.py", ["hpcgpu.cluster", "hpcgpu.manager", "hpcgpu.groups"]),
        ("manager.py", ["hpcgpu.cluster", "hpcgpu.cli", "hpcgpu.scripts", "hpcgpu.lifecycle"]),
        ("lifecycle.py", ["hpcgpu.cluster", "hpcgpu.cli"]),
        ("connection.py", ["hpcgpu.cluster", "hpcgpu.lifecycle", "hpcgpu.manager", "hpcgpu.cli"]),
        ("status.py", ["hpcgpu.cluster", "hpcgpu.lifecycle", "hpcgpu.manager", "hpcgpu.cli"]),
        ("saved.py", ["hpcgpu.batch", "hpcgpu.jobs", "hpcgpu.cluster", "hpcgpu.cli"]),
        ("profiles", ["dask", "distributed", "hpcgpu.options", "hpcgpu.cluster", "hpcgpu.cli"]),
        ("bundle.py", ["hpcgpu.cluster", "hpcgpu.manager", "hpcgpu.cli"]),
    ],
)
def test_no_room_imports_a_higher_one(room: str, forbidden: list[str]) -> None:
    files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        wrong = {name for name in imported(path) - ERRORS for bad in forbidden if name == bad or name.startswith(f"{bad}.")}
        assert not wrong, f"{path.name} imports {wrong}"
