"""The examples of docs/libraries.rst on real GPUs. Skipped, with the reason, without GPU or library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.fabric.node_gpus import gpus_on_node
from tests.docs.test_docs import ROOT, blocks
from tests.gpu.conftest import DRY_RUN
from tests.gpu.test_gpu import OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DRY_RUN, reason="these libraries have no imitation")]

#: The examples, by the library that each needs.
EXAMPLES = {
    how.split()[1]: text for _, how, text in blocks(ROOT / "docs" / "libraries.rst") if how.startswith("needs ")
}


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """Two workers and the scheduler on three GPUs, or one worker: two on one GPU cannot use NCCL."""
    enough = (gpus_on_node() or 0) >= 3
    options = {"gpus_per_node": 2} if enough else OPTIONS
    with LocalGPUCluster(jobs=1, **options) as cluster:
        yield cluster


@pytest.fixture
def names(cluster: LocalGPUCluster, tmp_path: Path) -> dict[str, Any]:
    return needed(cluster, tmp_path)


def needed(cluster: LocalGPUCluster, tmp_path: Path) -> dict[str, Any]:
    """What the examples use and do not define."""
    import dask.array
    import pandas

    frame = pandas.DataFrame({"shop": [1, 2, 1], "price": [2.0, 3.0, 4.0]})
    frame.to_parquet(tmp_path / "sales.parquet")
    client = cluster.get_client()
    try:
        import cupy
    except ImportError:
        points = None
    else:
        points = dask.array.from_array(cupy.random.random((1000, 3)), chunks=(500, 3))
    return {
        "__name__": "__main__",
        "cluster": cluster,
        "client": client,
        "files": str(tmp_path / "*"),
        "points": points,
    }


def run(library: str, names: dict[str, Any], jobs: int = 1) -> dict[str, Any]:
    """Run an example with as many workers as there are; return its names."""
    pytest.importorskip(library)
    workers = jobs * names["cluster"].options.worker.workers_per_job
    exec(EXAMPLES[library].replace("hold(8)", f"hold({workers})"), names)
    return names


def test_a_query_of_polars(names: dict[str, Any]) -> None:
    assert sorted(run("cudf_polars", names)["result"].rows()) == [(1, 6.0), (2, 3.0)]


def test_a_query_of_polars_on_two_workers_that_share_a_gpu(
    shared_queue: LocalQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They exchange rows over UCX: other than NCCL, it allows that, if the engine is configured so."""
    pytest.importorskip("cudf_polars")
    shared = EXAMPLES["cudf_polars"].replace("engine_options={", 'engine_options={"allow_gpu_sharing": True, ')
    monkeypatch.setitem(EXAMPLES, "cudf_polars", shared)
    with LocalGPUCluster(jobs=2, name="polars", **OPTIONS) as cluster:
        found = run("cudf_polars", needed(cluster, tmp_path), jobs=2)
        assert sorted(found["result"].rows()) == [(1, 6.0), (2, 3.0)]


def test_a_model_of_cuml(names: dict[str, Any]) -> None:
    assert len(run("cuml", names)["model"].cluster_centers_) == 10


def test_a_communicator_of_raft(names: dict[str, Any]) -> None:
    run("raft_dask", names)


def test_a_training_with_pytorch(names: dict[str, Any]) -> None:
    biases = run("torch", names)["biases"]
    assert biases == len(names["workers"]) * [biases[0]]


def test_a_sum_with_nccl(names: dict[str, Any]) -> None:
    found = run("cupy", names)
    assert [sums.tolist() for sums in found["sums"]] == len(found["workers"]) * [4 * [len(found["workers"])]]


def test_a_table_of_cudf(names: dict[str, Any]) -> None:
    assert run("cudf", names)["result"].to_pandas().to_dict() == {1: 6.0, 2: 3.0}
