"""The plugin in a fresh environment, and an HTCondor that the tests share."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import htcondor_bed
import pytest
from htcondor_bed import Run

PLUGIN = Path(__file__).parents[1]
sys.path.insert(0, str(PLUGIN))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment, which sees what this one has, with the plugin installed; no network is needed."""
    folder = tmp_path_factory.mktemp("plugin") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [own] = folder.glob("lib/python*/site-packages")
    (own / "parent.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    )
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    install = ["install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(PLUGIN)]
    subprocess.run([*pip, *install], check=True)
    return folder


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run Python in that environment, in an empty home."""
    home = tmp_path / "home"
    home.mkdir()

    def call(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(home), "HPCGPU_HOME": str(home), "XDG_CONFIG_HOME": str(home)}
        program = [str(environment / "bin" / "python"), *words]
        return subprocess.run(program, capture_output=True, text=True, env=env, cwd=home, timeout=timeout)

    return call


@pytest.fixture
def cli(run: Run) -> Run:
    """Run the command `hpcgpu` there."""
    return lambda *words, **more: run("-m", "hpcgpu", *words, **more)


@pytest.fixture(scope="session")
def _bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[htcondor_bed.HTCondorBed]:
    if reason := htcondor_bed.why_not():
        pytest.skip(f"no HTCondor can run here: {reason}")
    bed = htcondor_bed.HTCondorBed(tmp_path_factory.mktemp("htcondor"))
    with pytest.MonkeyPatch.context() as patch:
        try:
            bed.start()
            for name, value in bed.environment().items():
                patch.setenv(name, value)
            yield bed
        finally:
            bed.stop()


@pytest.fixture
def bed(_bed: htcondor_bed.HTCondorBed) -> Iterator[htcondor_bed.HTCondorBed]:
    """The HTCondor for one test, which must leave no job."""
    yield _bed
    left = {job: status for job, status in _bed.jobs().items() if status != "3"}
    _bed.cancel_all()
    assert not left, f"the test left jobs in the queue: {left}"


@pytest.fixture
def small(bed: htcondor_bed.HTCondorBed) -> Iterator[str]:
    """A second machine of that HTCondor, with four cores and two smaller GPUs; its name."""
    bed.add_machine("small", cores=4, gpus=htcondor_bed.T4, number=2)
    try:
        yield "small.bed"
    finally:
        # A removed job whose machine is switched off would stay in the queue until its lease ends.
        bed.call("rm", "-forcex", "-constraint", "JobStatus == 3", check=False)
        bed.remove_machine("small")
