"""What the repository holds, and what a run of the tests may leave in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
