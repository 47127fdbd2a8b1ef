"""What a cluster reports when it has ended: closed, detached or failed. No call ends in an error of the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcgpu import ClusterError, LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cluster.gpucluster import GPUCluster
from hpcgpu.existing_clusters.stop import stop
from hpcgpu.notify import Notice
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import live, told
from tests.helpers import CPU

CALLS: dict[str, Callable[[GPUCluster], Any]] = {
    "scale": lambda cluster: cluster.scale(1),
    "adapt": lambda cluster: cluster.adapt(maximum=2),
    "add_worker_group": lambda cluster: cluster.add_worker_group("big", jobs=1),
    "delete_worker_group": lambda cluster: cluster.delete_worker_group("big"),
    "wait_for_workers": lambda cluster: cluster.wait_for_workers(1),
    "settle": lambda cluster: cluster.settle(),
    "fabric": lambda cluster: cluster.fabric,
    "get_client": lambda cluster: cluster.get_client(),
    "detach": lambda cluster: cluster.detach(),
}


def test_every_call_on_a_closed_cluster_reports_that_it_is_closed_and_its_logs_can_be_read(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(name="over", jobs=1, **CPU)
    cluster.wait_for_workers(1)
    adaptive = cluster.adapt(maximum=1)
    cluster.close()
    assert live(queue) == []
    for name, call in CALLS.items():
        with pytest.raises(ClusterError) as caught:
            call(cluster)
        assert str(caught.value) == "cluster over is closed", name
    with pytest.raises(ClusterError, match="cluster over is closed"):
        adaptive.resume()
    logs = cluster.get_logs()
    assert "submitted scheduler job" in logs["Cluster"]
    assert any("over-scheduler" in name and "Scheduler at" in text for name, text in logs.items()), logs.keys()
    assert any(name.startswith("over-0") for name in logs)
    assert not (cluster.directory.path / "worker-big.sh").exists()
    cluster.close()
    assert "status=closed" in repr(cluster)


async def test_every_call_on_a_closed_asynchronous_cluster_reports_it_too(queue: LocalQueue) -> None:
    cluster = await LocalGPUCluster(name="over", asynchronous=True, **CPU)
    await cluster.close()
    for name, call in CALLS.items():
        with pytest.raises(ClusterError) as caught:
            await call(cluster)
        assert str(caught.value) == "cluster over is closed", name
    with pytest.raises(ClusterError, match="cluster over is closed"):
        await cluster.scale_down(["over-0"])
    assert "submitted scheduler job" in (await cluster.get_logs())["Cluster"]


async def test_a_command_on_an_asynchronous_cluster_is_done_or_refused_for_its_caller(queue: LocalQueue) -> None:
    async with LocalGPUCluster(name="over", asynchronous=True, **CPU) as cluster:
        await asyncio.to_thread(cluster.scale, jobs=1)
        assert list(cluster.workers) == ["over-0"]
        cluster.directory.begin_close()  # `hpcgpu stop` begins
        with pytest.raises(ClusterError, match="was closed, by its program or by `hpcgpu stop`"):
            await cluster.scale(jobs=2)
        with pytest.raises(ClusterError, match="was closed, by its program or by `hpcgpu stop`"):
            await asyncio.to_thread(cluster.scale, jobs=2)


def test_worker_groups_on_a_full_disk(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that cannot be added leaves nothing; one that is deleted is gone, though the next program may see it."""
    write, full = ClusterDirectory.write, list[str]()

    def no_room(directory: ClusterDirectory, name: str, content: str | bytes) -> Path:
        if name in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(directory, name, content)

    monkeypatch.setattr(ClusterDirectory, "write", no_room)
    with LocalGPUCluster(name="over", **CPU) as cluster:
        for name in ("worker-big.sh", "options.json"):
            full[:] = [name]
            with pytest.raises(ClusterError, match=r"group 'big' cannot be added, because .*/over cannot be written"):
                cluster.add_worker_group("big", jobs=1)
            with pytest.raises(OptionError, match="no worker group named 'big': the groups are default"):
                cluster.scale(jobs=1, worker_group="big")
        full.clear()
        cluster.add_worker_group("big")
        full[:] = ["options.json"]
        with told("over cannot be written: No space left on device"):
            cluster.delete_worker_group("big")
            cluster.settle()
        assert list(cluster._state.registry.groups) == ["default"]
        full.clear()
        cluster.add_worker_group("big")
        assert list(saved_options.read(cluster.directory).groups) == ["big"]


