"""A cluster whose directory somebody removes, such as a site that clears its scratch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.store import removed_directory
from tests.conftest import live
from tests.helpers import CPU

pytestmark = pytest.mark.filterwarnings("ignore::hpcgpu.errors.ClusterWarning")
Until = Callable[..., None]


def hpcgpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hpcgpu", *arguments], check=False, capture_output=True, text=True
    )


def test_its_jobs_end_and_report_why_and_a_living_program_receives_the_path(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    kinds = {
        "env": {removed_directory.VARIABLE: "1"},
        "scheduler": {"gpus_per_node": 0, "env": {removed_directory.VARIABLE: "8"}},
    }
    cluster = LocalGPUCluster(name="purged", jobs=1, log_directory=home / "logs", **kinds, **CPU)
    cluster.wait_for_workers()
    scheduler, worker = (next((home / "logs").glob(f"purged-{kind}-*.log")) for kind in ("scheduler", "0"))
    shutil.rmtree(cluster.directory.path)
    with pytest.raises(ClusterError, match=f"its directory {cluster.directory.path} is gone"):
        cluster.get_client()
    with pytest.raises(OSError, match=str(cluster.directory.path)):
        Client(cluster, timeout=5)
    until(lambda: not live(queue), "both jobs end by themselves")
    for log in (scheduler, worker):
        assert f"its directory {cluster.directory.path} was removed: it has been missing for" in log.read_text()
        assert "This job ends" in log.read_text()
    until(lambda: cluster.status.name == "failed", "the program knows that the cluster is lost")
    with pytest.raises(ClusterError, match="was removed"):
        cluster.scale(1)
    cluster.close()


def test_a_program_cancels_the_jobs_of_its_cluster(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalGPUCluster(name="lost", jobs=1, env={removed_directory.VARIABLE: "600"}, **CPU)
    cluster._state.dispatcher._gone.timeout = 1.0
    shutil.rmtree(cluster.directory.path)
    until(lambda: cluster.status.name == "failed", "the program knows that the cluster is lost")
    with pytest.raises(ClusterError, match=f"its directory {cluster.directory.path} was removed"):
        cluster.wait_for_workers()
    until(lambda: not live(queue), "its jobs are cancelled")
    cluster.close()


@pytest.mark.parametrize("emptied", [False, True])
def test_a_detach_that_nothing_can_record_is_an_error(queue: LocalQueue, emptied: bool) -> None:
    cluster = LocalGPUCluster(name="lost", **CPU)
    shutil.rmtree(cluster.directory.path)
    if emptied:
        cluster.directory.path.mkdir(mode=0o700)
    words = f"cluster lost cannot be detached, because its directory {cluster.directory.path} was removed or emptied"
    with pytest.raises(ClusterError, match=words):
        cluster.detach()
    assert cluster.status.name == "running" and len(live(queue)) == 1, "the program still has the cluster"
    cluster.close()
    assert not live(queue)


def test_list_and_stop_find_the_jobs_in_the_queue(queue: LocalQueue, home: Path) -> None:
    for name in ("one", "two"):
        cluster = LocalGPUCluster(name=name, jobs=1, **CPU)
        cluster.wait_for_workers()
        cluster.detach()
        if name == "one":
            first = live(queue)
        shutil.rmtree(cluster.directory.path)
    other = home / "other" / "worker.sh"
    other.parent.mkdir()
    other.write_text("#!/bin/bash\n#HPCGPU --output=/dev/null\n# hpcgpu.runtime.launch worker local\nexec sleep 600\n")
    tool = queue.submit(other, job_name="one-0")
    shutil.rmtree(other.parent)

    listed = {one["name"]: one for one in json.loads(hpcgpu("list", "--json").stdout)}
    assert set(listed) == {"one", "two"}
    assert [job["id"] for job in listed["one"]["jobs"]] == first
    assert "its directory is gone" in listed["one"]["problem"] and "hpcgpu stop one" in listed["one"]["problem"]

    said = hpcgpu("status", "one")
    assert (
        said.returncode == 2
        and f"{home}/clusters/one is gone, but its jobs are in the queue: {first[0]} (one-" in said.stderr
    )
    assert "To end them, run: hpcgpu stop one" in said.stderr

    done = hpcgpu("stop", "one")
    assert done.returncode == 0 and f"{first[0]} (one-scheduler)" in done.stdout, done
    assert "one: 2 jobs cancelled, no job is left" in done.stdout
    assert hpcgpu("stop", "one").returncode == 2
    assert len(live(queue)) == 3, "the other cluster, and the other tool's job"
    done = hpcgpu("stop", "--all")
    assert done.returncode == 0 and "two: 2 jobs cancelled, no job is left" in done.stdout
    assert live(queue) == [tool]
    queue.cancel([tool])
    assert "No clusters." in hpcgpu("stop", "--all").stdout
