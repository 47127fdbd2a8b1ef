"""What hpcgpu relies on in dask-cuda: each test runs its `CUDAWorker` up to where it would start processes."""

from __future__ import annotations

from typing import Any

import pytest
from canary import canary

from hpcgpu.configuration.resolve import resolve
from hpcgpu.runtime import cpu_affinity
from hpcgpu.scaling.worker_names import workers_of


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the workers that `CUDAWorker` would start."""
    from dask_cuda import cuda_worker

    found: list[dict[str, Any]] = []

    def plugins(*arguments: Any, device_index: Any, **named: Any) -> list[Any]:
        found.append({"affinity": device_index})
        return []

    def worker(*arguments: Any, name: str, data: Any, **named: Any) -> None:
        found[-1] |= {"name": name, "memory": data}

    if hasattr(cuda_worker, "nvml_device_index"):  # else the canary reports it
        monkeypatch.setattr(cuda_worker, "nvml_device_index", cuda_worker.nvml_device_index)
    monkeypatch.setattr(cuda_worker, "Nanny", worker)
    monkeypatch.setattr(cuda_worker, "worker_plugins", plugins)
    monkeypatch.setattr(cuda_worker, "worker_data_function", lambda **named: lambda device: device)
    monkeypatch.setattr(cuda_worker, "initialize", lambda *arguments, **named: None)
    monkeypatch.setattr(cuda_worker, "enable_proctitle_on_current", lambda: None)
    monkeypatch.setattr(cuda_worker, "enable_proctitle_on_children", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("RAPIDS_NO_INITIALIZE", "True")
    return found


def start() -> None:
    from dask_cuda.cuda_worker import CUDAWorker

    CUDAWorker("tcp://127.0.0.1:1", name="demo-3", memory_limit="1 GiB")


@canary
def test_dask_cuda_takes_the_wrong_gpu_by_the_function_that_hpcgpu_replaces(made: list[dict[str, Any]]) -> None:
    start()
    wrong = [worker["affinity"] for worker in made]
    assert wrong == [4, 6, 4, 6], (
        f"dask-cuda takes the GPUs {wrong} of 4, 5, 6, 7: if it is right, remove hpcgpu/runtime/cpu_affinity.py"
    )
    made.clear()
    cpu_affinity.correct_device_index()
    start()
    for what in ("affinity", "memory"):
        assert [worker[what] for worker in made] == [4, 5, 6, 7], (
            f"nvml_device_index is not asked for the {what} of a worker"
        )


@canary
def test_dask_cuda_names_workers_by_job_and_gpu(made: list[dict[str, Any]]) -> None:
    start()
    options = resolve("slurm", {"gpus_per_node": 4}).worker
    assert [worker["name"] for worker in made] == workers_of("demo-3", options), (
        "the name of a worker is not the job's with the GPU's suffix"
    )
