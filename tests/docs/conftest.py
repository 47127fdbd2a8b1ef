"""The pages, built once for all tests of them. Their examples run as after a plain `pip install hpcgpu`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import plain_install

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as HTML; they build without a warning, and each reference leads somewhere (``-n``)."""
    folder = tmp_path_factory.mktemp("html")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-nWq", "docs", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def without_bokeh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with plain_install(tmp_path_factory.mktemp("plain")):
        yield
