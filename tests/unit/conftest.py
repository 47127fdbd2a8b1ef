"""What the tests of `stage` share: an archive, and the directory of a node that it is unpacked in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packed import Environment


@pytest.fixture
def base(tmp_path: Path) -> Path:
    place = tmp_path / "node"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def archive(environment: Environment) -> Path:
    return environment.archive("env.tar.gz")
