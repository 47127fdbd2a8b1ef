"""The table in tests/canaries/uses.py is all that hpcgpu uses of other projects beyond their documented interfaces, and
each use has a canary.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from canary import lacks, members
from uses import USES, Kind, Use

from hpcgpu.releases import TESTED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hpcgpu"
CANARIES = ROOT / "tests" / "canaries"
#: Whose insides are watched. The rest of Python's library, and pytest's kind, document what they call private.
UPSTREAM = ("distributed", "dask", "dask_cuda", "ucxx", "distributed_ucxx", "tornado", "ssl", "rmm", "bokeh")
#: Names with an underscore that are documented.
DOCUMENTED = {
    "_getframe": "documented in sys",
    "_exit": "documented in os, and in _exit(2)",
    "_fields_": "documented in ctypes",
    "_repr_html_": "documented by IPython",
    "_repr_mimebundle_": "documented by IPython",
    "_ipython_display_": "documented by IPython",
    "_esm": "documented by anywidget",
    "_css": "documented by anywidget",
}
MODULES = {
    ".".join(("hpcgpu", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__main__.py"
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


class Found(NamedTuple):
    """A use of upstream's insides in the code."""

    module: str
    name: str
    line: int


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def of_upstream(tree: ast.AST) -> dict[str, str]:
    """Return what a module calls by which name: what it imports from upstream, and arguments that are declared as
    such.
    """
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.split(".")[0]: a.name for a in node.names if a.name.split(".")[0] in UPSTREAM}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in UPSTREAM:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg != "self" and node.annotation is not None:
            kinds = ast.unparse(node.annotation).split(" | ")
            if found := next((names[kind] for kind in kinds if kind in names), None):
                names[node.arg] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in names:
            names |= {
                ast.unparse(target): names[ast.unparse(node.value)]
                for target in node.targets
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
    return names


@functools.cache
def own_names() -> set[str]:
    """Return the private names that hpcgpu itself defines."""
    names = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def root(node: ast.expr) -> str:
    """Return the leftmost name of an expression: `a` of `a.b.c`, but `self.b` of `self.b.c`."""
    outer = node
    while isinstance(node, ast.Attribute | ast.Subscript):
        outer, node = node, node.value
    if not isinstance(node, ast.Name):
        return ""
    return ast.unparse(outer) if node.id == "self" else node.id


def private_attributes(module: str) -> Iterator[Found]:
    """Yield private names that are read or called on something that is not hpcgpu's own."""
    upstream, own = of_upstream(TREES[module]), own_names()
    for node in ast.walk(TREES[module]):
        if (
            isinstance(node, ast.Attribute)
            and private(node.attr)
            and ast.unparse(node.value) not in ("self", "cls", "super()")
        ):
            if root(node) in upstream or node.attr not in own:
                yield Found(module, node.attr, node.lineno)


def may_be_set(kind: str, name: str) -> bool:
    """Whether a class of upstream documents the setter of one of its properties."""
    module, _, cls = kind.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module), cls, None) if module else None
    except ModuleNotFoundError:  # Bokeh is optional, and not installed: the table has its uses
        return False
    found = inspect.getattr_static(owner, name, None)
    return isinstance(found, property) and bool(getattr(found.fset, "__doc__", None))


def replaced(module: str) -> Iterator[Found]:
    """Yield what hpcgpu assigns to objects and modules of upstream.

    A new operation of a server does not count: `distributed.core.Server` documents its `handlers`, and
    `Scheduler.worker_send` reaches the handlers of a worker's stream. A property whose setter has a docstring does not
    count either.
    """
    upstream = of_upstream(TREES[module])
    assigned = [node for node in TREES[module].body if isinstance(node, ast.Assign)]
    constants = {ast.unparse(a.targets[0]): a.value.value for a in assigned if isinstance(a.value, ast.Constant)}
    for node in ast.walk(TREES[module]):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in itertools.chain.from_iterable(t.elts if isinstance(t, ast.Tuple) else [t] for t in targets):
            if not isinstance(target, ast.Attribute | ast.Subscript) or root(target) not in upstream:
                continue
            if ast.unparse(target) == root(target):  # our own attribute, to which an object of upstream is assigned
                continue
            if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("handlers"):
                key = target.slice
                name = key.value if isinstance(key, ast.Constant) else constants.get(ast.unparse(key), "")
                if str(name).startswith("hpcgpu"):
                    continue
            if isinstance(target, ast.Attribute) and may_be_set(upstream[root(target)], target.attr):
                continue
            while isinstance(target, ast.Subscript):
                target = target.value
            yield Found(module, target.attr if isinstance(target, ast.Attribute) else root(target), target.lineno)


