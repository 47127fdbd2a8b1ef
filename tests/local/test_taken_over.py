"""What a new manager makes of jobs that an earlier one ended, or was about to end: none of them comes back, none counts
as a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fake_pbs import Site

from hpcgpu import LocalGPUCluster, PBSGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cluster.gpucluster import GPUCluster
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.existing_clusters.stop import stop
from tests.conftest import live
from tests.helpers import CPU, asks_for, messages, poll_and_decide

pytestmark = pytest.mark.shows("The command line; a cluster that another program takes over")

Until = Callable[..., None]

PBS_CPU: dict[str, Any] = CPU | {"memory": "1GB"}


def submits(cluster: GPUCluster) -> list[str]:
    """Names of all jobs that were ever asked for."""
    return [submit.name for submit in cluster.directory.submits()]


def keeps_exactly_one(cluster: GPUCluster, kept: str, before: list[str], until: Until) -> None:
    """The cluster has this worker job alone, asks for no other, and holds nothing against what was ended on purpose."""
    cluster.wait_for_workers(1)
    until(
        lambda: [j.name for j in cluster.jobs if j.kind == "worker" and j.state in ("pending", "running")] == [kept],
        "one job is left",
    )
    poll_and_decide(cluster)
    cluster.settle()
    assert submits(cluster) == before, "it submitted a job"
    asks_for(cluster, 1, "1 job")
    assert "worker job" not in messages(cluster), "it reported that one failed"
    assert {str(worker["name"]) for worker in cluster.scheduler_info["workers"].values()} == {kept}


def test_jobs_that_were_scaled_away_on_pbs_stay_away(pbs: Site, until: Until) -> None:
    """Its queue lists no ended job; its history does, which this site does not keep."""
    pbs.set(history=False)
    cluster = PBSGPUCluster(name="a.cluster-that-is-kept", jobs=3, shutdown_on_close=False, **PBS_CPU)
    cluster.wait_for_workers(3)
    cluster.scale(jobs=1)
    cluster.settle()
    [kept] = cluster.workers
    cluster.close()
    until(lambda: len(pbs.alive()) == 2, "the others have ended")
    for _ in range(2):
        again = PBSGPUCluster.from_name("a.cluster-that-is-kept")
        keeps_exactly_one(again, kept, submits(cluster), until)
        again.detach()
    PBSGPUCluster.from_name("a.cluster-that-is-kept").close()
    assert pbs.alive() == {}


#: A program that scales from three jobs to one and is killed at some point of it.
KILLED = """
import os, signal, sys
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.manager.draining import Drainer

die = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
cancel = LocalQueue.cancel
cluster = LocalGPUCluster(name="killed", jobs=3, **%r)
cluster.wait_for_workers(3)
if sys.argv[1] == "before the event":
    ClusterDirectory.cancel = die
elif sys.argv[1] == "before the data moves":
    Drainer._drain = die
elif sys.argv[1] == "before the command":
    LocalQueue.cancel = die
elif sys.argv[1] == "after the command":
    LocalQueue.cancel = lambda self, ids, **options: (cancel(self, ids, **options), die())
cluster.scale(jobs=1)
cluster.settle()
"""


@pytest.mark.parametrize(
    "when", ["before the event", "before the data moves", "before the command", "after the command"]
)
def test_a_manager_that_is_killed_while_it_scales_leaves_the_size_that_was_asked_for(
    queue: LocalQueue, until: Until, when: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED % CPU, when], capture_output=True, text=True, timeout=250, env=dict(os.environ)
    )
    assert done.returncode == -9, done.stderr
    before = [submit.name for submit in locate("killed").submits()]
    with LocalGPUCluster.from_name("killed") as cluster:
        until(lambda: len(cluster.workers) == 1, "two go")
        [kept] = cluster.workers
        marked = [submit.name for submit in cluster.directory.submits() if submit.unwanted]
        assert len(marked) == 2 and kept not in marked
        keeps_exactly_one(cluster, kept, before, until)
    assert live(queue) == []


def test_a_job_that_an_earlier_manager_cancelled_and_that_is_still_ending_is_no_failure(
    queue: LocalQueue, until: Until
) -> None:
    """Its prologue takes its time when it must end, as an epilog does."""
    slow = ["""if [ "$HPCGPU_JOB_NAME" = slow-1 ]; then trap 'sleep 3; exit 1' TERM; sleep 600 & wait; fi"""]
    cluster = LocalGPUCluster(name="slow", jobs=2, job_script_prologue=slow, shutdown_on_close=False, **CPU)
    cluster.wait_for_workers(1)
    until(lambda: {job.name: job.state for job in cluster.jobs}["slow-1"] == "running", "the other runs")
    cluster.scale(jobs=1)
    cluster.settle()
    cluster.close()
    with LocalGPUCluster.from_name("slow") as again:
        keeps_exactly_one(again, "slow-0", submits(cluster), until)
    assert live(queue) == []


def test_a_cluster_without_worker_jobs_stays_without(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(name="none", jobs=2, shutdown_on_close=False, **CPU)
    cluster.wait_for_workers(2)
    cluster.scale(jobs=0)
    cluster.settle()
    cluster.close()
    again = LocalGPUCluster.from_name("none")
    poll_and_decide(again)
    assert again.workers == {} and len(submits(again)) == 3
    again.detach()
    assert "still works" not in messages(again)
    assert all(submit.unwanted for submit in again.directory.submits() if submit.kind == "worker")
    assert stop(again.directory, queue) == []
