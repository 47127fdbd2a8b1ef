"""What goes wrong around a block that holds workers: forks, lost workers, lost schedulers, ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import hpcgpu
from hpcgpu import ClusterError, ClusterWarning, LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.dask_worker.run_ranked import free_port
from tests.helpers import GPU, travels

pytestmark = [pytest.mark.usefixtures("fake_gpus")]

Until = Callable[..., None]


@pytest.fixture(scope="module")
def cluster_of_two(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster of one job with two GPUs, which tests leave as it was."""
    with LocalGPUCluster(**GPU, jobs=1) as cluster:
        yield cluster


@travels
def blocks_its_worker(place: str) -> None:
    """A plain function that `Client.run` runs: the worker answers nobody meanwhile."""
    Path(place, "begun").write_text(str(os.getpid()))
    while not Path(place, "go").exists():
        time.sleep(0.1)


@pytest.mark.parametrize("security", [True, "authenticated", False])
def test_a_process_that_was_forked_in_a_block_does_not_keep_its_workers(queue: LocalQueue, security: Any) -> None:
    """As a pool of processes that the program uses after the block too."""
    with LocalGPUCluster(**GPU, jobs=1, security=security) as cluster:
        program = f"""
import os, time
import hpcgpu
client = hpcgpu.connect({cluster.name!r}, quiet=True)
with hpcgpu.hold(client, 2, quiet=True):
    if not (child := os.fork()):
        time.sleep(600)
print("ended", flush=True)
input()
os.kill(child, 9)
"""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        running = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
        try:
            assert running.stdout is not None and running.stdout.readline() == "ended\n"
            with cluster.hold(2, timeout=150) as workers:
                assert len(workers) == 2
        finally:
            running.communicate("\n")


def test_a_worker_that_is_lost_while_the_block_begins_is_replaced_by_another(
    cluster_of_two: LocalGPUCluster, tmp_path: Path, until: Until
) -> None:
    with Client(cluster_of_two) as client, ThreadPoolExecutor(2) as threads:
        client.wait_for_workers(2)
        blocking = threads.submit(client.run, blocks_its_worker, str(tmp_path), workers=[next(iter(client.nthreads()))])
        until((tmp_path / "begun").exists, "the call blocks the worker")

        def hold_both() -> int:
            with cluster_of_two.hold(2, timeout=150) as workers:
                return len(workers.run(os.getpid))

        with pytest.warns(ClusterWarning) as said:
            holding = threads.submit(hold_both)
            until(lambda: any("do not answer" in str(one.message) for one in said) or holding.done(), "it is reported")
            os.kill(int((tmp_path / "begun").read_text()), signal.SIGKILL)
            assert holding.result(timeout=150) == 2
        assert blocking.exception(timeout=150) is not None, "its worker is gone"


def test_workers_of_a_node_have_different_ports(
    cluster_of_two: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = str(tmp_path)

    @travels
    def taken_twice(host: str) -> int:
        asked = len(list(Path(place).iterdir()))
        Path(place, str(time.time_ns())).touch()
        return free_port(host) if asked > 1 else 29500

    monkeypatch.setattr("hpcgpu.client.hold.free_port", taken_twice)
    with cluster_of_two.hold(2, timeout=150) as workers:
        assert workers[0].host == workers[1].host and workers[0].port != workers[1].port


def test_an_error_of_the_block_is_shown_beside_the_loss_of_the_scheduler(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**GPU, jobs=1) as cluster:
        with pytest.raises(ClusterError) as lost, cluster.hold(2, timeout=150) as workers:
            queue.cancel([cluster.jobs[0].id])
            until(lambda: not workers.scheduler, "the loss is noticed")
            raise MemoryError("mine")
        assert isinstance(lost.value.__cause__, MemoryError)


def test_a_block_that_runs_does_not_begin_again(cluster_of_two: LocalGPUCluster) -> None:
    with Client(cluster_of_two) as client:
        block = hpcgpu.hold(client, 1, quiet=True, timeout=150)
        for _ in range(2):
            with block as workers:
                with (
                    pytest.raises(OptionError, match="this block has begun already: call `hold` for each block"),
                    block,
                ):
                    pass
                assert len(workers.run(os.getpid)) == 1
        with hpcgpu.hold(client, 2, quiet=True, timeout=150) as workers:
            assert len(workers) == 2
