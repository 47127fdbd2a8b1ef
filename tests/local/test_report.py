"""The bill of a cluster, from real jobs; the GPUs are pretended, and compute nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.report.cluster_report import Report, report
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import live
from tests.helpers import CPU, GPU, hpcgpu, printed

pytestmark = pytest.mark.shows("The bill of a cluster")

Until = Callable[..., None]
SCHEDULER = {"gpus_per_node": 1}


def wait(seconds: float) -> None:
    time.sleep(seconds)


wait.__module__ = "__main__"


def by_name(found: Report) -> dict[str, Any]:
    return {job.name: job for job in found.jobs}


def forget(home: Path) -> None:
    """Let the queue forget all its jobs, as Slurm does after minutes."""
    shutil.rmtree(home / "queue" / "jobs")


def test_the_bill_of_a_cluster_while_it_runs_and_after_its_end(
    queue: LocalQueue, fake_gpus: None, home: Path, until: Until
) -> None:
    with LocalGPUCluster(jobs=1, name="demo", **GPU | {"scheduler": SCHEDULER}) as cluster:
        cluster.wait_for_workers(2)
        with Client(cluster) as client:
            client.gather(client.map(wait, [0.2] * 30, pure=False))
            first = min(client.scheduler_info()["workers"])
            data = client.submit(bytes, 1_000_000, workers=[first])
            others = [address for address in client.scheduler_info()["workers"] if address != first]
            client.submit(len, data, workers=others).result()

            def all_counted() -> bool:
                job = by_name(cluster.report())["demo-0"]
                return bool(job.tasks_done == 32 and job.sent >= 1_000_000)

            until(all_counted, "all tasks and bytes are on the bill")
        now = by_name(cluster.report())["demo-0"]
        assert (now.state, now.gpus, now.ended) == ("running", 2, None)
        assert now.busy is not None and now.busy > 0
    ended = cluster.report()
    job, scheduler = by_name(ended)["demo-0"], by_name(ended)["demo-scheduler"]
    assert ended.ended and ended.problems == []
    assert (job.state, job.reason, job.tasks_done, job.tasks_lost) == ("cancelled", "with the cluster", 32, 0)
    assert job.gpu_hours == pytest.approx(2 * job.ran / 3600) and scheduler.gpu_hours == scheduler.ran / 3600
    assert job.before + job.busy + job.after == pytest.approx(job.gpu_hours) and job.before > 0
    assert (job.utilization_peak, job.memory_peak, job.memory_total) == (0, 1 << 30, 16 << 30)
    assert ended.gpu_hours == pytest.approx(job.gpu_hours + scheduler.gpu_hours)
    forget(home)
    assert report(cluster.directory).jobs == ended.jobs, "the journal has kept what the queue said"
    done = hpcgpu("report", "demo", "--html", str(home / "demo.html"), "--json")
    assert printed("report", done.stdout)["gpu_hours"] == ended.gpu_hours
    assert "demo-scheduler" in (home / "demo.html").read_text()
    assert "32 done, 0 lost with workers" in hpcgpu("report", "demo").stdout


def test_a_job_records_when_it_began_where_nobody_saw_its_end(queue: LocalQueue, home: Path, until: Until) -> None:
    cluster = LocalGPUCluster(jobs=1, name="demo", **CPU)
    cluster.wait_for_workers(1)
    started = {job.name: job.started for job in cluster.report().jobs}
    cluster.close()
    journal = cluster.directory.path / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(True) if json.loads(line)["event"] != "ended"]
    journal.write_text("".join(lines))
    forget(home)
    found = report(cluster.directory)
    assert found.ended and {job.name for job in found.jobs} == started.keys()
    for job in found.jobs:
        assert job.started == pytest.approx(started[job.name], abs=30)
        assert (job.state, job.ended_later) == ("ended", True) and job.ran is not None
    assert "When 2 jobs ended: the queue has forgotten it" in found.text(200)


def test_what_a_worker_that_died_had_is_lost(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(jobs=2, name="demo", **CPU) as cluster:
        cluster.wait_for_workers(2)
        with Client(cluster) as client:
            victim = min(client.scheduler_info()["workers"])
            pid = client.run(os.getpid, workers=[victim])[victim]
            name = client.scheduler_info()["workers"][victim]["name"]
            data = client.submit(abs, -1, workers=[victim], allow_other_workers=True)
            data.result()

            def known() -> bool:
                return bool(by_name(cluster.report())[name].tasks_done)

            until(known, "the worker has been seen")
            os.kill(pid, signal.SIGKILL)
            until(lambda: by_name(cluster.report())[name].tasks_lost == 1, "its result is lost", timeout=120)
            assert data.result() == 1


def test_the_bill_is_there_after_everything_was_killed(queue: LocalQueue, home: Path, until: Until) -> None:
    cluster = LocalGPUCluster(jobs=1, name="demo", **CPU)
    cluster.wait_for_workers(1)
    cluster.detach()
    file = cluster.directory.path / "usage.jsonl"
    until(lambda: file.exists() and '"demo-0"' in file.read_text(), "the scheduler has written")
    assert file.stat().st_mode & 0o777 == 0o600
    assert hpcgpu("stop", "demo").returncode == 0
    until(lambda: live(queue) == [], "the jobs end")
    forget(home)
    found = report(ClusterDirectory(cluster.directory.path))
    assert {job.state for job in found.jobs} == {"cancelled"} and all(job.ran for job in found.jobs)


def test_a_cluster_without_jobs_or_files_has_a_report_that_names_what_is_not_known(
    queue: LocalQueue, home: Path
) -> None:
    with LocalGPUCluster(name="demo", **CPU) as cluster:
        pass
    (cluster.directory.path / "usage.jsonl").write_text('{"id": 7}\n')
    (cluster.directory.path / "options.json").unlink()
    text = hpcgpu("report", "demo").stdout
    assert "line 1 of" in text and "usage.jsonl is damaged" in text
    assert "GPU hours  0.00 of 0 worker jobs and the scheduler job" in text and "How many GPUs 1 job requested." in text
    assert "The GPUs of the jobs: the options of cluster 'demo' cannot be read" in text
