"""Verifiers of a site (JSV) that refuse, hang or break, on a real Grid Engine."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Run
from gridengine_bed import GridEngineBed, wait_for
from hpcgpu_gridengine.client import GridEngine

from hpcgpu.errors import AmbiguousSubmit, SubmitRefused

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")


@pytest.fixture
def site(bed: GridEngineBed) -> Iterator[GridEngineBed]:
    """A site whose verifiers are removed after the test."""
    yield bed
    bed.set_request("")
    bed.set_global(jsv_url="none")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.sge"
    path.write_text(f"#!/bin/bash\n#$ -S /bin/bash\n#$ -j y\n#$ -o {tmp_path}/log\nexec sleep 1000\n")
    return path


def hanging(go: Path) -> str:
    """Answers of a verifier that does not answer before a file is there."""
    return f"until [ -e {go} ]; do sleep 0.2; done; echo 'RESULT STATE ACCEPT'"


def test_the_words_of_a_verifier_that_runs_with_qsub_reach_the_user(program: Run, site: GridEngineBed) -> None:
    verifier = site.verifier("echo 'RESULT STATE REJECT no GPUs on Sundays'")
    site.set_request(f"-jsv {verifier}")
    done = program("SGEGPUCluster(**SMALL, jobs=1).wait_for_workers(1, timeout=60)")
    assert done.returncode != 0
    assert "Grid Engine refused job" in done.stderr and "no GPUs on Sundays" in done.stderr
    assert site.jobs() == {}


@pytest.mark.parametrize("where", ["client", "server"])
def test_a_verifier_that_is_broken_is_named(site: GridEngineBed, script: Path, where: str) -> None:
    verifier = site.verifier("echo no such site >&2; exit 3")
    if where == "client":
        site.set_request(f"-jsv {verifier}")
    else:
        site.set_global(jsv_url=f"script:{verifier}")
    with pytest.raises(SubmitRefused, match=r"(?s)JSV.*no such site.*ask the site"):
        GridEngine(attempts=1).submit(script, job_name="demo-1")


def test_a_verifier_that_hangs_with_qsub_is_ended_in_time(site: GridEngineBed, script: Path, tmp_path: Path) -> None:
    verifier = site.verifier(hanging(tmp_path / "go"))
    site.set_request(f"-jsv {verifier}")
    started = time.monotonic()
    with pytest.raises(AmbiguousSubmit, match="`qsub` did not answer within 10 s"):
        GridEngine(attempts=2, timeout=10, sleep=lambda seconds: None).submit(script, job_name="demo-1")
    assert time.monotonic() - started < 120
    wait_for(lambda: subprocess.run(["pgrep", "-f", str(verifier)], capture_output=True).stdout == b"", "it ends")
    assert site.jobs() == {}


def test_a_job_that_a_slow_verifier_lets_in_late_is_the_only_one(
    site: GridEngineBed, script: Path, tmp_path: Path
) -> None:
    """The first attempt hangs in the qmaster until the second has brought a job."""
    go = tmp_path / "go"
    verifier = site.verifier(f"if mkdir {tmp_path}/first 2>&-; then {hanging(go)}; else echo 'RESULT STATE ACCEPT'; fi")
    site.set_global(jsv_url=f"script:{verifier}")
    client = GridEngine(timeout=15, sleep=lambda seconds: None)
    job_id = client.submit(script, job_name="demo-1")
    go.touch()
    wait_for(lambda: len(client.find("demo-1")) == 2, "the first attempt is accepted too")

    def only_one() -> bool:
        client.poll([job_id])
        return client.find("demo-1") == [job_id]

    wait_for(only_one, "one job is left")
    again = GridEngine().submit(script, job_name="demo-1")  # as an attempt that comes after the one that is known
    wait_for(only_one, "one job is left")
    other = shutil.copy(script, tmp_path / "other.sge")
    stranger = GridEngine().submit(other, job_name="demo-1")
    client.poll([job_id])
    assert client.find("demo-1") == [job_id, stranger] and again != stranger
    client.cancel([job_id, stranger])
    wait_for(lambda: not site.jobs(), "no job is left")


def test_a_job_that_a_slow_verifier_lets_in_after_all_attempts_is_found_by_its_name(
    site: GridEngineBed, script: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    site.set_global(jsv_url=f"script:{site.verifier(hanging(go))}")
    client = GridEngine(timeout=15, attempts=1)
    with pytest.raises(AmbiguousSubmit, match="looks for a job of this name when the queue answers"):
        client.submit(script, job_name="demo-1")
    go.touch()
    wait_for(lambda: len(client.find("demo-1")) == 1, "the job is found")
    client.cancel(client.find("demo-1"))
    wait_for(lambda: not site.jobs(), "no job is left")
