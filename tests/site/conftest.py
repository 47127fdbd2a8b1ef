"""The site in containers, which `ci/slurm-docker/site up` starts; `make test-site` does that, and runs these tests."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import site_bed

from tests.site.programs import end_all

#: Epoch seconds after which no further test begins.
UNTIL = float(os.environ.get("HPCGPU_SITE_UNTIL", "inf"))
LOCK = Path(tempfile.gettempdir()) / f"{site_bed.NAME}.lock"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left."""
    if time.time() > UNTIL:
        pytest.skip("no time is left for it (HPCGPU_SITE_UNTIL)")


@pytest.fixture(scope="session")
def _site() -> Iterator[site_bed.Site]:
    if reason := site_bed.why_not():
        pytest.skip(f"no test of a site in containers can run here: {reason}")
    with open(LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # there is one site, and perhaps another program that tests
        site = site_bed.Site()
        site.reset()
        yield site


@pytest.fixture
def site(_site: site_bed.Site) -> Iterator[site_bed.Site]:
    """The site, with all hosts up, no jobs and idle nodes; the test fails if it leaves a job."""
    yield _site
    end_all()
    left = _site.reset()
    assert not left, f"the test left jobs in the queue: {left}"
