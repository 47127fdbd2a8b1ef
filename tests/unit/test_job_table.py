"""The table of jobs shows how old it is; of many jobs there is a summary, which fits into 80 columns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import explain
from hpcgpu.batch.slurm.reasons import REASONS
from hpcgpu.cli.list_clusters import list_clusters
from hpcgpu.cli.status import status
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.display.job_info import JobInfo
from hpcgpu.display.job_summary import summary
from hpcgpu.display.job_table import JobTable
from hpcgpu.display.progress import waiting_for
from hpcgpu.existing_clusters.lookup import Found
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.store.directory import ClusterDirectory

JOB = JobInfo(
    id="1", kind="worker", name="demo-0", state="running", reason="", waited=2.0, node="n1", workers=1, log=Path("/log")
)
SCHEDULER = replace(JOB, kind="scheduler", name="demo-scheduler")


def pending(reason: str, number: int) -> list[JobInfo]:
    """Jobs that wait for a reason of Slurm."""
    words = explain(JobStatus(job_id="1", state=JobState.PENDING, name="", reason=reason, words=REASONS))
    job = replace(JOB, state="pending", reason=words, node="", waited=180.0)
    return [replace(job, name=f"demo-{reason}-{i}") for i in range(number)]


THOUSAND = [SCHEDULER, *[JOB] * 812, *pending("Priority", 150), *pending("Resources", 30)]


def test_a_table_that_is_not_fresh_reports_how_old_it_is() -> None:
    assert "last answer" not in repr(JobTable([JOB])) and "last answer" not in JobTable([JOB], 1.0)._repr_html_()
    assert repr(JobTable([JOB], 40.0)).endswith("States as of the queue's last answer, 40 s ago.")
    assert "last answer, 40 s ago" in JobTable([JOB], 40.0)._repr_html_()
    assert repr(JobTable(THOUSAND, 40.0)).endswith("States as of the queue's last answer, 40 s ago.")


def test_a_table_of_a_thousand_jobs_is_a_summary_and_a_few_rows() -> None:
    lines = JobTable(THOUSAND).text(80).splitlines()
    assert lines[0] == "993 jobs: 813 running; 180 pending: Priority (150), Resources (30)"
    assert lines[1] == "10 of them, `print(cluster.jobs.text(140, every=True))` shows all:"
    assert len(lines) < 60 and all(len(line) <= 80 for line in lines)
    wide = JobTable(THOUSAND).text(1000).splitlines()
    assert len(wide) == 2 + 1 + 10
    shown = "\n".join(wide)
    assert all(word in shown for word in ("demo-scheduler", "demo-Priority-0", "demo-Resources-0")), "one of each"
    assert len(JobTable(THOUSAND).text(1000, every=True).splitlines()) == 1 + len(THOUSAND)
    notebook = JobTable(THOUSAND)._repr_html_()
    assert notebook.startswith(f"<p>{lines[0]}</p>") and notebook.count("<tr>") == 11


def test_the_table_of_status_reports_when_the_queue_expects_to_start_a_job() -> None:
    job = replace(JOB, state="pending", reason="no free nodes", expected_start=1000.0, usual_wait=240.0)
    shown = " ".join(JobTable([job], now=100.0).text(140).split())
    assert "no free nodes; the queue expects to start it in 15 min; such jobs waited 4 min before" in shown
    assert "expects" not in repr(JobTable([job])), "without the time of now"


def test_reasons_stand_below_their_jobs_where_there_is_no_room_beside_them() -> None:
    reason = "other jobs have a higher priority [Priority]; the queue expects to start it in 1 h 53 min"
    late = replace(JOB, state="pending", reason=reason, name="a-name-that-is-as-long-as-that-of-a-cluster-may-be-0")
    lines = JobTable([SCHEDULER, late]).text(80).splitlines()
    assert lines[0].split() == ["name", "id", "kind", "state", "waited", "node", "workers"]
    assert lines[1].split() == ["demo-scheduler", "1", "scheduler", "running", "2", "s", "n1", "1"]
    assert lines[2] == late.name and " ".join(" ".join(lines[4:]).split()) == reason and len(lines) == 6
    assert all(len(line) <= 80 for line in lines)
    assert len(JobTable([SCHEDULER, late]).text(200).splitlines()) == 3


def test_a_table_of_twenty_jobs_shows_them_all() -> None:
    table = JobTable([SCHEDULER, *[JOB] * 19])
    assert len(table.text(1000).splitlines()) == 21 and "of them" not in repr(table)
    assert table._repr_html_().startswith("<table>") and table._repr_html_().count("<tr>") == 21


def test_progress_with_a_thousand_jobs_reports_how_many_wait_and_why() -> None:
    waiting = [job for job in THOUSAND if job.state == "pending"]
    assert waiting_for(waiting) == "180 pending: Priority (150), Resources (30), the first for 3 min"
    assert waiting_for(waiting[:4]).endswith("; 1 more") and "demo" not in waiting_for(waiting)


def test_reasons_that_differ_in_numbers_are_one_and_rare_ones_are_not_named() -> None:
    lacks = [replace(JOB, reason=f"lost 1 of 8 workers {i} s ago") for i in range(30)]
    assert summary(lacks) == "30 running: lost N of N workers N s ago (30)"
    many = [job for reason in ("A", "B", "C", "D", "E") for job in pending(reason, 3)]
    assert summary(many) == "15 pending: A (3), B (3), C (3), other reasons (6)"
    [long] = summary([replace(JOB, state="failed", reason="x" * 500)]).splitlines()
    assert len(long) < 80


@pytest.mark.parametrize(
    ("number", "text"), [(0, ""), (2, "0 1"), (20, " ".join(map(str, range(20)))), (1000, "0 1 2 3 4 and 995 more")]
)
def test_long_lists_are_cut(number: int, text: str) -> None:
    assert listed(str(i) for i in range(number)) == text


@pytest.mark.parametrize(("arguments", "rows"), [((), 10), (("--all",), 993)])
def test_the_status_of_a_cluster_with_many_jobs_is_short_unless_all_are_asked_for(
    arguments: tuple[str, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Snapshot(time=0.0, name="demo", system="slurm", directory="/clusters/demo", state="running", jobs=THOUSAND)
    monkeypatch.setattr("hpcgpu.existing_clusters.snapshot.snapshot", lambda name: found)
    shown = CliRunner().invoke(status, ["demo", *arguments]).output
    assert sum(line.split()[1:2] in (["worker"], ["scheduler"]) for line in shown.splitlines()) == rows
    assert ("10 of them, `hpcgpu status demo --all` shows all:" in shown) is not bool(arguments)
    told = json.loads(CliRunner().invoke(status, ["demo", "--json"]).output)
    assert len(told["jobs"]) == 993


@pytest.mark.parametrize(
    ("arguments", "jobs"), [((), "25 running, 5 pending"), (("--jobs",), "0 (running) 1 (running) 2")]
)
def test_the_list_of_clusters_counts_the_jobs_of_a_large_one(
    arguments: tuple[str, ...], jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [
        JobStatus(job_id=str(i), state=JobState.RUNNING if i < 25 else JobState.PENDING, name=f"demo-{i}")
        for i in range(30)
    ]
    known = {"system": "slurm", "created": 0.0, "problem": "", "known": True}
    large = Found(directory=ClusterDirectory(tmp_path / "demo"), jobs=many, **known)
    small = replace(large, directory=ClusterDirectory(tmp_path / "small"), jobs=many[24:26])
    monkeypatch.setattr("hpcgpu.existing_clusters.lookup.find", lambda roots, refuse: [large, small])
    monkeypatch.setattr("hpcgpu.existing_clusters.close_ended.close_ended", list)
    shown = CliRunner().invoke(list_clusters, [*arguments]).output
    assert jobs in shown and "24 (running) 25 (pending)" in shown
