"""A real multi-node Slurm with pretended GPUs, one for all tests; each test fails if it leaves a job in its queue.

With HPCGPU_TEST_SLURM=there in the environment it is the Slurm that this machine uses, such as the site in containers
from its login node (ci/test-site.sh); tests that need root's hands on nodes or controller are skipped.

It schedules every second, so that tests of other things do not wait for it. `slow_bed` is one that schedules as
other parameters request: Slurm's defaults, or only when something changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import bed as slurm_bed
import pytest

from tests.conftest import plain_install


@pytest.fixture(scope="module", autouse=True)
def without_bokeh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Only the cluster of test_slurm_notebook, and those of the site in containers, have Dask's dashboard."""
    if request.path.stem == "test_slurm_notebook" or os.environ.get("HPCGPU_TEST_SLURM") == "there":
        yield
    else:
        with plain_install(tmp_path_factory.mktemp("plain")):
            yield


class ThereBed(slurm_bed.SlurmBed):
    """The Slurm that is there. It has nodes and partitions as the bed has. Jobs that were there before stay."""

    whose = ("--me",)

    def __init__(self) -> None:
        """It has no directory."""
        self.before = set[str]()
        self.before = {job.id for job in self.squeue()}
        shown = slurm_bed.call("scontrol", "show", "config")
        self.cluster = next(line.split()[-1] for line in shown.splitlines() if line.startswith("ClusterName"))

    def environment(self) -> dict[str, str]:
        return {}

    def squeue(self) -> list[slurm_bed.Job]:
        """This user's jobs that began after the tests."""
        return [job for job in super().squeue() if job.id not in self.before]

    def _as_root(self, *arguments: str, **_: object) -> None:
        pytest.skip(f"nobody may do this on a Slurm that others use: {' '.join(arguments)}")

    set_partition = node_down = node_up = stop_node = switch_off = stop_controller = start_controller = _as_root  # type: ignore[assignment]


def running(place: Path, request: pytest.FixtureRequest, scheduling: str) -> Iterator[slurm_bed.SlurmBed]:
    """A Slurm that the commands of this process use."""
    if os.environ.get("HPCGPU_TEST_SLURM") == "there":
        if scheduling not in ("", slurm_bed.FAST):
            pytest.skip("the Slurm that is there has a scheduling of its own")
        yield ThereBed()
        return
    if reason := slurm_bed.why_not():
        pytest.skip(f"no Slurm can run here: {reason}")
    request.getfixturevalue("fake_gpus")  # after the reason above, which explains more than a missing compiler
    bed = slurm_bed.SlurmBed(place, scheduling)
    bed.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bed.environment().items():
            patch.setenv(name, value)
        yield bed
    bed.stop()


def one_test(bed: slurm_bed.SlurmBed) -> Iterator[slurm_bed.SlurmBed]:
    """The Slurm for one test, which must leave no job."""
    yield bed
    left = [job for job in bed.squeue() if job.state != "COMPLETING"]
    bed.cancel_all()
    bed.wait_empty()
    assert not left, f"the test left jobs in the queue: {left}"


@pytest.fixture(scope="session")
def _bed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[slurm_bed.SlurmBed]:
    yield from running(tmp_path_factory.mktemp("slurm"), request, slurm_bed.FAST)


@pytest.fixture
def bed(_bed: slurm_bed.SlurmBed, home: Path) -> Iterator[slurm_bed.SlurmBed]:
    yield from one_test(_bed)


@pytest.fixture(scope="module")
def _slow_bed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[slurm_bed.SlurmBed]:
    yield from running(tmp_path_factory.mktemp("slurm"), request, request.param)


@pytest.fixture
def slow_bed(_slow_bed: slurm_bed.SlurmBed, home: Path) -> Iterator[slurm_bed.SlurmBed]:
    """A test requests by `@pytest.mark.parametrize("_slow_bed", [...], indirect=True)` how it schedules."""
    yield from one_test(_slow_bed)
