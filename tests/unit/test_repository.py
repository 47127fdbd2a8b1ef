"""What the repository holds, and what a run of the tests may leave in it."""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Lines that a file of the package may have, and lines of code that a function may have: docstring and signature do not
#: count.
FILE, FUNCTION = 600, 50
#: Lines of code that one part of the package may have.
PART = 3000
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PICTURES = (".png", ".jpg", ".jpeg", ".gif")


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files that git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_no_tracked_file_is_larger_than_a_megabyte(tracked: list[Path]) -> None:
    assert tracked
    assert [path for path in tracked if path.stat().st_size > 1_000_000] == []


def test_the_only_binaries_are_pictures_of_the_pages(tracked: list[Path]) -> None:
    def binary(path: Path) -> bool:
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            return True
        return b"\0" in content

    def picture(path: Path) -> bool:
        return path.is_relative_to(ROOT / "docs") and path.suffix in PICTURES

    assert [path for path in tracked if binary(path) and not picture(path)] == []


def test_a_process_that_a_test_starts_leaves_no_core_dump() -> None:
    done = subprocess.run(["bash", "-c", "ulimit -Hc; ulimit -Sc"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


def test_no_file_of_the_package_is_too_long() -> None:
    paths = sorted((ROOT / "hpcgpu").rglob("*.py"))
    long = {str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) > FILE}
    assert not long, f"more than {FILE} lines: {', '.join(sorted(long))}"


def lines_of_code(path: Path) -> int:
    """Without blank lines, comments and docstrings."""
    text = path.read_text()
    lines, documentation = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines - documentation)


def test_no_part_of_the_package_is_too_large() -> None:
    parts = [path for path in (ROOT / "hpcgpu").iterdir() if path.is_dir()]
    sizes = {part.name: sum(lines_of_code(path) for path in part.rglob("*.py")) for part in parts}
    assert sizes["manager"] > 0
    large = {name: size for name, size in sizes.items() if size > PART}
    assert not large, f"more than {PART} lines of code: {large}"


def test_no_function_is_too_long() -> None:
    long = set()
    for path in (path for part in ("hpcgpu", "tests", "docs", "benchmarks") for path in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body and (body[-1].end_lineno or 0) - body[0].lineno >= FUNCTION:
                    long.add(f"{path.relative_to(ROOT)}:{node.name}")
    assert not long, f"more than {FUNCTION} lines: {', '.join(sorted(long))}"


def test_modules_of_tests_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest runs only one of them, and no other test"


def test_only_the_helpers_of_the_tests_reach_into_the_manager_of_a_cluster() -> None:
    """Real tests assert what the user sees: a change inside the reconciler must not change them."""
    paths = sorted(path for part in ("local", "slurm") for path in (ROOT / "tests" / part).rglob("*.py"))
    assert paths
    inside = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ".reconciler" in line
    ]
    assert not inside, f"use or add a helper of tests/helpers.py: {', '.join(inside)}"
