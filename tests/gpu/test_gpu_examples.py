"""The examples with the real libraries on a real GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.fabric.node_gpus import gpus_on_node
from tests.docs.test_examples import run
from tests.gpu.conftest import DRY_RUN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DRY_RUN, reason="the examples run on pretended GPUs in tests/docs")]


@pytest.fixture(autouse=True)
def one_gpu(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs share the first GPU: the queue is configured with four."""
    monkeypatch.setenv("DASK_HPCGPU__LOCAL__JOB_SCRIPT_PROLOGUE", "['export CUDA_VISIBLE_DEVICES=0']")


def test_a_join_with_cudf_a_pool_and_spilling() -> None:
    pytest.importorskip("cudf")
    assert len(run("cudf_join", "--pool", "1GB", "--rows", "4000000").splitlines()) >= 5


def test_an_array_with_cupy() -> None:
    pytest.importorskip("cupy")
    assert "of the variance of 50" in run("cupy_array")


def test_a_model_is_trained_on_a_gpu() -> None:
    """One job: two processes on one GPU cannot use NCCL."""
    pytest.importorskip("xgboost")
    pytest.importorskip("cupy")
    assert "30 rounds" in run("xgboost_train", "--jobs", "1")


def test_a_model_is_trained_on_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgboost")
    pytest.importorskip("cupy")
    if (gpus_on_node() or 0) < 3:
        pytest.skip("this needs three GPUs: two workers, and the scheduler")
    monkeypatch.delenv("DASK_HPCGPU__LOCAL__JOB_SCRIPT_PROLOGUE")
    assert "30 rounds" in run("xgboost_train", "--jobs", "2")
