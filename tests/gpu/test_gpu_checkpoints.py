"""Results on a real GPU are saved, and are there again on the GPU after their scheduler has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import told
from tests.gpu.conftest import DRY_RUN, Measured
from tests.gpu.test_gpu import MEMORY, OPTIONS, Until, is_on_gpu, on_gpu
from tests.helpers import travels

pytestmark = pytest.mark.gpu

#: Numbers in each result: 8 results of 256 MB on a real GPU.
NUMBERS = 1000 if DRY_RUN else 32_000_000
PIECES = 8


@pytest.fixture(scope="module", params=["ucx", "tcp"])
def cluster(
    request: pytest.FixtureRequest, shared_queue: LocalQueue, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalGPUCluster]:
    """A cluster whose scheduler is restarted: forked workers over UCX, spawned ones over TCP."""
    if request.param == "ucx":
        pytest.importorskip("distributed_ucxx")
    options = OPTIONS | MEMORY | {"protocol": request.param, "checkpoint_directory": tmp_path_factory.mktemp("saved")}
    options["worker_start"] = "forkserver" if request.param == "ucx" else "spawn"
    with LocalGPUCluster(jobs=2, name=f"kept-{request.param}", on_scheduler_end="restart", **options) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


def seconds_of_dd(directory: Path, size: int) -> float:
    """Return how long two programs take that write so many bytes together, and wait until the disk has them."""
    line = ["dd", "if=/dev/zero", "bs=1M", f"count={size // 2 // 2**20}", "conv=fsync"]
    began = time.monotonic()
    writers = [subprocess.Popen([*line, f"of={directory / name}"], stderr=subprocess.DEVNULL) for name in ("a", "b")]
    assert [writer.wait(timeout=250) for writer in writers] == [0, 0]
    taken = time.monotonic() - began
    for name in ("a", "b"):
        (directory / name).unlink()
    return taken


@travels
def copied_to_host(array: Any) -> Any:
    import cupy

    return cupy.asnumpy(array)


@travels
def seconds_of_copy(array: Any) -> float:
    import time

    import cupy

    began = time.perf_counter()
    cupy.asnumpy(array)
    return time.perf_counter() - began


def test_arrays_on_the_gpu_are_saved_and_are_on_the_gpu_again(
    cluster: LocalGPUCluster, client: Client, measured: Measured, tmp_path: Path
) -> None:
    pytest.importorskip("cupy")
    arrays = client.map(on_gpu, [NUMBERS + n for n in range(PIECES)], pure=False)
    client.gather(client.map(len, arrays))
    size = 8 * NUMBERS * PIECES
    began = time.monotonic()
    cluster.checkpoint(arrays, name="arrays", path=tmp_path)
    saved = time.monotonic() - began
    if not DRY_RUN:
        measured(f"{cluster.name}: {size / 2**30:.1f} GiB of CuPy arrays, saved", f"{saved:.1f} s")
        measured(f"{cluster.name}: two dd write as much, with fsync", f"{seconds_of_dd(tmp_path, size):.1f} s")
        began = time.monotonic()
        cluster.checkpoint(arrays, name="again", path=tmp_path)
        measured(f"{cluster.name}: the same, saved under another name", f"{time.monotonic() - began:.1f} s")
        in_host_memory = client.map(copied_to_host, arrays)
        taken = max(client.gather([client.submit(seconds_of_copy, array, pure=False) for array in arrays[:2]]))
        measured(f"{cluster.name}: a copy of one of them from the GPU", f"{taken:.2f} s")
        client.gather(client.map(len, in_host_memory))
        began = time.monotonic()
        cluster.checkpoint(in_host_memory, name="host", path=tmp_path)
        measured(f"{cluster.name}: the same as NumPy arrays, saved", f"{time.monotonic() - began:.1f} s")
        measured(f"{cluster.name}: two dd write as much, with fsync", f"{seconds_of_dd(tmp_path, size):.1f} s")
    del arrays
    began = time.monotonic()
    again = cluster.restore("arrays", path=tmp_path)
    total = client.gather(client.map(lambda x: int(x.sum()), again))
    measured(f"{cluster.name}: restored and added", f"{time.monotonic() - began:.1f} s")
    assert total == [n * (n - 1) // 2 for n in range(NUMBERS, NUMBERS + PIECES)]
    assert DRY_RUN or all(client.gather(client.map(is_on_gpu, again)))


@travels
def tensor_on_gpu() -> Any:
    """A state of a model as PyTorch programs keep it."""
    import torch

    model = torch.nn.Linear(8, 4).to("cuda")
    torch.nn.init.constant_(model.weight, 2.0)
    return {"weights": model.state_dict(), "step": torch.ones(3, device="cuda"), "model": model}


@travels
def told_of_tensors(state: Any) -> list[Any]:
    weight = state["weights"]["weight"]
    return [str(weight.device), float(weight.sum()), float(state["step"].sum()), state["model"].weight.requires_grad]


@pytest.mark.skipif(DRY_RUN, reason="PyTorch has no imitation")
def test_tensors_on_the_gpu_are_saved_and_are_on_the_gpu_again(cluster: LocalGPUCluster, client: Client) -> None:
    pytest.importorskip("torch")
    state = client.submit(tensor_on_gpu, pure=False)
    cluster.checkpoint(state, name="model")
    del state
    assert client.submit(told_of_tensors, cluster.restore("model")).result() == ["cuda:0", 64.0, 3.0, True]


@travels
def frame_on_gpu(rows: int) -> Any:
    import cudf

    return cudf.DataFrame({"number": range(rows), "name": [f"row {n}" for n in range(rows)]})


@travels
def told_of_frame(frame: Any) -> tuple[str, int, str]:
    return type(frame).__module__.split(".")[0], int(frame["number"].sum()), str(frame["name"].iloc[-1])


@pytest.mark.skipif(DRY_RUN, reason="cuDF has no imitation")
def test_a_frame_on_the_gpu_is_saved_and_is_on_the_gpu_again(cluster: LocalGPUCluster, client: Client) -> None:
    pytest.importorskip("cudf")
    dask_cudf = pytest.importorskip("dask_cudf")
    frame = client.submit(frame_on_gpu, 1000, pure=False)
    table = client.persist(dask_cudf.from_cudf(frame_on_gpu(1000), npartitions=4))
    cluster.checkpoint({"frame": frame, "table": table}, name="frame")
    del frame
    again = cluster.restore("frame")
    assert client.submit(told_of_frame, again["frame"]).result() == ("cudf", 499_500, "row 999")
    assert int(client.compute(again["table"]["number"].sum()).result()) == 499_500


def worker_jobs(cluster: LocalGPUCluster) -> set[str]:
    return {job.id for job in cluster.jobs if job.kind == "worker" and job.state == "running"}


def memory_used() -> int:
    """Bytes of the GPU that any process uses."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def test_published_arrays_on_the_gpu_outlive_their_scheduler(
    cluster: LocalGPUCluster, client: Client, measured: Measured
) -> None:
    pytest.importorskip("cupy")
    arrays = client.map(on_gpu, [NUMBERS + n for n in range(PIECES)], pure=False)
    client.publish_dataset(kept=arrays)
    cluster.checkpoint(arrays, name="kept")
    del arrays
    workers = worker_jobs(cluster)
    before = 0 if DRY_RUN else memory_used()
    began = time.monotonic()
    with told("published datasets that were saved"):
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
        cluster.wait_for_workers(2)
        measured(f"{cluster.name}: scheduler killed, all workers again", f"{time.monotonic() - began:.1f} s")
    again = client.get_dataset("kept")
    total = client.gather(client.map(lambda x: int(x.sum()), again))
    measured(f"{cluster.name}: ... and the arrays on the GPU", f"{time.monotonic() - began:.1f} s")
    assert total == [n * (n - 1) // 2 for n in range(NUMBERS, NUMBERS + PIECES)]
    assert DRY_RUN or all(client.gather(client.map(is_on_gpu, again)))
    assert worker_jobs(cluster) == workers, "their jobs go on"
    if not DRY_RUN:
        left = memory_used() - before
        measured(f"{cluster.name}: memory of the GPU, more than before", f"{left / 2**20:.0f} MiB")
        assert left < 2**30, "the workers of the old scheduler hold no memory of the GPU"


@travels
def total_of(array: Any) -> int:
    return int(array.sum())


def test_held_arrays_are_computed_on_the_gpu_again(
    cluster: LocalGPUCluster, client: Client, measured: Measured, until: Until
) -> None:
    pytest.importorskip("cupy")
    expected = [n * (n - 1) // 2 for n in range(NUMBERS, NUMBERS + PIECES)]
    with cluster.replay():
        arrays = client.map(on_gpu, [NUMBERS + n for n in range(PIECES)])
        totals = client.map(total_of, arrays)
        assert client.gather(totals) == expected
        began, address = time.monotonic(), client.scheduler.address
        with told("is gone and another one is started"):
            os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
            until(lambda: client.scheduler.address != address, "there is another scheduler")
        assert client.gather(totals) == expected
        measured(f"{cluster.name}: scheduler killed, all computed again", f"{time.monotonic() - began:.1f} s")
        assert DRY_RUN or all(client.gather(client.map(is_on_gpu, arrays)))
