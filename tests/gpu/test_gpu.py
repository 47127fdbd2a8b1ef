"""On a real GPU: what the other tests can only pretend. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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

#: Two workers and the scheduler on one GPU: the queue is configured with four.
OPTIONS: dict[str, Any] = {
    "gpus_per_node": 1,
    "poll_interval": 0.5,
    "quiet": True,
    "job_script_prologue": ["export CUDA_VISIBLE_DEVICES=0"],
}
MEMORY: dict[str, Any] = {} if DRY_RUN else {"rmm_pool_size": "1GB", "device_memory_limit": "4GB"}


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


def test_workers_have_their_pool_and_report_their_gpu(cluster: LocalGPUCluster, client: Client) -> None:
    told = {"driver", "GPU", "GPU memory"}
    if not DRY_RUN:
        told |= {"CUDA of the driver", "compute capability", "MIG"}
    for worker in cluster.scheduler_info["workers"].values():
        assert told <= worker["hpcgpu"].keys()
    if MEMORY:
        pools = client.run(lambda: type(__import__("rmm").mr.get_current_device_resource()).__name__)
        assert all("Pool" in name or "Adaptor" in name for name in pools.values()), pools


def test_transports_are_reported_and_measured_with_buffers_on_the_gpu(
    cluster: LocalGPUCluster, measured: Measured
) -> None:
    assert cluster.fabric.links and cluster.fabric.transports
    sizes = ["--size", "16MiB", *([] if DRY_RUN else ["--size", "256MiB"])]
    done = hpcgpu("bench-fabric", cluster.name, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    for kind, speeds in zip(("host", "device"), json.loads(done.stdout), strict=True):
        for size, speed in speeds["bandwidth"].items():
            measured(f"{cluster.name}: {kind} memory, {int(size) >> 20} MiB", f"{speed / 2**30:.2f} GiB/s")
        if not (DRY_RUN and kind == "device"):
            assert speeds["bandwidth"]["16777216"] > 0, speeds["error"]


#: dask-cuda's benchmarks, with the module that each needs beyond its table in docs/network.rst, and sizes for a GPU.
BENCHMARKS = {
    "local_cupy": ("nvtx", ["--size", "20000", "--chunk-size", "5000"]),
    "local_cudf_merge": ("dask_cudf", ["--chunk-size", "10_000_000"]),
    "local_cudf_shuffle": ("dask_cudf", ["--partition-size", "64MiB", "--in-parts", "16"]),
    "local_cudf_groupby": ("dask_cudf", ["--chunk-size", "10_000_000", "--in-parts", "8"]),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmarks_of_dask_cuda_run(cluster: LocalGPUCluster, name: str, measured: Measured) -> None:
    module, size = BENCHMARKS[name]
    pytest.importorskip(module)
    if DRY_RUN:
        size = ["--type", "cpu", "--size", "100", "--chunk-size", "50"]
    address = json.loads(hpcgpu("status", cluster.name, "--json").stdout)["scheduler"]
    own = os.environ | {"DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER": "hpcgpu.client.connect.security_for"}
    line = [sys.executable, "-m", f"dask_cuda.benchmarks.{name}", "--scheduler-address", address, "--runs", "3"]
    done = subprocess.run([*line, *size], capture_output=True, text=True, timeout=120, env=own)
    if "Setting a MultiIndex dtype" in done.stderr:
        pytest.xfail("DataFrame.memory_usage of cuDF 26.10.2 fails with pandas 3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Number of workers +\| 2\n", done.stdout), done.stdout
    for what in ("Data processed", "Throughput", "Bandwidth"):
        for found in re.findall(rf"^{what} +\| (.*)$", done.stdout, re.MULTILINE):
            measured(f"{cluster.name}: {name}, {what}", found.strip())


@travels
def is_on_gpu(array: Any) -> bool:
    return type(array).__module__.startswith("cupy")


def test_data_on_the_gpu_is_moved_before_its_job_ends(cluster: LocalGPUCluster, client: Client, until: Until) -> None:
    pytest.importorskip("cupy")
    first, second = cluster.scheduler_info["workers"]
    arrays = [client.submit(on_gpu, 10_000_000 + n, workers=[[first, second][n % 2]], pure=False) for n in range(4)]
    client.gather([client.submit(len, array) for array in arrays], direct=False)
    cluster.scale(jobs=1)
    until(lambda: len(cluster.scheduler_info["workers"]) == 1, "one job is drained and has ended")
    for n, array in enumerate(arrays):
        size = 10_000_000 + n
        assert client.submit(lambda x: int(x.sum()), array).result(timeout=250) == size * (size - 1) // 2
        assert DRY_RUN or client.submit(is_on_gpu, array).result(timeout=250)
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)


@pytest.mark.skipif(DRY_RUN, reason="an imitated GPU has no memory to fill")
def test_more_data_than_a_gpu_may_hold_goes_to_the_host(client: Client) -> None:
    pytest.importorskip("cupy")
    arrays = client.map(on_gpu, [25_000_000 + n for n in range(60)], pure=False)  # 12 GB, on two workers with 4 GB each
    sums = client.gather(client.map(lambda x: int(x.sum()), arrays))
    assert sums == [size * (size - 1) // 2 for size in range(25_000_000, 25_000_060)]


@travels
def takes_too_much() -> None:
    import cupy

    cupy.ones(10**13)


@pytest.mark.skipif(DRY_RUN, reason="an imitated GPU has no memory to fill")
def test_a_task_without_memory_on_the_gpu_fails_and_its_worker_goes_on(
    cluster: LocalGPUCluster, client: Client
) -> None:
    pytest.importorskip("cupy")
    workers = set(cluster.scheduler_info["workers"])
    with pytest.raises(Exception, match=r"(?i)memory"):
        client.submit(takes_too_much, pure=False).result(timeout=250)
    assert client.submit(lambda x: int(x.sum()), client.submit(on_gpu, 4)).result(timeout=250) == 6
    assert set(cluster.scheduler_info["workers"]) == workers


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
def trains_by_ddp(backend: str) -> tuple[list[float], list[float]]:
    """Losses of a few steps with PyTorch's DistributedDataParallel, each rank on its own data, and the last weights."""
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend)
    try:
        torch.manual_seed(int(os.environ["RANK"]))
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
        return losses, model.module.weight.flatten().tolist()
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
        [(losses, _)] = workers.run(trains_by_ddp, "nccl")
        measured(f"{cluster.name}: 20 steps of DDP on one rank", f"{time.monotonic() - began:.1f} s")
    assert losses[-1] < losses[0] / 2


def test_two_held_workers_that_share_a_gpu_train_with_ddp(cluster: LocalGPUCluster, measured: Measured) -> None:
    """Over Gloo, which allows that, other than NCCL; it must find the interface between the ranks too."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo")
    with cluster.hold(2) as workers:
        began = time.monotonic()
        (losses, weights), (other_losses, other_weights) = workers.run(trains_by_ddp, "gloo")
        measured(f"{cluster.name}: 20 steps of DDP on two ranks", f"{time.monotonic() - began:.1f} s")
    assert losses[-1] < losses[0] / 2 and other_losses[-1] < other_losses[0] / 2
    assert weights == other_weights and losses != other_losses, "they learned together, each from its own data"


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
