"""A real multi-node Slurm with pretended GPUs, one for all tests; each test fails if it leaves a job in its queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bed as slurm_bed
import pytest


@pytest.fixture(scope="session")
def _bed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[slurm_bed.SlurmBed]:
    if reason := slurm_bed.why_not():
        pytest.skip(f"no Slurm can run here: {reason}")
    request.getfixturevalue("fake_gpus")  # after the reason above, which says more than a missing compiler
    bed = slurm_bed.SlurmBed(tmp_path_factory.mktemp("slurm"))
    bed.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bed.environment().items():
            patch.setenv(name, value)
        yield bed
    bed.stop()


@pytest.fixture
def bed(_bed: slurm_bed.SlurmBed, home: Path) -> Iterator[slurm_bed.SlurmBed]:
    yield _bed
    left = [job for job in _bed.squeue() if job.state != "COMPLETING"]
    _bed.cancel_all()
    _bed.wait_empty()
    assert not left, f"the test left jobs in the queue: {left}"
