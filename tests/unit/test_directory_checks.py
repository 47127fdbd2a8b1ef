"""A directory counts as removed when it is missing for minutes, and not when a filesystem fails for a while."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcgpu.batch.recognise_own_scripts import is_job_script, runs_hpcgpu
from hpcgpu.runtime import launch
from hpcgpu.store import create_directory, removed_directory
from hpcgpu.store.directory import ClusterDirectory


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    return create_directory.claim(tmp_path / "clusters" / "demo", None)


def test_a_directory_counts_as_removed_after_some_minutes_and_several_checks(directory: ClusterDirectory) -> None:
    watched = removed_directory.RemovalWatch(directory, directory.token(), {})
    assert watched.check(now=0.0) == ""
    shutil.rmtree(directory.path)
    assert [watched.check(now=now) for now in (1.0, 100.0, 299.0)] == ["", "", ""]
    assert watched.check(now=301.0) == f"its directory {directory.path} was removed: it has been missing for 300 s"


def test_two_polls_are_not_enough_however_far_apart(directory: ClusterDirectory) -> None:
    watched = removed_directory.RemovalWatch(directory, directory.token(), {})
    shutil.rmtree(directory.path)
    assert watched.check(now=0.0) == watched.check(now=5000.0) == ""
    assert watched.check(now=5001.0)


def test_a_directory_that_comes_back_starts_the_time_anew(directory: ClusterDirectory) -> None:
    watched, aside = removed_directory.RemovalWatch(directory, directory.token(), {}), directory.path.with_name("aside")
    directory.path.rename(aside)
    assert [watched.check(now=now) for now in (0.0, 100.0, 200.0)] == [""] * 3
    aside.rename(directory.path)
    assert watched.check(now=290.0) == ""
    directory.path.rename(aside)
    assert [watched.check(now=now) for now in (300.0, 400.0, 599.0)] == [""] * 3
    assert watched.check(now=600.0)


@pytest.mark.parametrize("problem", [OSError(116, "Stale file handle"), OSError(5, "I/O error"), TimeoutError()])
def test_a_filesystem_that_fails_is_no_proof(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, problem: OSError
) -> None:
    watched, token = removed_directory.RemovalWatch(directory, directory.token(), {}), directory.token()
    stat = Path.stat

    def fails(path: Path, **options: bool) -> object:
        if directory.path in path.parents:
            raise problem
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", fails)
    assert removed_directory.directory_exists(directory, token) is None
    assert [watched.check(now=1000.0 * look) for look in range(5)] == [""] * 5


def test_a_filesystem_that_may_not_be_mounted_gets_more_time(directory: ClusterDirectory) -> None:
    watched = removed_directory.RemovalWatch(directory, directory.token(), {removed_directory.VARIABLE: "10"})
    shutil.rmtree(directory.path.parent)
    assert [watched.check(now=now) for now in (0.0, 20.0, 40.0)] == [""] * 3
    assert watched.check(now=60.0)


def test_a_directory_that_was_emptied_or_is_another_clusters_is_gone(directory: ClusterDirectory) -> None:
    token = directory.token()
    directory.intend("demo-0", "worker")
    (directory.path / "cluster.json").rename(directory.path / "aside")
    directory.intend("demo-1", "worker")
    assert removed_directory.directory_exists(directory, token) is True, "its journal still tells of its jobs"
    (directory.path / "journal.jsonl").unlink()
    assert removed_directory.directory_exists(directory, token) is False
    with pytest.raises(FileNotFoundError):
        directory.intend("demo-2", "worker")
    assert removed_directory.directory_exists(directory, token) is False, "no new journal makes it a cluster again"
    shutil.rmtree(directory.path)
    create_directory.claim(directory.path, None)
    assert removed_directory.directory_exists(directory, token) is False


def test_a_script_of_hpcgpu_is_known_by_its_name_and_its_text() -> None:
    assert is_job_script(Path("/home/me/demo/worker.sbatch")) and is_job_script(Path("/x/demo/worker-big.mem.pbs"))
    assert not any(map(is_job_script, map(Path, ["/home/me/demo/work.sbatch", "worker.sbatch", "(null)"])))
    for golden in (Path(__file__).parent / "golden").rglob("*.sbatch"):
        if "single" not in golden.name:
            assert runs_hpcgpu(golden.read_text()), golden
    assert not runs_hpcgpu("#!/bin/bash\n# see hpcgpu.runtime.launch worker \npython train.py\n")


@pytest.mark.parametrize("removed", [True, False])
def test_a_job_that_fails_without_its_directory_reports_it_last(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], removed: bool
) -> None:
    def starts(*_: object) -> None:
        if removed:
            shutil.rmtree(directory.path)
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr(launch.stage, "release_at_exit", lambda: None)
    monkeypatch.setattr(launch, "prepare", lambda *_: ([], directory.path))
    monkeypatch.setattr(launch, "run_dask", starts)
    argv = ["worker", "local", str(directory.path), "--gpus", "0", "--", "python", "-m", "dask"]
    with pytest.raises(SystemExit if removed else RuntimeError, match="1" if removed else "Nanny"):
        launch.main(argv)
    last = f"hpcgpu: the cluster directory {directory.path} is missing: was it removed? This job ends"
    said = capfd.readouterr().err.splitlines()
    assert not removed or said[-2:] == ["RuntimeError: Nanny failed to start.", last]
    assert (last in said) is removed
