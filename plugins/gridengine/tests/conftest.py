"""The plugin in a fresh environment, and a Grid Engine that the tests share."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import gridengine_bed
import pytest

PLUGIN = Path(__file__).parents[1]
sys.path.insert(0, str(PLUGIN))
sys.path.insert(0, str(PLUGIN.parents[1] / "tests" / "gpu_stub"))
Bed = TypeVar("Bed", bound=gridengine_bed.GridEngineBed)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


HEAD = """
import subprocess, sys
from hpcgpu_gridengine import SGEGPUCluster

SMALL = {"gpus_per_node": 0, "cores": 1, "protocol": "tcp", "poll_interval": 0.5, "quiet": True, "walltime": "10m"}


def running(cluster):
    cluster.settle()
    return {job.id for job in cluster.jobs if job.kind == "worker" and job.state == "running"}


"""


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
def around() -> list[str]:
    """What stands before each command of the user."""
    return []


@pytest.fixture
def run(environment: Path, tmp_path: Path, around: list[str]) -> Run:
    """Run Python in that environment, in an empty home."""
    home = tmp_path / "home"
    home.mkdir()

    def call(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(home), "HPCGPU_HOME": str(home), "XDG_CONFIG_HOME": str(home)}
        program = [*around, str(environment / "bin" / "python"), *words]
        return subprocess.run(program, capture_output=True, text=True, env=env, cwd=home, timeout=timeout)

    return call


@pytest.fixture
def cli(run: Run) -> Run:
    """Run the command `hpcgpu` there."""
    return lambda *words, **more: run("-m", "hpcgpu", *words, **more)


@pytest.fixture
def program(run: Run, tmp_path: Path, bed: gridengine_bed.GridEngineBed) -> Run:
    """Run a program that uses the class; its output."""

    def call(body: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        path.write_text(f'{HEAD}if __name__ == "__main__":\n{lines}')
        return run(str(path))

    return call


@pytest.fixture
def gpus(tmp_path: Path) -> str:
    """Options of jobs with pretended GPUs."""
    import build

    if reason := build.why_not():
        pytest.skip(reason)
    stubs = build.environment(build.build(tmp_path / "stubs"))
    return f'SMALL | {{"gpus_per_node": 2, "cores": 2, "scheduler": {{"gpus_per_node": 0}}, "env": {stubs!r}}}'


@pytest.fixture(scope="session")
def _bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gridengine_bed.GridEngineBed]:
    if reason := gridengine_bed.why_not():
        pytest.skip(f"no Grid Engine can run here: {reason}")
    yield from started(gridengine_bed.GridEngineBed(tmp_path_factory.mktemp("gridengine")))


def started(bed: Bed) -> Iterator[Bed]:
    """A Grid Engine that is started, with its commands on the PATH."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            bed.start()
            for name, value in bed.environment().items():
                patch.setenv(name, value)
            yield bed
        finally:
            bed.stop()


@pytest.fixture
def bed(_bed: gridengine_bed.GridEngineBed) -> Iterator[gridengine_bed.GridEngineBed]:
    """The Grid Engine for one test, which must leave no job."""
    yield _bed
    left = {job: state for job, state in _bed.jobs().items() if "d" not in state}
    _bed.cancel_all()
    assert not left, f"the test left jobs in the queue: {left}"
