"""The bill of a cluster on a real Slurm without accounting, which forgets a job five minutes after its end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from bed import SlurmBed
from distributed import Client

from hpcgpu import SlurmGPUCluster
from hpcgpu.report import cluster_report as reports
from hpcgpu.report.cluster_report import Report, report
from tests.slurm.helpers import A100

pytestmark = pytest.mark.shows("The bill of a cluster")

Until = Callable[..., None]


def starts(found: Report) -> dict[str, float | None]:
    return {job.id: job.started for job in found.jobs}


def test_the_bill_records_of_each_job_what_the_queue_reported_also_after_the_queue_has_forgotten_it(
    bed: SlurmBed, home: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SlurmGPUCluster(jobs=1, name="demo", **A100) as cluster:
        script = cluster.directory.path / "worker.sbatch"
        subprocess.run(["sbatch", "--job-name=demo", str(script)], check=True, capture_output=True)
        cluster.wait_for_workers(4)
        with Client(cluster) as client:
            until(lambda: len(client.sync(client.scheduler.identity, n_workers=-1)["workers"]) == 8, "its workers come")
            client.gather(client.map(abs, range(-50, 0)))
            until(lambda: sum(job.tasks_done or 0 for job in cluster.report().jobs) == 50, "all tasks are counted")
        now = cluster.report()
        assert [(job.kind, job.gpus, job.state) for job in now.jobs] == [
            ("scheduler", 1, "running"),
            ("worker", 4, "running"),
            ("worker", 4, "running"),
        ], "a job that was submitted by hand is on the bill"
        subprocess.run(["scancel", now.jobs[2].id], check=True)
        until(lambda: cluster.report().jobs[2].state == "cancelled", "the job that was submitted by hand ends")
    ended = report(cluster.directory)
    assert ended.ended and all(job.gpu_hours for job in ended.jobs)
    monkeypatch.setattr(reports, "jobs_without_end", lambda *arguments: {})
    later = report(cluster.directory)
    assert later.jobs[:2] == ended.jobs[:2], "the journal has kept what the queue said"
    assert later.jobs[2].ended_later and later.jobs[2].gpu_hours == pytest.approx(ended.jobs[2].gpu_hours, abs=0.05)
    journal = cluster.directory.path / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(True) if json.loads(line)["event"] != "ended"]
    journal.write_text("".join(lines))
    for job_id, started in starts(report(cluster.directory)).items():
        assert started == pytest.approx(starts(ended)[job_id], abs=15), "the job itself knows when it began"
