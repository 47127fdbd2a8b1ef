"""On a real GPU: what the other tests can only pretend. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.gpu.conftest import DRY_RUN, Measured
from tests.helpers import hpcgpu, travels

pytestmark = pytest.mark.gpu

Until = Callable[..., None]

#: Two workers and the scheduler on one GPU: the queue is told that it has four.
OPTIONS: dict[str, Any] = {
    "gpus_per_node": 1,
    "poll_interval": 0.5,
    "quiet": True,
    "job_script_prologue": ["export CUDA_VISIBLE_DEVICES=0"],
}
MEMORY: dict[str, Any] = {} if DRY_RUN else {"rmm_pool_size": "1GB", "device_memory_limit": "0.2"}


@pytest.fixture(scope="module", params=["ucx", "tcp"])
def cluster(request: pytest.FixtureRequest, shared_queue: LocalQueue, measured: Measured) -> Iterator[LocalGPUCluster]:
    """A cluster that the tests of this module share."""
    if request.param == "ucx":
        pytest.importorskip("distributed_ucxx")
    began = time.monotonic()
    with LocalGPUCluster(jobs=2, name=f"real-{request.param}", protocol=request.param, **OPTIONS, **MEMORY) as cluster:
        cluster.wait_for_workers(2)
        measured(f"{request.param}: scheduler and two workers on one GPU", f"{time.monotonic() - began:.1f} s")
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


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


def test_workers_have_their_pool_and_tell_their_gpu(cluster: LocalGPUCluster, client: Client) -> None:
    told = {"driver", "GPU", "GPU memory"}
    if not DRY_RUN:
        told |= {"CUDA of the driver", "compute capability", "MIG"}
    for worker in cluster.scheduler_info["workers"].values():
        assert told <= worker["hpcgpu"].keys()
    if MEMORY:
        pools = client.run(lambda: __import__("rmm").mr.get_current_device_resource_type().__name__)
        assert all("Pool" in name or "Adaptor" in name for name in pools.values()), pools


def test_transports_are_told_and_measured_with_buffers_on_the_gpu(cluster: LocalGPUCluster, measured: Measured) -> None:
    assert cluster.fabric.links and cluster.fabric.transports
    sizes = ["--size", "16MiB", *([] if DRY_RUN else ["--size", "256MiB"])]
    done = hpcgpu("bench-fabric", cluster.name, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    for kind, speeds in zip(("host", "device"), json.loads(done.stdout), strict=True):
        for size, speed in speeds["bandwidth"].items():
            measured(f"{cluster.name}: {kind} memory, {int(size) >> 20} MiB", f"{speed / 2**30:.2f} GiB/s")
        if not (DRY_RUN and kind == "device"):
            assert speeds["bandwidth"]["16777216"] > 0, speeds["error"]


@travels
def works(seconds: float) -> float:
    """Multiply matrices for so long."""
    import cupy

    end, total = time.monotonic() + seconds, 0.0
    matrix = cupy.ones((1000, 1000))
    while time.monotonic() < end:
        total += float((matrix @ matrix)[0, 0])
    return total


def test_readings_of_the_gpu_are_shown_while_it_works_and_are_in_the_report(
    cluster: LocalGPUCluster, client: Client, until: Until
) -> None:
    pytest.importorskip("cupy")
    work = client.map(works, [0.1 if DRY_RUN else 8.0] * 2, pure=False)
    if not DRY_RUN:  # an imitated GPU is never at work
        until(lambda: any(device.utilization for device in cluster.snapshot().devices), "the GPU is seen at work")
    for device in cluster.snapshot().devices:
        assert device.memory_total and device.memory_total > 2**30
        assert device.memory_used and device.power is not None and device.model
    assert len(client.gather(work)) == 2

    def bill() -> list[dict[str, Any]]:
        done = hpcgpu("report", cluster.name, "--json")
        assert done.returncode == 0, done.stderr
        return [job for job in json.loads(done.stdout)["jobs"] if job["kind"] == "worker"]

    until(lambda: all(job["memory_peak"] for job in bill()), "the report has the memory of the GPU")
    if not DRY_RUN:
        until(lambda: any((job["utilization_peak"] or 0) > 0 for job in bill()), "the report has its use")


@travels
def adds_by_cupy() -> tuple[int, float]:
    import os

    import cupy

    return int(os.environ["RANK"]), float(cupy.arange(1000.0).sum())


@travels
def all_reduce_by_nccl() -> float:
    """The sum over one rank: two ranks on one GPU cannot use NCCL."""
    import cupy
    from cupy.cuda import nccl

    own = cupy.arange(1000.0)
    total = cupy.zeros_like(own)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.Stream.null
    communicator.allReduce(own.data.ptr, total.data.ptr, own.size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.ptr)
    stream.synchronize()
    return float(total.sum())


@travels
def trains_by_ddp() -> list[float]:
    """Losses of a few steps with PyTorch's DistributedDataParallel over NCCL, on one rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl")
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(8, 1).to("cuda:0"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        inputs = torch.randn(256, 8, device="cuda:0")
        wanted = inputs.sum(dim=1, keepdim=True)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses
    finally:
        dist.destroy_process_group()


def test_held_workers_compute_with_cupy(cluster: LocalGPUCluster) -> None:
    pytest.importorskip("cupy")
    with cluster.hold(2) as workers:
        assert workers.run(adds_by_cupy) == [(0, 499_500.0), (1, 499_500.0)]


def test_a_held_worker_reduces_with_nccl(cluster: LocalGPUCluster) -> None:
    pytest.importorskip("cupy.cuda.nccl", exc_type=ImportError)
    with cluster.hold(1) as workers:
        assert workers.run(all_reduce_by_nccl) == [499_500.0]


def test_a_held_worker_trains_with_ddp(cluster: LocalGPUCluster, measured: Measured) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    with cluster.hold(1) as workers:
        began = time.monotonic()
        [losses] = workers.run(trains_by_ddp)
        measured(f"{cluster.name}: 20 steps of DDP on one rank", f"{time.monotonic() - began:.1f} s")
    assert losses[-1] < losses[0] / 2


@travels
def works_in_fork() -> bool:
    """Use the GPU; return whether this worker is a fork."""
    from multiprocessing import forkserver

    import cupy

    assert float(cupy.ones((1000, 1000)).sum()) == 1e6
    return forkserver.get_inherited_fds() is not None


@pytest.mark.parametrize("worker_start", ["forkserver", "spawn"])
def test_workers_that_are_forked_or_spawned_compute_on_the_gpu(
    queue: LocalQueue, worker_start: str, measured: Measured
) -> None:
    pytest.importorskip("cupy")
    with LocalGPUCluster(name="start", protocol="tcp", worker_start=worker_start, **OPTIONS) as cluster:
        began = time.monotonic()
        cluster.scale(jobs=1)
        cluster.wait_for_workers(1)
        measured(f"first worker, {worker_start}", f"{time.monotonic() - began:.1f} s")
        with Client(cluster, set_as_default=False) as client:
            assert client.submit(works_in_fork).result(timeout=250) is (worker_start == "forkserver")


def test_check_sees_the_gpu(queue: LocalQueue) -> None:
    done = hpcgpu("check", "--in-job", "--json", "--system", "local", "--gpus-per-node", "1")
    lines = {(line["where"], line["what"]): line for line in json.loads(done.stdout)["lines"]}
    assert lines["worker job", "GPUs"]["grade"] == "ok" and lines["worker job", "driver"]["grade"] == "ok", done.stdout