def test_a_cluster_whose_detach_could_not_be_recorded_is_not_shown_as_detached(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = ClusterDirectory.want

    def no_room(directory: ClusterDirectory, wanted: Wanted) -> None:
        if wanted.detached:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        want(directory, wanted)

    monkeypatch.setattr(ClusterDirectory, "want", no_room)
    cluster = LocalGPUCluster(name="over", shutdown_on_close=False, **CPU)
    try:
        assert "cluster over cannot be detached" in cluster.get_logs()["Cluster"]
        assert not cluster.directory.detached and not cluster.snapshot().detached
    finally:
        stop(cluster.directory, cluster.batch)
        cluster.close()


def test_logs_of_a_closed_asynchronous_cluster_can_be_read_when_its_loop_is_gone(queue: LocalQueue) -> None:
    async def main() -> LocalGPUCluster:
        async with LocalGPUCluster(name="over", asynchronous=True, **CPU) as cluster:
            return cluster

    assert "submitted scheduler job" in asyncio.run(main()).get_logs()["Cluster"]


def test_a_detached_cluster_reports_how_to_attach_to_it(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(name="left", **CPU)
    cluster.detach()
    with pytest.raises(
        ClusterError, match=r"cluster left was detached from this program: from_name\('left'\) attaches to it"
    ):
        cluster.scale(1)
    assert "Cluster" in cluster.get_logs()
    LocalGPUCluster.from_name("left", wait=True).close()
    assert live(queue) == []


def test_the_end_of_the_log_is_reported_once_and_the_repr_of_a_failed_cluster_is_one_line(queue: LocalQueue) -> None:
    notices: list[Notice] = []
    cluster = LocalGPUCluster(name="lost", notify=notices.append, **CPU)
    with told("(?s)the scheduler of cluster lost is gone.*Log: .*\n.*Scheduler at"):
        queue.cancel([cluster.scheduler.job_id])
    log = str(cluster.scheduler.log)
    for call in (
        CALLS["scale"],
        CALLS["add_worker_group"],
        CALLS["wait_for_workers"],
        CALLS["get_client"],
        CALLS["fabric"],
    ):
        with pytest.raises(ClusterError) as caught:
            call(cluster)
        assert "\n" not in str(caught.value) and log in str(caught.value)
    assert "\n" not in repr(cluster) and "status=failed" in repr(cluster) and log in repr(cluster)
    cluster.close()
    assert [notice.event for notice in notices] == ["ended"], "the user is notified once"
    assert "the scheduler of cluster lost is gone" in notices[0].message
    assert live(queue) == []


LOCAL_SCHEDULER = """
from hpcgpu import LocalGPUCluster
with LocalGPUCluster(scheduler="local", quiet=True, gpus_per_node=0, cores=1, jobs=1) as cluster:
    cluster.wait_for_workers()
    with cluster.get_client() as client:
        print(client.submit(sum, [1, 2]).result())
import logging
print({handler.level for handler in logging.getLogger("distributed").handlers})
"""


def test_a_quiet_cluster_whose_scheduler_runs_here_does_not_chatter(queue: LocalQueue) -> None:
    done = subprocess.run([sys.executable, "-c", LOCAL_SCHEDULER], capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr) == ("3\n{0}\n", "")


def test_close_reports_which_jobs_it_waits_for_and_how_long(
    queue: LocalQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalGPUCluster(name="slow", **{**CPU, "quiet": False})
    capsys.readouterr()
    cluster.close()
    words = (
        rf"hpcgpu: cluster slow: waiting for its jobs to end: job {cluster.scheduler.job_id}, for (30|2\d) s at most"
    )
    assert re.search(words, capsys.readouterr().err)
