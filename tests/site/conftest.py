"""The site in containers, which `ci/slurm-docker/site up` starts; `make test-site` does that, and runs these tests."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import site_bed

from tests.site.programs import end_all

LOCK = Path(tempfile.gettempdir()) / f"{site_bed.NAME}.lock"


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
