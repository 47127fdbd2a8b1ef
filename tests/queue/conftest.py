"""A pretended Slurm on the PATH, and the real `Slurm` that talks to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_slurm import Site

from hpcgpu.batch.slurm.client import Slurm


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path)
    monkeypatch.setenv("PATH", str(site.bin), prepend=os.pathsep)
    return site


@pytest.fixture
def naps() -> list[float]:
    """How long `slurm` waited before it tried again; nobody really waits."""
    return []


@pytest.fixture
def slurm(site: Site, naps: list[float]) -> Slurm:
    return Slurm(timeout=60, sleep=naps.append)
