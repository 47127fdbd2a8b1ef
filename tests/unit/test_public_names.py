"""What the package says of its names is true: `__all__`, and the errors that public calls document."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import json
import re
import subprocess
import sys
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
#: What a user must be told of, at least.
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


@functools.cache
def surfaces() -> dict[str, dict[str, list[str]]]:
    """Return `__all__` of each module, and all that the module has; read in a process of its own, as preloads change
    the one they are in.
    """
    code = """
import importlib, json, sys
modules = {}
for name in sys.argv[1:]:
    try:
        modules[name] = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name.startswith(("anywidget", "jupyter_server")):
            raise
names = {name: {"all": [*getattr(module, "__all__", ())], "has": dir(module)} for name, module in modules.items()}
print(json.dumps(names))
"""
    names = [name for name in MODULES if name != "hpcgpu.__main__"]
    done = subprocess.run([sys.executable, "-c", code, *names], check=True, capture_output=True, text=True)
    read: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return {**read, "hpcgpu.__main__": {"all": [], "has": []}}


def surface(name: str) -> dict[str, list[str]]:
    """Return that of one module, or skip."""
    if name not in surfaces():
        pytest.skip("the extra `jupyter` is not installed")
    return surfaces()[name]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_other_modules_use_of_a_module_is_in_its_all(name: str) -> None:
    taken = {attribute for other in MODULES if other != name for module, attribute in used(other) if module == name}
    exported = set(surface(name)["all"])
    missing = {one for one in taken if not one.startswith("_")} - exported
    assert not missing, f"{name}.__all__ lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"hpcgpu", "hpcgpu.__main__", "hpcgpu.errors"}))
def test_what_is_in_the_all_of_a_module_exists_and_is_used(name: str) -> None:
    exported = set(surface(name)["all"])
    assert not (absent := exported - set(surface(name)["has"])), f"{name} has no {absent}"
    own = WORDS[MODULES[name]]
    returned = " ".join(
        re.findall(r"->.*", SOURCES[MODULES[name]])
    )  # what its public functions return, a caller can name
    hooks = {
        one for one in exported if one.startswith("dask_") or one == "setup"
    }  # Dask and Sphinx call these by their names
    unused = {
        one
        for one in exported - hooks
        if FILES[one] == (one in own) and not re.search(rf"\b{re.escape(one)}\b", returned)
    }
    assert not unused, f"{name}.__all__ has {', '.join(sorted(unused))}, which nothing else uses"


SOURCES = {
    path: path.read_text()
    for folder in ("hpcgpu", "tests", "docs", "templates", "examples", "benchmarks", "pyproject.toml")
    for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".rst", ".md", ".j2", ".toml") and "_build" not in path.parts
}
WORDS = {path: frozenset(re.findall(r"\w+", text)) for path, text in SOURCES.items()}
#: In how many files a word is.
FILES = Counter(word for words in WORDS.values() for word in words)
