"""The table of what ran where, in docs/tested.md.

    python tests/ran.py            # writes it
    python tests/ran.py --check    # prints whether it is up to date

A row is what tests show: `pytestmark = pytest.mark.shows("...")` in a module, or the same mark on one test, which
then counts instead of that of its module. The column is where they run: by their folder and their fixtures; with the
mark `on_site`, in the site in containers too. CI runs them, unless they have the mark `by_hand`. What ran by hand is
in by_hand.toml, with its date.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tested.md"
BY_HAND = ROOT / "tests" / "by_hand.toml"
#: The columns, and their headings.
PLACES = {
    "slurm-22.05": "Slurm 22.05, one machine",
    "slurm-24.11": "Slurm 24.11, one machine",
    "slurm-26.05": "Slurm 26.05, one machine",
    "site-24.11": "Slurm 24.11, hosts in containers",
    "site-22.05": "Slurm 22.05, hosts in containers",
    "site-26.05": "Slurm 26.05, hosts in containers",
    "pbs": "PBS, imitated",
    "openpbs": "OpenPBS 23.06.06, hosts as namespaces",
    "gridengine": "Grid Engine 8.1.9",
    "htcondor": "HTCondor 23.9.6",
    "local": "embedded queue",
}
#: Where the tests of a folder run in CI.
FOLDERS = {
    "tests/slurm": "slurm-22.05",
    "tests/site": "site-24.11",
    "tests/local": "local",
    "tests/browser": "local",
    "tests/ssh": "local",
    "plugins/gridengine/tests": "gridengine",
    "plugins/htcondor/tests": "htcondor",
}
BEGIN, END = "<!-- by tests/ran.py -->", "<!-- end -->"


class Shown(NamedTuple):
    """One test: what it shows, where, and whether CI runs it."""

    row: str
    place: str
    in_ci: bool
    test: str


def marks(node: ast.AST) -> dict[str, list[Any]]:
    """The marks of pytest in an expression: their names, and their arguments."""
    found: dict[str, list[Any]] = {}
    for part in ast.walk(node):
        name = re.fullmatch(r"pytest\.mark\.(\w+)", ast.unparse(part.func if isinstance(part, ast.Call) else part))
        if name and (isinstance(part, ast.Call) or name[1] not in found):
            arguments = part.args if isinstance(part, ast.Call) else []
            found[name[1]] = [value.value for value in arguments if isinstance(value, ast.Constant)]
    return found


def of(path: Path) -> Iterator[Shown]:
    """The tests of one module that declare what they show."""
    module = ast.parse(path.read_text())
    common: dict[str, list[Any]] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            common |= marks(node.value)
    for node in module.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        own = dict(common)
        for decorator in node.decorator_list:
            found = marks(decorator)
            if "parametrize" in found:  # a mark of one parameter: the others run
                found.pop("by_hand", None)
            own |= found
        if "shows" in own:
            place = FOLDERS[str(path.parent.relative_to(ROOT))]
            if place == "local" and "pbs" in {argument.arg for argument in node.args.args}:
                place = "pbs"
            name = f"{path.relative_to(ROOT)}::{node.name}"
            yield Shown(own["shows"][0], place, "by_hand" not in own, name)
            if "on_site" in own:
                yield Shown(own["shows"][0], "site-24.11", True, name)


def every() -> list[Shown]:
    """The tests of all folders that declare what they show."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))
    return [shown for path in paths for shown in of(path)]


def _ran(shown: Shown, run: dict[str, Any]) -> bool:
    """Whether a run by hand had this test."""
    as_in = run.get("as_in")
    return shown.test.startswith(run["tests"]) and (as_in is None or (shown.in_ci and shown.place == as_in))


def cells() -> dict[str, dict[str, set[str]]]:
    """By row and place: what stands there."""
    rows: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    tests = every()
    for shown in tests:
        rows[shown.row]  # also a row that nothing ran yet
        if shown.in_ci:
            rows[shown.row][shown.place].add("CI")
    for run in tomllib.loads(BY_HAND.read_text()).get("run", []):
        words = f"{run.get('outcome', 'by hand')}, {run['date']}"
        found = [run["row"]] if "row" in run else [shown.row for shown in tests if _ran(shown, run)]
        if not found:
            raise SystemExit(f"{BY_HAND.name}: no test is called {run['tests']}")
        for row in found:
            if "CI" not in rows[row][run["place"]]:
                rows[row][run["place"]].add(words)
    return rows


def table() -> str:
    """The table, as Markdown."""
    rows = cells()
    lines = ["| what | " + " | ".join(PLACES.values()) + " |", "|---" * (len(PLACES) + 1) + "|"]
    for row in sorted(rows, key=str.casefold):
        lines.append(f"| {row} | " + " | ".join("; ".join(sorted(rows[row].get(p, ()))) for p in PLACES) + " |")
    return "\n".join(lines)


def page() -> str:
    """The page with the table that the tests declare."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else "docs/tested.md is not up to date: run python tests/ran.py")
    PAGE.write_text(page())
