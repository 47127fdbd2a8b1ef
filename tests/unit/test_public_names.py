"""What the package declares of its names is true: what is private stays so, and errors that calls document exist."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcgpu
from hpcgpu import errors
from tests.unit.test_layers import MODULES

ROOT = Path(__file__).parents[2]
CALLS = {
    f"{cls.__name__}.{name}": member
    for cls in (hpcgpu.GPUCluster, hpcgpu.SlurmGPURunner)
    for name, member in inspect.getmembers(cls)
    if not name.startswith("_") and (getattr(member, "__module__", None) or "").startswith("hpcgpu.")
} | {"connect": hpcgpu.connect}
CLASSES = {
    name: getattr(hpcgpu, name)
    for name in ("GPUCluster", "SlurmGPUCluster", "PBSGPUCluster", "LocalGPUCluster", "SlurmGPURunner")
}
#: What must be documented to users, at least.
TOLD = {
    **{
        name: {"OptionError", "ClusterExists", "BatchError", "NotTrusted", "ClusterError"}
        for name in ("GPUCluster", "SlurmGPUCluster", "PBSGPUCluster", "LocalGPUCluster")
    },
    "SlurmGPURunner": {"OptionError", "ClusterError", "ClusterExists", "NotTrusted"},
    "GPUCluster.from_name": {"NoCluster", "OtherFormat", "BatchError", "NotTrusted", "Damaged", "ClusterError"},
    "GPUCluster.scale": {"OptionError", "ClusterError"},
    "GPUCluster.adapt": {"OptionError", "ClusterError"},
    "GPUCluster.add_worker_group": {"OptionError", "ClusterError"},
    "GPUCluster.delete_worker_group": {"OptionError", "ClusterError"},
    "GPUCluster.detach": {"ClusterError"},
    "GPUCluster.settle": {"ClusterError"},
    "GPUCluster.wait_for_workers": {"ClusterError", "OptionError", "WorkerStartTimeoutError"},
    "GPUCluster.get_client": {"ClusterError"},
    "connect": {
        "NoCluster",
        "OtherFormat",
        "BatchError",
        "NotTrusted",
        "Damaged",
        "ClusterError",
        "OptionError",
        "TimeoutError",
    },
}


def raises(documented: Any) -> set[str]:
    """Names of the errors in the section "Raises"."""
    text = inspect.getdoc(documented) or ""
    section = re.search(r"^Raises\n-+\n(.*?)(?=^\w[^\n]*\n-{3,}|\Z)", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^(\w+)$", section[1], re.MULTILINE)) if section else set()


@pytest.mark.parametrize("name", [*CLASSES, *CALLS])
def test_the_errors_that_a_call_documents_exist_and_the_ones_that_users_meet_are_documented(name: str) -> None:
    said = raises((CLASSES | CALLS)[name])
    unknown = {error for error in said if not hasattr(errors, error) and not hasattr(builtins, error)} - {
        "WorkerStartTimeoutError"
    }
    assert not unknown, f"{name} documents errors that hpcgpu does not have: {unknown}"
    assert not (missing := TOLD.get(name, set()) - said), f"{name} does not document {missing}"


@functools.cache
def used(name: str) -> frozenset[tuple[str, str]]:
    """Return module and name for each name that one module takes from another one of hpcgpu."""
    return frozenset(_used(name))


def _used(name: str) -> Iterator[tuple[str, str]]:
    tree = ast.parse(MODULES[name].read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hpcgpu":
            for alias in node.names:
                if f"{node.module}.{alias.name}" in MODULES:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield str(node.module), alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_module_uses_a_private_name_of_another_module(name: str) -> None:
    taken = {f"{module}.{one}" for module, one in used(name) if module != name and re.match("_[^_]", one)}
    assert not taken, f"{name} uses {', '.join(sorted(taken))}: a name with an underscore is for its own module"


def defined(name: str) -> Iterator[str]:
    """Return the functions, classes and constants of a module, but no function whose decorator may register it."""
    for node in ast.parse(MODULES[name].read_text()).body:
        if (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list) or isinstance(
            node, ast.ClassDef
        ):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


#: Python, Dask, Sphinx and Jupyter use these by their names.
HOOKS = re.compile("__|dask_|setup$|_jupyter_server_extension_points|_load_jupyter_server_extension")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_a_module_defines_is_used(name: str) -> None:
    text = SOURCES[MODULES[name]]
    unused = {
        one
        for one in defined(name)
        if FILES[one] == 1 and len(re.findall(rf"\b{one}\b", text)) == 1 and not HOOKS.match(one)
    }
    assert not unused, f"nothing uses {', '.join(sorted(unused))} of {name}"


SOURCES = {
    path: path.read_text()
    for folder in ("hpcgpu", "tests", "docs", "templates", "examples", "benchmarks", "pyproject.toml")
    for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".rst", ".md", ".j2", ".toml") and "_build" not in path.parts
}
WORDS = {path: frozenset(re.findall(r"\w+", text)) for path, text in SOURCES.items()}
#: In how many files a word is.
FILES = Counter(word for words in WORDS.values() for word in words)
