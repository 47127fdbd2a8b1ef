"""The scheduler of a detached cluster ends too early: another one follows, though no program manages the cluster."""

from __future__ import annotations

import gc
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client
from distributed.client import FutureCancelledError

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.existing_clusters.lookup import locate
from tests.conftest import live, told
from tests.helpers import hpcgpu as command_line
from tests.local.test_restarted_scheduler import GONE, RESTART, end_scheduler
from tests.local.test_scheduler_before_walltime import ends_soon, reaches_walltime

pytestmark = pytest.mark.shows("A detached cluster goes on with another scheduler")

Until = Callable[..., None]
DETACHED = RESTART | {"poll_interval": 0.5, "scheduler": {"walltime": "4h"}}


def leave_cluster(**options: object) -> None:
    """Start a cluster, and leave it to itself; this program has forgotten it then."""
    LocalGPUCluster(name="demo", jobs=1, **DETACHED | options).detach()
    gc.collect()


def lose_scheduler(client: Client, end: Callable[[], None]) -> None:
    """End the scheduler, and wait until the client has noticed it."""
    lost = client.submit(time.sleep, 1000, pure=False)
    end()
    with pytest.raises(FutureCancelledError, match="another one is started"):
        lost.result()


def test_it_goes_on_again_and_again(queue: LocalQueue, until: Until) -> None:
    leave_cluster()
    with hpcgpu.connect("demo", quiet=True) as client:
        client.wait_for_workers(1)
        worker = queue.find("demo-0")
        for number in (2, 3):  # submitted by the program that has left; by the manager in the scheduler job
            until(lambda number=number: queue.find(f"demo-scheduler{number}"), "the next one is in the queue")
            shown = command_line("status", "demo").stdout
            assert "it starts once the present scheduler job has ended" in shown, shown
            lose_scheduler(client, lambda: end_scheduler(client, signal.SIGKILL))
            assert client.submit(pow, 2, number).result() == 2**number
            client.wait_for_workers(1)
        assert queue.find("demo-0") == worker, "the worker job has gone on"
    bill = json.loads(command_line("report", "demo", "--json").stdout)
    assert {job["name"] for job in bill["jobs"]} >= {"demo-0", "demo-scheduler", "demo-scheduler2", "demo-scheduler3"}
    assert command_line("stop", "demo").returncode == 0
    assert live(queue) == []


def test_before_the_walltime_the_next_one_waits_beside_it(queue: LocalQueue, until: Until) -> None:
    leave_cluster()
    with hpcgpu.connect("demo", quiet=True) as client:
        client.wait_for_workers(1)
        [first], [held] = queue.find("demo-scheduler"), queue.find("demo-scheduler2")
        ends_soon(queue, first)
        until(lambda: queue.find("demo-scheduler3"), "another one is submitted that does not wait for the end")
        until(lambda: held not in live(queue), "and takes the place of the one that does")
        logs = locate("demo").logs
        until(lambda: any("takes over" in log.read_text() for log in logs.glob("*scheduler3-*")), "it waits in its job")
        lose_scheduler(client, lambda: reaches_walltime(queue, first))
        assert client.submit(pow, 2, 5).result() == 32
        until(lambda: queue.find("demo-scheduler4"), "the next one is in the queue")
    assert command_line("stop", "demo").returncode == 0
    assert live(queue) == []


@pytest.mark.parametrize(("end", "security"), [("idle_timeout", False), ("cancel", True)])
@pytest.mark.filterwarnings("ignore:security=False")
def test_it_ends_as_intended(queue: LocalQueue, until: Until, end: str, security: bool) -> None:
    leave_cluster(security=security, **({"idle_timeout": "20s"} if end == "idle_timeout" else {}))
    if end == "cancel":
        until(lambda: queue.find("demo-scheduler2"), "the next one is in the queue")
        queue.cancel(queue.find("demo-scheduler"))
    until(lambda: live(queue) == [], "no job is left")
    assert command_line("stop", "demo").returncode == 0


def test_a_client_does_not_wait_for_ever_if_the_next_job_fails_and_nobody_records_that(
    queue: LocalQueue, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    prologue = {"job_script_prologue": [f"if [ -e {fails} ]; then exit 3; fi"]}
    leave_cluster(scheduler={"walltime": "4h"} | prologue, restart_wait="1s")
    with hpcgpu.connect("demo", quiet=True) as client:
        client.wait_for_workers(1)
        fails.touch()
        lost = client.submit(time.sleep, 1000, pure=False)
        end_scheduler(client, signal.SIGKILL)
        gone = (
            "scheduler of cluster demo is gone(, and no other one has followed, so start a new cluster)?: scheduler job"
        )
        with pytest.raises(FutureCancelledError, match="the scheduler of cluster demo is gone"):
            lost.result(timeout=150)
        for exponent in range(3):  # Dask still tries to reconnect
            with pytest.raises(FutureCancelledError, match=gone):
                client.submit(pow, 2, exponent).result(timeout=120)
    assert command_line("stop", "demo").returncode == 0
    assert live(queue) == []


def test_a_program_that_takes_it_over_and_leaves_it_again_keeps_the_next_job(queue: LocalQueue, until: Until) -> None:
    leave_cluster()
    held = queue.find("demo-scheduler2")
    cluster = LocalGPUCluster.from_name("demo", quiet=True)
    with cluster.get_client() as client:
        cluster.wait_for_workers(1)
        with told(GONE):
            lose_scheduler(client, lambda: end_scheduler(client, signal.SIGKILL))
            assert client.submit(pow, 2, 5).result() == 32
            cluster.wait_for_workers(1)
        assert queue.find("demo-scheduler2") == held
        until(lambda: queue.find("demo-scheduler3"), "the next one is in the queue")
    cluster.detach()
    assert queue.find("demo-scheduler3"), "it stays"
    with hpcgpu.connect("demo", quiet=True) as client:
        lose_scheduler(client, lambda: end_scheduler(client, signal.SIGKILL))
        assert client.submit(pow, 2, 6).result() == 64
    with LocalGPUCluster.from_name("demo", shutdown_on_close=True, quiet=True) as cluster:
        cluster.wait_for_workers(1)
        assert cluster.get_client().submit(pow, 2, 7).result() == 128, "a program takes over what was restarted twice"
    assert live(queue) == []
