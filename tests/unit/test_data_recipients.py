"""Which workers may take the data of one that retires."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcgpu.dask_scheduler.data_recipients import suitable
from hpcgpu.dask_worker.gpu_metrics import GPUS


class Worker(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


GPU, OTHER_GPU, CPU = Worker(extra={GPUS: 2}), Worker(extra={GPUS: 1}), Worker(extra={GPUS: 0})


@pytest.mark.parametrize("kind", ["cupy.ndarray", "cudf.core.dataframe.DataFrame", "numpy.ndarray", "list", None])
def test_data_of_gpu_workers_goes_to_gpu_workers(kind: str | None) -> None:
    assert suitable({OTHER_GPU, CPU}, {GPU}, kind) == {OTHER_GPU}


def test_without_another_gpu_worker_gpu_objects_stay_and_the_rest_moves() -> None:
    for kind in (
        "cupy.ndarray",
        "cudf.core.dataframe.DataFrame",
        "rmm.pylibrmm.device_buffer.DeviceBuffer",
        "torch.Tensor",
    ):
        assert suitable({CPU}, {GPU}, kind) == set()
    for kind in ("numpy.ndarray", "list", "cupyish.Thing", None):
        assert suitable({CPU}, {GPU}, kind) == {CPU}


def test_data_of_workers_without_gpus_goes_anywhere() -> None:
    assert suitable({CPU, GPU}, {CPU}, "numpy.ndarray") == {CPU, GPU}
    foreign = Worker(extra={})
    assert suitable({CPU, foreign}, {foreign}, "numpy.ndarray") == {CPU, foreign}
