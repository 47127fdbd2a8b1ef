"""The promises to users in docs/promises.md: each has tests that hold it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"


@cache
def defined_in(module: Path) -> dict[str, bool]:
    """The tests of a module: whether all their cases run by hand only."""
    tree = ast.parse(module.read_text())
    common = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    by_hand = any("by_hand" in ast.unparse(node) for node in common)
    return {
        node.name: by_hand or any(ast.unparse(mark) == "pytest.mark.by_hand" for mark in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def promises() -> dict[str, list[str]]:
    """The tests that the page names for each promise."""
    items = re.findall(r"^- (.+)\n((?:  .+\n)*)", PAGE.read_text(), re.MULTILINE)
    assert items and len(items) == len(dict(items)), "a promise is there twice"
    return {promise: re.findall(r"`([^`\s]+::[^`\s]+)`", tests) for promise, tests in items}


def test_each_promise_has_tests_that_exist_and_run() -> None:
    wrong = []
    for promise, tests in promises().items():
        if not tests:
            wrong.append(f"no test holds: {promise}")
        for test in tests:
            path, _, name = test.partition("::")
            module = ROOT / path
            found = defined_in(module) if module.is_file() else {}
            if found.get(name, True):
                wrong.append(f"{test} {'runs by hand only' if name in found else 'does not exist'}: {promise}")
    assert not wrong, "docs/promises.md:\n" + "\n".join(wrong)


def test_the_page_of_each_promise_exists() -> None:
    pages = re.findall(r"^## .+\n\nPage: \[.+\]\((\S+)\)\n", PAGE.read_text(), re.MULTILINE)
    assert len(pages) == PAGE.read_text().count("\n## ")
    assert [page for page in pages if not (PAGE.parent / page).is_file()] == []
