"""Corrects the GPU from which dask-cuda reads a worker's CPU affinity and memory limit.

dask-cuda rotates CUDA_VISIBLE_DEVICES so that a worker's own GPU is the first of its list. Then it queries NVML for the
GPU at the worker's index of the rotated list. With four GPUs it uses 0, 2, 0, 2 instead of 0, 1, 2, 3
(``CUDAWorker.__init__`` since dask-cuda #671; in 26.10).
"""

from __future__ import annotations

from typing import Any


def correct_device_index() -> None:
    """Let `CUDAWorker` query the first GPU of a rotated list; any other list is looked up as before."""
    from dask_cuda import cuda_worker

    upstream = cuda_worker.nvml_device_index
    if getattr(upstream, "corrected", False):
        return

    def nvml_device_index(i: int, visible: Any) -> Any:
        return upstream(0 if visible == cuda_worker.cuda_visible_devices(i) else i, visible)

    nvml_device_index.corrected = True  # type: ignore[attr-defined]
    cuda_worker.nvml_device_index = nvml_device_index
