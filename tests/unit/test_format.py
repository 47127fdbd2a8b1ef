"""A cluster that another version of hpcgpu made is refused with one sentence, and can be stopped."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner

import hpcgpu
from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.cli import main
from hpcgpu.cluster.dask_ctl import discover
from hpcgpu.dask_scheduler.rpc_types import (
    Changes,
    GPUState,
    GroupState,
    HeldWorkerInfo,
    HoldSize,
    LoadChanges,
    ManagerState,
    RequestAnswer,
    ScalingRequest,
    SchedulerState,
    WaitingWork,
    WorkerChanges,
    WorkerLoad,
    WorkerRuns,
)
from hpcgpu.errors import ClusterExists, ClusterWarning, OtherFormat
from hpcgpu.existing_clusters import close_ended, lookup, query_jobs, stop
from hpcgpu.orders.manager_in_scheduler_job import main as manage
from hpcgpu.store import create_directory
from hpcgpu.store.cluster_json import FORMAT
from hpcgpu.store.directory import ClusterDirectory
from tests.helpers import printed

SENTENCE = (
    rf"hpcgpu 9\.1 made cluster 'later', and this is hpcgpu {hpcgpu.__version__}, which cannot read its files in "
    r"\S+/later "
    rf"\(format 99, not {FORMAT}\): use that version, or cancel its jobs with: hpcgpu stop later"
)


class Queue:
    """Has the jobs of two clusters."""

    remembers = False

    def __init__(self) -> None:
        self.jobs = {"1": "now-scheduler", "2": "later-scheduler", "3": "later-0"}
        self.cancelled: set[str] = set()

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        there = {i: self.jobs[i] for i in job_ids if i in self.jobs and i not in self.cancelled}
        return {i: JobStatus(job_id=i, name=name, state=JobState.RUNNING) for i, name in there.items()}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}

    def find(self, job_name: str) -> list[str]:
        return [i for i, name in self.jobs.items() if name == job_name and i not in self.cancelled]

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        self.cancelled |= set(job_ids)

    def identity(self) -> str:
        return ""


@pytest.fixture
def root(tmp_path: Path) -> Iterable[Path]:
    """Holds a cluster of this version, and one of a later version whose last job has no id yet."""
    root = tmp_path / "clusters"
    for name in ("now", "later"):
        directory = create_directory.claim(root / name, lambda earlier: [], system="local")
        directory.intend(f"{name}-scheduler", "scheduler")
        directory.submitted(f"{name}-scheduler", "1" if name == "now" else "2")
    directory.intend("later-0", "worker")
    later(directory)
    with dask.config.set({"hpcgpu.cluster-directory": str(root)}):
        yield root


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    for module in (lookup, close_ended):
        monkeypatch.setattr(module, "batch_system", lambda system: queue)
    return queue


def later(directory: ClusterDirectory) -> None:
    """Make it one of a version that has more in its files than this one can read."""
    about = json.loads((directory.path / "cluster.json").read_text())
    later = {"format": 99, "version": "9.1", "encrypted": {"by": "quanta"}}
    directory.write("cluster.json", json.dumps(about | later))
    with (directory.path / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "teleported", "jobs": {"later-0": "n7"}}\n')


def test_a_new_cluster_records_its_format_and_its_version(root: Path) -> None:
    about = json.loads((root / "now" / "cluster.json").read_text())
    assert (about["format"], about["version"]) == (FORMAT, hpcgpu.__version__)


#: What the scheduler answers, as of the present format.
ANSWERS = {
    "LoadChanges": ["holds", "waiting", "workers"],
    "HoldSize": ["resources", "workers"],
    "HeldWorkerInfo": ["address", "calls", "host", "job", "local_rank", "name", "node", "rank", "world_size"],
    "WorkerRuns": ["calls", "held", "tasks"],
    "WorkerChanges": ["scheduler", "workers"],
    "Changes": ["changed", "gone", "version", "whole"],
    "WorkerLoad": [
        "actors",
        "at_once",
        "calls",
        "computes",
        "held",
        "memory_limit",
        "nbytes",
        "nthreads",
        "occupancy",
        "paused",
        "processing",
        "wanted",
    ],
    "WaitingWork": ["resources", "seconds", "tasks"],
    "ManagerState": ["about", "groups", "number", "present", "problem", "warnings"],
    "GPUState": [
        "idle_since",
        "memory_total",
        "memory_used",
        "model",
        "node",
        "power",
        "utilization",
        "worker",
    ],
    "GroupState": [
        "gpu_hours",
        "gpus_per_node",
        "maximum",
        "maximum_gpu_hours",
        "minimum",
        "name",
        "paused",
        "reason",
        "resources",
        "target",
        "usual_wait",
    ],
    "SchedulerState": ["gpus", "manager", "workers"],
    "RequestAnswer": ["accepted", "error"],
    "ScalingRequest": ["command", "number"],
}


def test_the_format_grows_with_the_answers_of_the_scheduler() -> None:
    kinds = (
        LoadChanges,
        HoldSize,
        HeldWorkerInfo,
        WorkerRuns,
        WorkerChanges,
        Changes,
        WorkerLoad,
        WaitingWork,
        ManagerState,
        SchedulerState,
        GPUState,
        GroupState,
        RequestAnswer,
        ScalingRequest,
    )
    answers = {answer.__name__: sorted(answer.__annotations__) for answer in kinds}
    assert (FORMAT, answers) == (
        14,
        ANSWERS,
    ), "an answer has changed: a manager would misread that of an older scheduler, so let FORMAT grow"


@pytest.mark.parametrize(
    "enter",
    [
        lambda: hpcgpu.connect("later"),
        lambda: hpcgpu.LocalGPUCluster.from_name("later"),
        lambda: hpcgpu.LocalGPUCluster(name="later", if_exists="connect", jobs=0),
        lambda: manage(Path(dask.config.get("hpcgpu.cluster-directory")) / "later"),
    ],
    ids=["connect", "from_name", "if_exists", "the manager in the scheduler job"],
)
def test_a_program_that_enters_a_cluster_of_another_version_reads_that(
    root: Path, queue: Queue, enter: Callable[[], Any]
) -> None:
    before = (root / "later" / "journal.jsonl").read_bytes()
    with pytest.raises(OtherFormat, match=SENTENCE):
        enter()
    assert (root / "later" / "journal.jsonl").read_bytes() == before and not queue.cancelled


@pytest.mark.parametrize(
    "command",
    [
        "status later",
        "logs later",
        "dashboard later",
        "scale later --jobs 2",
        "adapt later --maximum-jobs 2",
        "start later --system local",
    ],
)
def test_a_command_on_a_cluster_of_another_version_reports_it_in_one_sentence(
    root: Path, queue: Queue, command: str
) -> None:
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code in (1, 2)
    assert "hpcgpu 9.1 made cluster 'later'" in result.output.replace("\n", " ") and "Traceback" not in result.output


def test_list_shows_a_cluster_of_another_version_and_reports_it(root: Path, queue: Queue) -> None:
    rows = {row["name"]: row for row in printed("list", CliRunner().invoke(main, ["list", "--json"]).output)}
    assert rows["now"]["problem"] == ""
    assert rows["later"]["problem"].startswith("hpcgpu 9.1 made cluster 'later'")
    assert [job["id"] for job in rows["later"]["jobs"]] == ["2", "3"], (
        "its jobs are known from the journal and by their names"
    )


def test_a_cluster_of_another_version_is_never_taken_for_ended(root: Path, queue: Queue) -> None:
    queue.jobs.clear()
    for path in (root / "later").iterdir():
        os.utime(path, (0, 0))
    os.utime(root / "later", (0, 0))
    found = close_ended.close_ended(lookup.find([root]))
    assert "later" in [one.directory.path.name for one in found]
    assert (root / "later" / "dashboard.token").exists()


@pytest.mark.parametrize("names", [["later"], ["--all"]])
def test_stop_cancels_the_jobs_of_a_cluster_of_another_version(
    root: Path, queue: Queue, names: list[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(query_jobs, "_SUBMIT", 0.0)
    result = CliRunner().invoke(main, ["stop", *names])
    assert result.exit_code == 0 and "later: 2 jobs cancelled, no job is left" in result.output, result.output
    assert queue.cancelled >= {"2", "3"} and ("1" in queue.cancelled) == (names == ["--all"])
    assert "later" not in CliRunner().invoke(main, ["list"]).output


def test_the_name_is_free_once_it_was_stopped(root: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterExists, match=SENTENCE):
        create_directory.claim(root / "later", lambda earlier: [])
    monkeypatch.setattr(query_jobs, "_SUBMIT", 0.0)
    stop.stop(lookup.locate("later", any_format=True), queue, sleep=lambda seconds: None)  # type: ignore[arg-type]
    again = create_directory.claim(root / "later", lambda earlier: [])
    assert again.submits() == [] and not again.other_format()


def test_a_job_that_starts_after_an_upgrade_ends_and_reports_it(root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hpcgpu.runtime.launch",
        "worker",
        "local",
        str(root / "later"),
        "--gpus",
        "0",
        "--",
        "-m",
        "json",
    ]
    job = subprocess.run(command, capture_output=True, text=True, check=False)
    assert job.returncode == 1
    assert job.stderr.startswith("hpcgpu: hpcgpu 9.1 made cluster 'later'") and len(job.stderr.splitlines()) == 1


def test_dask_ctl_lists_the_clusters_that_it_can_enter(root: Path, queue: Queue) -> None:
    async def names() -> list[str]:
        return [name async for name, _ in discover()]

    with pytest.warns(ClusterWarning, match=SENTENCE):
        assert asyncio.run(names()) == ["now"]
