"""On a real GPU: what the other tests can only pretend. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.software.compare_environments import collect
from tests.helpers import hpcgpu, travels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needed() -> None:
    if collect().get("GPU", "Fake GPU") == "Fake GPU":
        pytest.skip("there is no GPU here (NVML sees none, or one that pretends)")


@pytest.fixture(params=["tcp", "ucx"])
def cluster(
    request: pytest.FixtureRequest, queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalGPUCluster]:
    """Two workers and the scheduler on one GPU: the queue is told that it has three."""
    if request.param == "ucx":
        pytest.importorskip("distributed_ucxx")
    options: dict[str, Any] = {
        "gpus_per_node": 1,
        "protocol": request.param,
        "rmm_pool_size": "1GB",
        "device_memory_limit": "0.2",
        "poll_interval": 0.5,
        "quiet": True,
        "job_script_prologue": ["export CUDA_VISIBLE_DEVICES=0"],
    }
    with LocalGPUCluster(jobs=2, name="real", **options) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


@travels
def on_gpu(n: int) -> Any:
    import cupy

    return cupy.arange(n)


def test_arrays_on_the_gpu_reach_a_client_without_one(
    cluster: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr("hpcgpu.fabric.security._holds_gpu_objects", lambda: False)
    with Client(cluster, set_as_default=False) as client:
        first, second = cluster.scheduler_info["workers"]
        made = client.submit(on_gpu, 1_000_000, workers=[first])
        result = made.result(timeout=250)
        assert type(result) is np.ndarray and result.sum() == 499_999_500_000
        total = client.submit(lambda x: int(x.sum()), made, workers=[second]).result(timeout=250)
        assert total == 499_999_500_000, "it went from worker to worker"
        assert client.submit(sum, [1, 2]).result(timeout=250) == 3


def test_workers_have_their_pool_and_tell_their_gpu(cluster: LocalGPUCluster) -> None:
    for worker in cluster.scheduler_info["workers"].values():
        environment = worker["hpcgpu"]
        assert {"driver", "CUDA of the driver", "compute capability", "GPU", "GPU memory", "MIG"} <= environment.keys()
    with Client(cluster, set_as_default=False) as client:
        pools = client.run(lambda: __import__("rmm").mr.get_current_device_resource_type().__name__)
        assert all("Pool" in name or "Adaptor" in name for name in pools.values()), pools


def test_transports_are_told_and_measured_with_buffers_on_the_gpu(cluster: LocalGPUCluster) -> None:
    assert cluster.fabric.links and cluster.fabric.transports
    done = hpcgpu("bench-fabric", "real", "--size", "16MiB", "--json")
    assert done.returncode == 0, done.stderr
    host, device = json.loads(done.stdout)
    assert host["bandwidth"]["16777216"] > 0 and device["bandwidth"]["16777216"] > 0, device["error"]


def test_check_sees_the_gpu(queue: LocalQueue) -> None:
    done = hpcgpu("check", "--in-job", "--json", "--system", "local", "--gpus-per-node", "1")
    lines = {(line["where"], line["what"]): line for line in json.loads(done.stdout)["lines"]}
    assert lines["worker job", "GPUs"]["grade"] == "ok" and lines["worker job", "driver"]["grade"] == "ok", done.stdout
