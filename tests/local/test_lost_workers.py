"""A running job that has lost some of its workers: what is reported, and that it is replaced, but not for a worker
that comes back.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client
from fake_pbs import Site

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster, PBSGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.display.progress import waiting_for
from tests.conftest import live, told
from tests.helpers import (
    CPU,
    GPU,
    asks_for,
    messages,
    names,
    poll_and_decide,
    time_passes,
    two_of_four_are_missing,
    waits_for_file,
)

Until = Callable[..., None]

FOUR = GPU | {"gpus_per_node": 4}


def lose(client: Client, name: str) -> None:
    """Let a worker and its nanny end, as if both had crashed."""

    async def remove(dask_scheduler: Any) -> None:
        [worker] = [ws for ws in dask_scheduler.workers.values() if str(ws.name) == name]
        await dask_scheduler.remove_worker(worker.address, stimulus_id="test", close=True)

    client.run_on_scheduler(remove)


def cut(client: Client, noticed_by: str) -> None:
    """Break the connections between the scheduler and all workers, as a network does that fails for a moment."""

    async def abort(dask_scheduler: Any) -> None:
        for address, stream in [*dask_scheduler.stream_comms.items()]:
            if noticed_by == "both":
                stream.comm.abort()
            else:  # what the other end sends was lost
                await dask_scheduler.remove_worker(address, stimulus_id="test", close=False)

    client.run_on_scheduler(abort)


def test_a_job_that_loses_one_of_four_workers_reports_it_and_is_replaced(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(name="short", jobs=1, worker_restarts=0, **FOUR) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(4)
        lose(client, "short-0-2")
        until(lambda: names(cluster) == {f"short-0-{i}" for i in (0, 1, 3)}, "a worker is gone")
        words = r"lost 1 of 4 workers \d+ s ago; replaced if it does not come back within \d+ s"
        until(
            lambda: re.fullmatch(words, next(j.reason for j in cluster.jobs if j.kind == "worker")),
            "the table of jobs says so",
        )
        assert re.search(rf"worker job \w+ \(short-0\) {words}", repr(cluster))
        assert re.search(rf"runs on \S+, {words}", waiting_for(job for job in cluster.jobs if job.kind == "worker"))
        with told(r"worker job \w+ \(short-0\) on \S+: lost 1 of 4 workers .*another job takes its place\. Log: "):
            time_passes(cluster, "short-0", until)
        until(lambda: names(cluster) == {f"short-1-{i}" for i in range(4)}, "another job takes its place")
        cluster.wait_for_workers(4)
        assert [job.name for job in cluster.jobs if job.state == "running"] == ["short-scheduler", "short-1"]
    assert live(queue) == []


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.parametrize(
    ("worker_start", "protocol", "noticed_by"),
    [("forkserver", "tls", "both"), ("forkserver", "ucx", "both"), ("spawn", "tls", "the scheduler alone")],
)
def test_workers_whose_connection_breaks_start_again_in_their_job(
    queue: LocalQueue, home: Path, until: Until, worker_start: str, protocol: str, noticed_by: str
) -> None:
    # a crash of the worker would fail its task
    own = {"worker_start": worker_start, "protocol": protocol, "scheduler": {"gpus_per_node": int(protocol == "ucx")}}
    options = GPU | own | {"env": {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}}
    with LocalGPUCluster(name="cut", jobs=1, **options) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        pids, jobs = client.run(os.getpid), live(queue)
        task = client.submit(waits_for_file, str(home))
        until(lambda: any(client.processing().values()), "it runs")
        cut(client, noticed_by)
        until(lambda: not pids.keys() & cluster.scheduler_info["workers"].keys(), "they are gone")
        cluster.wait_for_workers(2)
        assert client.gather(client.map(str, range(4))) == ["0", "1", "2", "3"]
        again = client.run(os.getpid)
        assert len(again) == 2 and not set(again.values()) & set(pids.values()), "new processes"
        assert names(cluster) == {"cut-0-0", "cut-0-1"} and live(queue) == jobs, "in the same job"
        (home / "go").touch()
        task.result()
        [log] = cluster.directory.logs.glob("cut-0*")
        assert "worker cut-0-0 has lost the scheduler, and starts again in this job" in log.read_text()
    assert live(queue) == []


def test_workers_end_with_a_scheduler_that_is_killed(queue: LocalQueue, fake_gpus: None, until: Until) -> None:
    with LocalGPUCluster(name="killed", jobs=1, **GPU) as cluster:
        cluster.wait_for_workers(2)
        cluster.detach()  # no manager cancels the job
    with hpcgpu.connect("killed", quiet=True) as client:
        pid = client.run_on_scheduler(os.getpid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not live(queue), "the workers end, and their job with them")


def test_the_data_of_a_job_that_lost_a_worker_moves_to_the_job_that_replaces_it(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(name="moves", jobs=1, **FOUR | {"gpus_per_node": 2}) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        lose(client, "moves-0-0")
        until(lambda: names(cluster) == {"moves-0-1"}, "a worker is gone")
        held = client.scatter(list(range(6)))
        time_passes(cluster, "moves-0", until)
        until(lambda: names(cluster) == {"moves-1-0", "moves-1-1"}, "it is replaced, once there is room for its data")
        assert client.gather(held) == list(range(6))
        asks_for(cluster, 2, "1 job")
    assert live(queue) == []


def test_a_process_that_crashes_leaves_a_traceback_in_the_log_of_its_job(queue: LocalQueue) -> None:
    def crash() -> None:
        import ctypes

        ctypes.string_at(0)  # as a defect in a GPU library does

    with LocalGPUCluster(**CPU, name="crash", jobs=1) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers()
        with pytest.raises(OSError):
            client.run(crash)
        with told("the scheduler of cluster crash is gone"), pytest.raises(OSError):
            client.run_on_scheduler(crash)
        for log in cluster.directory.logs.iterdir():
            assert re.search(r"Fatal Python error: Segmentation fault\n(.*\n)*.* in crash\n", log.read_text()), log


def test_a_worker_that_its_nanny_restarts_does_not_cost_the_job(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:  # row 17
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}),
        LocalGPUCluster(name="again", jobs=1, **FOUR) as cluster,
        Client(cluster) as client,
    ):
        cluster.wait_for_workers(4)
        pids = client.run(os.getpid)
        [(address, pid)] = list(pids.items())[:1]
        os.kill(pid, signal.SIGKILL)
        until(lambda: address not in cluster.scheduler_info["workers"], "it is gone")
        cluster.wait_for_workers(4)
        assert names(cluster) == {f"again-0-{i}" for i in range(4)}
        assert client.submit(int).result() == 0
        poll_and_decide(cluster)
        assert [job.reason for job in cluster.jobs] == ["", ""]
        assert list(cluster.workers) == ["again-0"] and "lost 1 of 4 workers" not in messages(cluster)


def test_jobs_that_lose_workers_one_after_the_other_are_kept_in_the_end_and_waiting_for_more_fails(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(name="loop", jobs=1, worker_restarts=0, **FOUR) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(4)
        with told("another job takes its place"):
            lose(client, "loop-0-0")
            time_passes(cluster, "loop-0", until)
        until(lambda: names(cluster) == {f"loop-1-{i}" for i in range(4)}, "another job takes its place", timeout=250)
        with told(
            r"\(loop-1\).*lost 1 of 4 workers .* ago; it continues with the others, because a worker job failed; "
            r"it is not replaced"
        ):
            lose(client, "loop-1-3")
            time_passes(cluster, "loop-1", until)
        assert "a worker job failed; it is not replaced" in repr(cluster)
        for _ in range(2):
            with pytest.raises(ClusterError, match="a worker job failed; it is not replaced"):
                cluster.wait_for_workers(4)
        cluster.wait_for_workers(3)
        assert names(cluster) == {f"loop-1-{i}" for i in range(3)}
        cluster.scale(jobs=1)  # asks for it again
    assert live(queue) == []


#: Fails on one node, on all nodes.
FAILS = ["""if [ "${HPCGPU_NODE-}" = 1 ] && [ ! -e "$HOME/healed" ]; then echo "no driver here" >&2; exit 3; fi"""]
ALL_FAIL = [
    'if [ "${HPCGPU_PBS_JOB-}" = all-0 ]; then '
    """echo "no driver on node $HPCGPU_NODE" >&2; exit "$((3 + HPCGPU_NODE))"; fi"""
]


def test_a_job_of_two_nodes_on_one_of_which_the_process_fails_is_reported_and_replaced(
    fake_gpus: None, pbs: Site, until: Until
) -> None:
    with PBSGPUCluster(name="half", jobs=1, nodes_per_job=2, job_script_prologue=FAILS, **GPU) as cluster:
        cluster.wait_for_workers(2)
        assert names(cluster) == {"half-0-0-0", "half-0-0-1"}
        until(lambda: two_of_four_are_missing(cluster), "the table of jobs says so")
        (pbs.home / "healed").touch()
        with told(
            r"on its node 1 .*takes its place(.|\n)*1: no driver here\n1: hpcgpu: node 1 \(\S+\) ended with exit "
            r"status 3"
        ):
            time_passes(cluster, "half-0", until)
        cluster.wait_for_workers(4)
        assert names(cluster) == {f"half-1-{node}-{gpu}" for node in range(2) for gpu in range(2)}
    assert pbs.alive() == {}


def test_a_job_of_two_nodes_all_of_which_fail_has_failed_though_pbsdsh_ends_well(
    fake_gpus: None, pbs: Site, until: Until
) -> None:
    with PBSGPUCluster(name="all", jobs=0, nodes_per_job=2, job_script_prologue=ALL_FAIL, **GPU) as cluster:
        with told(
            r"\(all-0\) failed: it ended with an error, exit code 4 (.|\n)*none of its workers had connected(.|\n)*no "
            r"driver on node"
        ):
            cluster.scale(jobs=1)
            cluster.wait_for_workers(4)
        assert list(cluster.directory.path.glob("ended-*")) == []
    assert pbs.alive() == {}
