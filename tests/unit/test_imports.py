"""Imports go one way, and the login node pays for nothing it does not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpcgpu"
HEAVY = ("dask", "distributed", "cuda", "cupy", "cudf", "rmm", "ucxx", "pynvml")


@pytest.mark.parametrize(
    "module", ["hpcgpu", "hpcgpu.runtime.launch", "hpcgpu.batch.slurm.client", "hpcgpu.batch.pbs.client", "hpcgpu.batch.local.queue"]
)
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
        (
            "batch",
            [
                "dask",
                "distributed",
                "hpcgpu.cluster.gpucluster",
                "hpcgpu.cluster.jobs",
                "hpcgpu.options.schema",
                "hpcgpu.scripts.render",
                "hpcgpu.runtime",
            ],
        ),
        (
            "runtime",
            [
                "hpcgpu.cluster.gpucluster",
                "hpcgpu.cluster.lifecycle",
                "hpcgpu.cluster.manager",
                "hpcgpu.cluster.jobs",
                "hpcgpu.options.schema",
                "hpcgpu.scripts.render",
            ],
        ),
        ("fabric", ["hpcgpu.cluster.gpucluster", "hpcgpu.cluster.jobs", "hpcgpu.options.schema", "hpcgpu.runtime"]),
        ("checks", ["distributed", "hpcgpu.cluster.gpucluster", "hpcgpu.cluster.lifecycle", "hpcgpu.cluster.manager", "hpcgpu.cli"]),
        ("checks/environment.py", ["dask", "hpcgpu.options.schema", "hpcgpu.scripts.render", "hpcgpu.runtime"]),
        ("agreement.py", ["distributed", "hpcgpu.cluster.gpucluster", "hpcgpu.cluster.lifecycle", "hpcgpu.cluster.manager"]),
        ("options.py", ["hpcgpu.batch", "hpcgpu.cluster.jobs", "hpcgpu.cluster.gpucluster", "hpcgpu.scripts.render"]),
        ("scripts.py", ["hpcgpu.batch", "hpcgpu.cluster.jobs", "hpcgpu.cluster.gpucluster"]),
        ("jobs.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.scripts.render", "hpcgpu.options.schema"]),
        (
            "directory.py",
            [
                "dask",
                "distributed",
                "hpcgpu.batch",
                "hpcgpu.options.schema",
                "hpcgpu.cluster.jobs",
                "hpcgpu.store.credentials",
                "hpcgpu.remote.lookup",
            ],
        ),
        ("printable.py", ["dask", "distributed", "hpcgpu"]),
        ("ownership.py", ["dask", "distributed", "hpcgpu"]),
        ("records.py", ["dask", "distributed", "hpcgpu"]),
        ("processes.py", ["dask", "distributed", "hpcgpu"]),
        ("pbsname.py", ["dask", "distributed", "hpcgpu"]),
        ("policy.py", ["dask", "distributed", "hpcgpu", "time", "random", "os"]),
        ("walltime.py", ["dask", "distributed", "hpcgpu", "time"]),
        ("troubles.py", ["dask", "distributed", "time", "hpcgpu.cluster.jobs", "hpcgpu.cluster.gpucluster", "hpcgpu.cluster.manager"]),
        ("groups.py", ["distributed", "hpcgpu.cluster.gpucluster", "hpcgpu.cluster.manager", "hpcgpu.scripts.render"]),
        ("retire.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.cluster.manager", "hpcgpu.cluster.groups"]),
        ("manager.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.cli", "hpcgpu.scripts.render", "hpcgpu.cluster.lifecycle"]),
        ("lifecycle.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.cli"]),
        ("connection.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.cluster.lifecycle", "hpcgpu.cluster.manager", "hpcgpu.cli"]),
        ("status.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.cluster.lifecycle", "hpcgpu.cluster.manager", "hpcgpu.cli"]),
        ("saved.py", ["hpcgpu.batch", "hpcgpu.cluster.jobs", "hpcgpu.cluster.gpucluster", "hpcgpu.cli"]),
        ("profiles", ["dask", "distributed", "hpcgpu.options.schema", "hpcgpu.cluster.gpucluster", "hpcgpu.cli"]),
        ("bundle.py", ["hpcgpu.cluster.gpucluster", "hpcgpu.cluster.manager", "hpcgpu.cli"]),
    ],
)
def test_no_room_imports_a_higher_one(room: str, forbidden: list[str]) -> None:
    files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        wrong = {name for name in imported(path) for bad in forbidden if name == bad or name.startswith(f"{bad}.")}
        assert not wrong, f"{path.name} imports {wrong}"
