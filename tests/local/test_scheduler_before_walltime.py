"""The next scheduler job waits before the walltime of the present one ends: `on_scheduler_end="restart"`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_pbs import Site

import hpcgpu
from hpcgpu import LocalGPUCluster, PBSGPUCluster
from hpcgpu.batch.base import JobState
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cluster.gpucluster import GPUCluster
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.scaling.scheduler_restarts import STANDBY
from tests.conftest import live, told
from tests.helpers import PBS_CPU, block_queue
from tests.helpers import hpcgpu as command_line
from tests.local.test_restarted_scheduler import GONE, PROGRAM, RESTART, Until, end_scheduler, live_names, queue_id

pytestmark = pytest.mark.shows("A scheduler job that ends too early, and is restarted")

EARLY = RESTART | {"scheduler": {"walltime": "4h"}}


def ends_soon(queue: LocalQueue, job_id: str) -> None:
    """Let the walltime of a running job end in a minute, as if it had run for long."""
    with queue._locked():
        job = queue._read(job_id)
        assert job is not None
        queue._write(replace(job, end=time.time() + 60))


def reaches_walltime(queue: LocalQueue, job_id: str) -> None:
    """End a running job as its walltime does."""
    with queue._locked():
        job = queue._read(job_id)
        assert job is not None
        os.kill(job.supervisor[0], signal.SIGTERM)
        queue._write(replace(job, state=JobState.COMPLETING, verdict=JobState.TIMEOUT))


def half_over(state: dict[str, Any]) -> str:
    """Let half of the walltime of PBS's first job be over; return its id in the queue that runs it."""
    job = state["jobs"]["0"]
    minutes, seconds = divmod(int(2 * (time.time() - job["stime"])), 60)
    job["resources"]["walltime"] = f"00:{minutes:02}:{seconds:02}"
    return str(job["local"])


def schedulers(cluster: GPUCluster) -> list[str]:
    """The names of all scheduler jobs that were ever submitted."""
    return [submit.name for submit in cluster.directory.submits() if submit.kind == "scheduler"]


def waits_to_follow(cluster: GPUCluster, number: int = 2) -> bool:
    """Whether the next scheduler job runs, and waits for the end of the present one."""
    reasons = {job.name: job.reason for job in cluster.jobs if job.state == "running"}
    return reasons.get(f"demo-scheduler{number}") == STANDBY