def inherited(module: str) -> Iterator[Found]:
    """Yield private names of upstream that a class of hpcgpu overrides or uses, be it by chance."""
    if not any(isinstance(node, ast.ClassDef) for node in ast.walk(TREES[module])):
        return  # nor is it imported: preloads change this process
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("anywidget", "jupyter_server")):
            return  # the extra `jupyter` is not there; where it is, this test sees the module
        raise
    for cls in [value for value in vars(loaded).values() if inspect.isclass(value) and value.__module__ == module]:
        bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] in UPSTREAM]
        theirs = {name for base in bases for name in members(base) if private(name)}
        if not theirs:
            continue
        for node in ast.walk(
            next(n for n in ast.walk(TREES[module]) if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
        ):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in theirs:
                yield Found(module, node.name, node.lineno)
            elif isinstance(node, ast.Attribute) and node.attr in theirs and root(node).startswith("self."):
                yield Found(module, node.attr, node.lineno)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in theirs:
                yield Found(module, node.id, node.lineno)


def listed(found: Found) -> bool:
    """Whether the table has a use, in the module where it was found."""
    uses = [use for use in USES if found.name in use.name.split(".")]
    return any(f"{found.module}.".startswith(f"{place}.") for use in uses for place in use.used_in)


@pytest.mark.parametrize("module", MODULES)
def test_what_is_used_of_upstream_beyond_its_documents_is_in_the_table(module: str) -> None:
    missing = sorted(
        {f for look in (private_attributes, replaced, inherited) for f in look(module) if not listed(f)}, key=str
    )
    told = ", ".join(f"{name} (line {line})" for _, name, line in missing)
    assert not missing, (
        f"{module} relies on {told}: add a Use with a canary to tests/canaries/uses.py, or choose another name"
    )


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
def test_what_the_table_has_is_used_where_it_states(use: Use) -> None:
    word = use.name.rpartition(".")[2]
    for place in use.used_in:
        sources = [path.read_text() for name, path in MODULES.items() if f"{name}.".startswith(f"{place}.")]
        assert any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for text in sources), (
            f"{place} does not use {use.name}: take it out of tests/canaries/uses.py, and its canary where it has "
            "nothing else"
        )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("distributed.deploy.spec.SpecCluster._gone", "SpecCluster has no _gone"),
        ("distributed.deploy.spec.SpecCluster._start", ""),
        ("distributed.deploy.spec.SpecCluster._log", "SpecCluster has no _log"),  # its base has it
        ("distributed.deploy.gone.Cluster", "distributed.deploy has no gone"),
        ("distributed.node.ServerNode.http_server.gone", ""),  # an object has what follows
        ("distributed.comm.core.connect.gone", ""),
        ("libgone.gone", ""),
    ],
)
def test_a_canary_first_sees_whether_the_name_is_still_there(name: str, missing: str) -> None:
    assert lacks(name) == missing


def test_the_scan_finds_what_is_known_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        (f.module, f.name)
        for module in MODULES
        for look in (private_attributes, replaced, inherited)
        for f in look(module)
    }
    assert {
        ("hpcgpu.dask_scheduler.data_recipients", "_find_recipient"),
        ("hpcgpu.runtime.dashboard_access", "HTTPServer"),
        ("hpcgpu.dask_scheduler.scheduler_extension", "error_message"),
        ("hpcgpu.runtime.cpu_affinity", "nvml_device_index"),
        ("hpcgpu.fabric.tls_connections", "backends"),
    } <= found
    monkeypatch.delitem(DOCUMENTED, "_repr_html_")
    overridden = {one.name for one in inherited("hpcgpu.cluster.cluster_inspection")}
    assert overridden == {"_repr_html_"}, "a class of hpcgpu overrides no private name of distributed's clusters"


def test_each_use_has_a_canary_and_each_canary_a_use() -> None:
    tests: dict[str, bool] = {}
    for path in CANARIES.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                tests[node.name] = any(ast.unparse(decorator) == "canary" for decorator in node.decorator_list)
    assert all(tests.values()), "each test in tests/canaries has the decorator `canary`"
    assert {use.canary for use in USES} == tests.keys()


def test_each_use_gives_its_reason_and_names_no_issue_of_another_form() -> None:
    assert len({(use.name, use.distribution) for use in USES}) == len(USES)
    for use in USES:
        assert use.why and use.used_in and isinstance(use.kind, Kind)
        assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", issue) for issue in use.issues), use.issues


def test_the_lower_end_of_what_is_tested_is_the_lower_bound_of_what_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = dict(
        text.partition(";")[0].split(">=")
        for text in (*project["dependencies"], *extras["cu12"], *extras["cu13"])
        if ">=" in text
    )
    pinned = dict(line.split("==") for line in (ROOT / "ci" / "lowest.txt").read_text().splitlines() if "==" in line)
    for name, release in TESTED.items():
        names = [name] if name in bounds else [f"{name}-cu12", f"{name}-cu13"]
        assert {bounds[each] for each in names} == {release.lowest}, (
            f"pyproject.toml has another lower bound for {name}"
        )
        assert {pinned[each] for each in names if each in pinned} == {release.lowest}, (
            f"ci/lowest.txt has another release of {name}"
        )
