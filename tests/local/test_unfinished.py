"""A start that is killed, or of which the queue refuses a job, is seen and can be completed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import hpcgpu
from hpcgpu import ClusterExists, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.dask_scheduler.end_without_manager import ManagerLease
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.existing_clusters.unsubmitted_jobs import unfinished
from hpcgpu.scaling.wanted_state import Scale, apply
from tests.conftest import live
from tests.helpers import CPU

#: Runs a command of hpcgpu, which is killed when it has submitted the scheduler job, or the first worker job.
KILLED = """
import os, signal
from hpcgpu.cli import main
from hpcgpu.scaling.wanted_state import Scale, apply
from hpcgpu.store.directory import ClusterDirectory
real = ClusterDirectory.submitted
def submitted(self, name, job_id):
    real(self, name, job_id)
    if name.endswith("-scheduler"):
        os.kill(os.getpid(), signal.SIGKILL)
ClusterDirectory.submitted = submitted
main()
"""
KILLED_LATER = KILLED.replace("-scheduler", "-0")
START = ("--system", "local", "--gpus-per-node", "0", "--cores", "1", "--protocol", "tcp")


def command(*arguments: str, program: tuple[str, ...] = ("-m", "hpcgpu")) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", *program, *arguments]
    return subprocess.run(argv, check=False, capture_output=True, text=True)


def lease(name: str) -> float | None:
    """That of the scheduler; None if the cluster needs no manager."""

    def look(dask_scheduler: Any) -> float | None:
        lease = dask_scheduler.plugins["hpcgpu"].lease
        return None if lease._released() else float(lease.seconds)

    with hpcgpu.connect(name, quiet=True) as client:
        found: float | None = client.run_on_scheduler(look)
    return found


def test_a_start_that_is_killed_between_its_submits_has_a_lease_and_is_completed_by_a_command(
    queue: LocalQueue,
) -> None:
    killed = command("start", "half", "--jobs", "2", *START, program=("-c", KILLED))
    assert killed.returncode == -signal.SIGKILL
    assert len(live(queue)) == 1
    assert lease("half") == 600.0, "nobody manages it: its GPU must not be taken for ever"
    assert not locate("half").detached

    missing = "2 worker jobs were asked for, and none submitted. To submit the rest, run: hpcgpu scale half --jobs 2"
    assert f"problem    {missing}" in command("status", "half").stdout
    found = json.loads(command("status", "half", "--json").stdout)
    assert (found["problem"], found["detached"]) == (missing, False)
    with pytest.raises(ClusterExists) as refused:
        LocalGPUCluster(name="half", jobs=2, **CPU)
    for way in ("hpcgpu.connect('half')", 'if_exists="connect"', missing):
        assert way in str(refused.value)

    assert command("scale", "half", "--jobs", "2").returncode == 0
    found = json.loads(command("status", "half", "--json").stdout)
    assert (found["problem"], found["detached"], len(found["jobs"])) == ("", True, 3)
    assert lease("half") is None
    assert command("stop", "half").returncode == 0


def test_a_start_that_is_killed_while_it_submits_its_worker_jobs_has_a_lease(queue: LocalQueue) -> None:
    killed = command("start", "half", "--jobs", "2", *START, program=("-c", KILLED_LATER))
    assert killed.returncode == -signal.SIGKILL
    assert not locate("half").detached and lease("half") == 600.0
    assert command("stop", "half").returncode == 0
    assert live(queue) == []


def test_a_start_that_was_killed_and_that_a_laptop_requests_again_leaves_no_job(queue: LocalQueue) -> None:
    """The laptop sends the same request when its connection is there again."""
    request = ("start", "half", "--jobs", "2", *START, "--token", "a-token", "--managed", "--no-wait")
    assert command(*request, program=("-c", KILLED)).returncode == -signal.SIGKILL
    assert len(live(queue)) == 1
    again = command(*request)
    assert again.returncode == 1
    said = (
        f"the start of cluster half was interrupted on {socket.gethostname()}, and no job of it is left. Start it again"
    )
    assert said in again.stderr
    assert live(queue) == []


def test_a_start_that_does_not_wait_reports_a_refused_worker_job(queue: LocalQueue) -> None:
    options = ("--gpus-per-node", "9", "--scheduler", "gpus_per_node=0", "--no-wait")
    started = command("start", "refused", "--system", "local", "--jobs", "1", *options)
    words = "worker job refused-0 was not submitted: job 'refused-0' requests 9 GPUs, but this machine has 4"
    assert started.returncode == 1 and started.stderr.count(words) == 1, started.stderr
    assert live(queue) == [], "as where it waits, none is left"
    assert f"problem    {words}" in command("status", "refused").stdout


def test_a_function_receives_the_same(queue: LocalQueue) -> None:
    with pytest.raises(hpcgpu.ClusterError, match="requests 9 GPUs, but this machine has 4"):
        LocalGPUCluster(name="refused", jobs=1, gpus_per_node=9, scheduler={"gpus_per_node": 0}, wait=False, quiet=True)
    assert live(queue) == []


def test_a_start_that_does_not_wait_leaves_a_cluster_for_good(queue: LocalQueue) -> None:
    started = command("start", "kept", "--jobs", "1", "--no-wait", *START)
    assert started.returncode == 0, started.stderr
    assert locate("kept").detached
    assert lease("kept") is None
    assert json.loads(command("status", "kept", "--json").stdout)["problem"] == ""
    assert command("stop", "kept").returncode == 0


def test_a_cluster_that_a_program_leaves_after_the_crash_of_another_needs_no_manager(queue: LocalQueue) -> None:
    crashes = "import os, signal; from hpcgpu import LocalGPUCluster; "
    crashes += f"LocalGPUCluster(name='left', jobs=1, **{CPU!r}); os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", crashes], check=False).returncode == -signal.SIGKILL
    LocalGPUCluster.from_name("left", shutdown_on_close=False, quiet=True).close()
    assert lease("left") is None
    assert command("stop", "left").returncode == 0


def test_nothing_is_missing_while_a_program_may_still_submit_it(queue: LocalQueue) -> None:
    with LocalGPUCluster(name="managed", jobs=0, **CPU) as cluster:
        wanted = apply(cluster.directory.wanted(), Scale("default", 3))
        cluster.directory.want(wanted)  # as if the submits were under way
        assert unfinished(cluster.directory, now=time.time()) == ""
        assert "3 worker jobs were asked for" in unfinished(cluster.directory, now=time.time(), left=True)


async def test_the_lease_does_not_end_a_cluster_that_was_left_before_the_scheduler_received_that() -> None:
    looks = [True, True, False]

    class Scheduler:
        reason = ""

        async def close(self, reason: str) -> None:
            self.reason = reason

    scheduler = Scheduler()
    lease = ManagerLease(scheduler, 600.0, lambda: looks.pop(0))  # type: ignore[arg-type]
    while not scheduler.reason:
        await lease.step(60)
    assert looks == [] and scheduler.reason == "hpcgpu-lease"


async def test_a_heartbeat_while_a_slow_filesystem_is_read_keeps_the_lease() -> None:
    ended = list[str]()
    loop, looked, reads = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Scheduler:
        async def close(self, reason: str) -> None:
            ended.append(reason)

    def released() -> bool:
        loop.call_soon_threadsafe(looked.set)
        assert reads.wait(150)
        return False

    lease = ManagerLease(Scheduler(), 600.0, released)  # type: ignore[arg-type]
    await lease.heartbeat(1)
    step = asyncio.ensure_future(lease.step(600))
    await looked.wait()
    await lease.heartbeat(1)
    reads.set()
    await step
    assert lease.present and not ended
    await lease.step(600)
    assert ended == ["hpcgpu-lease"], "but not for ever"