def test_the_next_scheduler_job_waits_before_the_walltime_ends_and_takes_over(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(name="demo", jobs=1, **EARLY) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        worker = queue_id(cluster, "demo-0")
        for number in (2, 3):
            present, last = schedulers(cluster)[-1], f"demo-scheduler{number}"
            assert client.submit(pow, 2, number).result() == 2**number, "the present scheduler works"
            ends_soon(queue, queue_id(cluster, present))
            until(lambda number=number: waits_to_follow(cluster, number), "the next one waits")
            logs = partial(cluster.directory.logs.glob, f"{last}-*")
            until(lambda logs=logs: any(STANDBY in log.read_text() for log in logs()), "it says so")
            assert client.submit(pow, 3, number).result() == 3**number, "the present one still works"
            with told(GONE):
                reaches_walltime(queue, queue_id(cluster, present))
        assert client.submit(pow, 2, 10).result() == 1024
        cluster.wait_for_workers(1)
        assert schedulers(cluster) == ["demo-scheduler", "demo-scheduler2", "demo-scheduler3"]
        assert worker in live(queue) and live_names(cluster) == {"demo-0", "demo-scheduler3"}
        bill = json.loads(command_line("report", "demo", "--json").stdout)
        billed = sorted(job["name"] for job in bill["jobs"])
        assert billed == ["demo-0", "demo-scheduler", "demo-scheduler2", "demo-scheduler3"], bill
    assert live(queue) == []


def test_on_pbs_the_next_scheduler_job_takes_over_when_the_walltime_ends(pbs: Site, until: Until) -> None:
    options = PBS_CPU | {"on_scheduler_end": "restart", "scheduler": {"walltime": "4h"}}
    with PBSGPUCluster(name="demo", jobs=1, **options) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        worker = queue_id(cluster, "demo-0")
        present = pbs.change(half_over)
        until(lambda: waits_to_follow(cluster), "the next one waits")
        shown = command_line("status", "demo").stdout
        assert STANDBY in shown, shown
        with told(f"{GONE}.* timeout: it reached the end of its walltime"):
            reaches_walltime(pbs.queue, present)
        assert client.submit(pow, 2, 5).result() == 32
        assert worker in pbs.alive() and queue_id(cluster, "demo-scheduler") not in pbs.alive()
    assert pbs.alive() == {}


def test_a_next_scheduler_job_that_waits_in_the_queue_is_used_after_a_failure(
    queue: LocalQueue, home: Path, until: Until, fake_gpus: None
) -> None:
    options = EARLY | {"scheduler": {"walltime": "4h", "gpus_per_node": 1}, "protocol": "tcp"}
    with LocalGPUCluster(name="demo", jobs=1, **options) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        blocker = block_queue(queue, home)
        ends_soon(queue, queue_id(cluster, "demo-scheduler"))
        until(lambda: "demo-scheduler2" in live_names(cluster), "the next one is in the queue")
        shown = {line.split()[0]: line for line in command_line("status", "demo").stdout.splitlines() if line.split()}
        assert "pending" in str(shown), shown
        with told(GONE):
            end_scheduler(client, signal.SIGKILL)
        assert live_names(cluster) == {"demo-0", "demo-scheduler2"}
        queue.cancel([blocker])
        assert client.submit(pow, 2, 5).result() == 32
        cluster.wait_for_workers(1)
        assert schedulers(cluster) == ["demo-scheduler", "demo-scheduler2"]
    assert live(queue) == []


@pytest.mark.parametrize("by", ["close", "stop"])
def test_no_next_scheduler_job_is_left(queue: LocalQueue, until: Until, by: str) -> None:
    cluster = LocalGPUCluster(name="demo", jobs=1, **EARLY)
    cluster.wait_for_workers(1)
    ends_soon(queue, queue_id(cluster, "demo-scheduler"))
    until(lambda: waits_to_follow(cluster), "the next one waits")
    shown = command_line("status", "demo").stdout
    assert STANDBY in shown, shown
    if by == "stop":
        cluster.detach()
        assert len(live(queue)) == 3, "it stays, as the cluster does"
        assert command_line("stop", "demo").returncode == 0
    cluster.close()
    assert live(queue) == []


@pytest.mark.parametrize("scheduler", ["lives", "is killed too"])
def test_a_program_that_takes_a_cluster_over_uses_the_next_scheduler_job_that_waits(
    queue: LocalQueue, until: Until, scheduler: str
) -> None:
    program = PROGRAM.replace("**cpu", "**cpu, scheduler={'walltime': '4h'}, poll_interval=0.5")
    argv = [sys.executable, "-c", program, "10m"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None and manager.stdout.readline() == "ready\n"
        with hpcgpu.connect("demo", quiet=True) as client:
            pid = client.run_on_scheduler(os.getpid)
        ends_soon(queue, queue.find("demo-scheduler")[0])
        until(lambda: len(live(queue)) == 3, "the next one is in the queue")
        manager.kill()
    before = live(queue)
    if scheduler != "lives":
        os.kill(pid, signal.SIGKILL)
        until(lambda: len(live(queue)) == 2, "the queue reports the end of the scheduler job")
    with LocalGPUCluster.from_name("demo", shutdown_on_close=True) as cluster, cluster.get_client() as client:
        if scheduler == "lives":
            assert waits_to_follow(cluster)
            assert client.submit(pow, 2, 3).result() == 8
            with told(GONE):
                end_scheduler(client, signal.SIGKILL)
        assert client.submit(pow, 2, 5).result() == 32
        cluster.wait_for_workers(1)
        assert schedulers(cluster) == ["demo-scheduler", "demo-scheduler2"]
        assert live(queue) == sorted({queue_id(cluster, "demo-0"), queue_id(cluster, "demo-scheduler2")} & set(before))
    assert live(queue) == []


def test_one_that_somebody_cancels_ends_nothing_and_another_one_takes_over(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(name="demo", jobs=1, **EARLY) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        ends_soon(queue, queue_id(cluster, "demo-scheduler"))
        until(lambda: waits_to_follow(cluster), "the next one waits")
        with told("scheduler job demo-scheduler2, which should follow the present one .* cancelled"):
            queue.cancel([queue_id(cluster, "demo-scheduler2")])
        cluster.scale(jobs=2)  # a worker job that starts now searches for the scheduler
        cluster.wait_for_workers(2)
        until(lambda: waits_to_follow(cluster, 3), "another one waits")
        with told(GONE):
            end_scheduler(client, signal.SIGKILL)
        assert client.submit(pow, 2, 5).result() == 32
        cluster.wait_for_workers(2)
        assert live_names(cluster) == {"demo-0", "demo-1", "demo-scheduler3"}
    assert live(queue) == []


def test_it_takes_over_though_nobody_manages_the_cluster(queue: LocalQueue, until: Until) -> None:
    program = PROGRAM.replace("**cpu", "**cpu, scheduler={'walltime': '4h'}, poll_interval=0.5")
    argv = [sys.executable, "-c", program, "10m"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None and manager.stdout.readline() == "ready\n"
        ends_soon(queue, queue.find("demo-scheduler")[0])
        until(lambda: len(live(queue)) == 3, "the next one is in the queue")
        manager.kill()
    directory, ended = locate("demo"), queue.find("demo-scheduler")[0]
    log = directory.logs / queue.log_name("demo-scheduler2", queue.find("demo-scheduler2")[0])
    until(lambda: log.exists() and STANDBY in log.read_text(), "it waits")
    worker = queue.find("demo-0")
    with hpcgpu.connect("demo", quiet=True, set_as_default=False) as early:
        reaches_walltime(queue, ended)
        until(lambda: (contact := directory.contact()) is not None and contact.job_id != ended, "it takes over")
        assert early.submit(pow, 2, 7).result() == 128, "a client goes on with it"
    assert directory.has_ended(ended), "it has written that into the journal"
    with hpcgpu.connect("demo", quiet=True) as client:
        assert client.submit(pow, 2, 5).result() == 32
    assert queue.find("demo-0") == worker, "the worker job has gone on"
    assert command_line("stop", "demo").returncode == 0
    assert live(queue) == []


SUSPENDED = """
import sys, time
from hpcgpu import LocalGPUCluster
options = {"gpus_per_node": 0, "cores": 1, "scheduler": {"walltime": "4h"}, "poll_interval": 0.5}
with LocalGPUCluster(name="demo", jobs=1, on_scheduler_end="restart", **options) as cluster:
    cluster.wait_for_workers(1)
    print("ready", flush=True)
    sys.stdin.read()
    while cluster.status.name != "failed":
        time.sleep(0.1)
    print(cluster)
"""


def test_a_program_that_was_suspended_learns_that_the_next_scheduler_has_ended_too(
    queue: LocalQueue, until: Until
) -> None:
    """The next one takes over without the program, and the lease ends it."""
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        while program.stdout.readline() != "ready\n":
            pass
        [first] = queue.find("demo-scheduler")
        script = locate("demo").path / "scheduler.sh"
        text = script.read_text()
        assert "--lease 600" in text
        script.write_text(text.replace("--lease 600", "--lease 5"))  # of the next one, which hears of no manager
        ends_soon(queue, first)
        until(lambda: queue.find("demo-scheduler2"), "the next one is in the queue")
        logs = locate("demo").logs
        until(lambda: any(STANDBY in log.read_text() for log in logs.glob("*scheduler2-*")), "it waits")
        program.send_signal(signal.SIGSTOP)
        reaches_walltime(queue, first)
        until(lambda: not live(queue), "the lease ends")
        program.send_signal(signal.SIGCONT)
        said = program.communicate(timeout=150)[0]
    assert "no heartbeat from the cluster's manager for 5 s (option lease)" in said, said
    assert not queue.find("demo-scheduler3"), said
    assert live(queue) == []
