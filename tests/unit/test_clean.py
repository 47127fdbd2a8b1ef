"""`hpcgpu clean` removes what is certainly the directory of a cluster of this user that has ended, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner, Result

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.cli import main
from hpcgpu.errors import BatchUnavailable
from hpcgpu.existing_clusters import clean, lookup
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.directory import ClusterDirectory

DAY = 86400.0


class Queue:
    """A queue that lists some jobs, and forgets the others."""

    name = "slurm"
    remembers = False
    silent = False

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}

    def identity(self) -> str:
        return ""

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        if self.silent:
            raise BatchUnavailable("squeue: Unable to contact slurm controller")
        return {job_id: self.jobs[job_id] for job_id in job_ids if job_id in self.jobs}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}

    def find(self, job_name: str) -> list[str]:
        return []


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    for module in (clean, lookup):
        monkeypatch.setattr(module, "batch_system", lambda name: queue)
    return queue


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "clusters"
    root.mkdir(mode=0o700)
    return root


def cluster(root: Path, name: str = "demo", *, days: float = 40, closed: bool = True) -> ClusterDirectory:
    """The directory of a cluster with a job whose end nobody noted, so many days after it was closed."""
    directory, then = ClusterDirectory(root / name), time.time() - days * DAY
    directory.path.mkdir(mode=0o700)
    (directory.path / "logs").mkdir(mode=0o700)
    (directory.path / "logs" / "demo-0-7.log").write_bytes(b"x" * 100_000)
    about = {"name": name, "token": name, "created": then - DAY, "format": FORMAT, "system": "slurm"}
    directory.write("cluster.json", json.dumps(about))
    directory.intend(f"{name}-0", "worker")
    directory.submitted(f"{name}-0", "7")
    if closed:
        directory.close()
    journal = directory.path / "journal.jsonl"
    lines = [json.loads(line) | {"time": then} for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(directory.path, (then, then))
    return directory


def run(root: Path, *arguments: str, said: str | None = None) -> Result:
    with dask.config.set({"hpcgpu.cluster-directory": str(root)}):
        return CliRunner().invoke(main, arguments, input=said)


def test_it_shows_name_age_and_size_and_asks_first(queue: Queue, root: Path) -> None:
    directory = cluster(root)
    refused = run(root, "clean", "--older-than", "30d", said="n\n")
    assert refused.exit_code == 1 and directory.path.exists()
    assert "demo" in refused.output and "40 days ago" in refused.output and "Remove 1 directory, 1" in refused.output
    accepted = run(root, "clean", "--older-than", "30d", said="y\n")
    assert accepted.exit_code == 0 and "Removed 1 directory." in accepted.output
    assert list(root.iterdir()) == []


def test_a_dry_run_removes_nothing_and_yes_does_not_ask(queue: Queue, root: Path) -> None:
    directory = cluster(root)
    assert "Would remove 1 directory" in run(root, "clean", "--older-than", "30d", "--dry-run").output
    assert directory.path.exists()
    assert run(root, "clean", "--older-than", "30d", "--yes").exit_code == 0
    assert not directory.path.exists()


def test_one_that_ended_later_stays(queue: Queue, root: Path) -> None:
    directory = cluster(root, days=29)
    assert "Nothing to remove" in run(root, "clean", "--older-than", "30d", "--yes").output
    assert directory.path.exists()


@pytest.mark.parametrize("older", ["", "soon", "-3d", "0", "nan"])
def test_an_age_that_is_none_is_refused(older: str, queue: Queue, root: Path) -> None:
    directory = cluster(root)
    assert run(root, "clean", "--older-than", older, "--yes").exit_code == 2
    assert directory.path.exists()


def runs(queue: Queue, directory: ClusterDirectory) -> None:
    queue.jobs["7"] = JobStatus(job_id="7", name="demo-0", state=JobState.RUNNING)


def silence(queue: Queue, directory: ClusterDirectory) -> None:
    queue.silent = True


def scripts(queue: Queue, directory: ClusterDirectory) -> None:
    (directory.path / "launch.sh").write_text("")


def another_queue(queue: Queue, directory: ClusterDirectory) -> None:
    about = json.loads((directory.path / "cluster.json").read_text())
    (directory.path / "cluster.json").write_text(json.dumps(about | {"queue": "the other machine"}))
    queue.identity = lambda: "this machine"  # type: ignore[method-assign]


def damage(queue: Queue, directory: ClusterDirectory) -> None:
    (directory.path / "cluster.json").write_text("{")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (runs, "its jobs have not ended: 7"),
        (silence, "Unable to contact slurm controller"),
        (scripts, "scripts of `hpcgpu render`"),
        (another_queue, "belongs to the queue 'the other machine'"),
        (damage, "is damaged"),
    ],
)
def test_what_may_still_be_needed_stays_and_it_reports_why(
    wrong: Callable[[Queue, ClusterDirectory], None], why: str, queue: Queue, root: Path
) -> None:
    directory = cluster(root)
    wrong(queue, directory)
    os.utime(directory.path, (1, 1))
    done = run(root, "clean", "--older-than", "30d", "--yes")
    assert why in done.output and "demo: not removed" in done.output
    assert (directory.path / "logs" / "demo-0-7.log").exists()


def test_a_cluster_whose_jobs_the_queue_does_not_show_stays(queue: Queue, root: Path) -> None:
    directory = cluster(root, closed=False)
    assert "Nothing to remove" in run(root, "clean", "--older-than", "30d", "--yes").output
    assert directory.path.exists()


def test_links_in_it_are_removed_and_not_what_they_point_to(queue: Queue, root: Path, tmp_path: Path) -> None:
    directory = cluster(root)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious").write_text("data")
    (directory.path / "logs" / "out").symlink_to(tmp_path / "results")
    (directory.path / "worker.sbatch").symlink_to(tmp_path / "results" / "precious")
    os.utime(directory.path, (1, 1))
    assert run(root, "clean", "--older-than", "30d", "--yes").exit_code == 0
    assert not directory.path.exists()
    assert (tmp_path / "results" / "precious").read_text() == "data"


def test_a_link_to_a_cluster_elsewhere_is_not_followed(queue: Queue, root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    there = cluster(tmp_path / "elsewhere")
    (root / "demo").symlink_to(there.path)
    done = run(root, "clean", "--older-than", "30d", "--yes")
    assert "demo: not removed: it is a link" in done.output
    assert (root / "demo").is_symlink() and there.path.is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_the_directory_of_another_user_stays(queue: Queue, root: Path) -> None:
    directory = cluster(root)
    for path in (directory.path, *directory.path.rglob("*")):
        os.chown(path, 12345, 12345)
    done = run(root, "clean", "--older-than", "30d", "--yes")
    assert "demo: not removed" in done.output and "12345" in done.output
    assert directory.path.exists()


def test_what_is_no_cluster_stays_whatever_its_name(queue: Queue, root: Path) -> None:
    for name in ("notes", "..demo", ".hidden"):
        (root / name).mkdir()
        (root / name / "file").write_text("")
    (root / ".hidden" / "cluster.json").write_text("{}")
    assert "Nothing to remove" in run(root, "clean", "--older-than", "1s", "--yes").output
    assert len(list(root.iterdir())) == 3


def test_a_cluster_that_was_renamed_for_a_later_one_is_removed_and_the_later_one_stays(
    queue: Queue, root: Path
) -> None:
    earlier, later = cluster(root, "demo~20261001-abc"), cluster(root, days=1)
    assert run(root, "clean", "--older-than", "30d", "--yes").exit_code == 0
    assert later.path.exists() and not earlier.path.exists()


def test_a_name_that_another_cluster_got_meanwhile_keeps_it(queue: Queue, root: Path) -> None:
    directory = cluster(root)
    [one] = clean.ended([root], lambda path, error: None)
    shutil.rmtree(directory.path)
    cluster(root, closed=False)
    with pytest.raises(OSError, match="no longer that of a cluster that has ended"):  # so it is not counted as removed
        clean.remove(one)
    assert (directory.path / "logs").is_dir() and [path.name for path in root.iterdir()] == ["demo"]


def test_a_name_that_another_cluster_gets_in_the_last_moment_keeps_it(
    queue: Queue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename = cluster(root), Path.rename
    [one] = clean.ended([root], lambda path, error: None)

    def overtaken(path: Path, target: Path) -> Path:
        if path == directory.path:
            shutil.rmtree(path)
            cluster(root, closed=False)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    with pytest.raises(OSError, match="another cluster has just got its name"):
        clean.remove(one)
    assert (directory.path / "logs").is_dir() and [path.name for path in root.iterdir()] == ["demo"]


def test_what_could_not_be_removed_whole_is_reported_and_removed_by_the_next_call(
    queue: Queue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(root)

    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path / ".nfs01"))

    with monkeypatch.context() as patch:
        patch.setattr(clean, "remove_leftovers", lambda roots: [])
        patch.setattr(clean.shutil, "rmtree", busy)
        done = run(root, "clean", "--older-than", "30d", "--yes")
    assert done.exit_code == 1 and "demo: not completely removed" in done.output and "resource busy" in done.output
    assert "No clusters" in run(root, "list", "--all").output
    cluster(root, "next")
    assert run(root, "clean", "--older-than", "30d", "--yes").exit_code == 0
    assert list(root.iterdir()) == []


def test_what_was_left_is_removed_also_where_nothing_else_is_to_remove(queue: Queue, root: Path) -> None:
    left = root / ".removing~0123456789abcdef"
    left.mkdir(mode=0o700)
    assert "Nothing to remove." in run(root, "clean", "--older-than", "30d", "--dry-run").output
    assert left.exists()
    assert "Nothing to remove." in run(root, "clean", "--older-than", "30d", "--yes").output
    assert not left.exists()


def test_a_live_cluster_that_got_the_name_of_a_leftover_by_a_race_stays(queue: Queue, root: Path) -> None:
    left = cluster(root, closed=False).path.rename(root / ".removing~0123456789abcdef")
    assert run(root, "clean", "--older-than", "30d", "--yes").exit_code == 0
    assert (left / "journal.jsonl").exists() and (left / "logs").is_dir(), "its jobs may run"


@pytest.mark.parametrize("others", [True, False], ids=["with an ended cluster", "alone"])
def test_what_was_left_and_cannot_be_removed_now_either_is_a_failure(
    queue: Queue, root: Path, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    left, rmtree = root / ".removing~0123456789abcdef", shutil.rmtree
    left.mkdir(mode=0o700)
    if others:
        cluster(root)

    def busy(path: Path) -> None:
        if path == left:
            raise OSError(16, "Device or resource busy", str(path / ".nfs01"))
        rmtree(path)

    monkeypatch.setattr(clean.shutil, "rmtree", busy)
    done = run(root, "clean", "--older-than", "30d", "--yes")
    assert done.exit_code == 1 and list(root.iterdir()) == [left]
    assert f"not completely removed: {left}/.nfs01: Device or resource busy" in done.output
    assert ("Removed 1 directory." if others else "Nothing else to remove.") in done.output


def test_a_queue_that_does_not_answer_is_queried_once(
    queue: Queue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        cluster(root, name)
    queue.silent = True
    made, queries, poll = list[str](), list[object](), queue.poll
    monkeypatch.setattr(clean, "batch_system", lambda name: (made.append(name), queue)[1])
    monkeypatch.setattr(queue, "poll", lambda ids: (queries.append(ids), poll(ids))[1])
    output = run(root, "clean", "--older-than", "30d", "--yes").output
    for name in ("one", "two", "three"):
        assert f"{name}: not removed: it is not certain that its jobs have ended: squeue: Unable to" in output
    assert (made, len(queries)) == (["slurm"], 1)


def test_the_list_shows_ended_clusters_and_sizes_only_if_it_is_asked_to(queue: Queue, root: Path) -> None:
    cluster(root)
    queue.jobs["7"] = JobStatus(job_id="7", name="live-0", state=JobState.RUNNING)
    cluster(root, "live", closed=False)
    assert "demo" not in run(root, "list").output
    lines = run(root, "list", "--all").output.splitlines()
    assert "size" in lines[0] and len(lines) == 3
    assert "kiB" in lines[1] and "7 (running)" in lines[1] and "ended 40 days ago" in lines[2]
    told = {one["name"]: one for one in json.loads(run(root, "list", "--all", "--json").output)}
    assert (told["demo"]["ended"], told["live"]["ended"]) == (True, False) and told["demo"]["size"] > 100_000
    assert [one["size"] for one in json.loads(run(root, "list", "--json").output)] == [None]
