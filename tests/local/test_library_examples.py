"""The examples of docs/libraries.rst, as they stand there, with packages that stand in for the libraries on CPUs.

They run on three of four workers. The stand-ins note which processes took part, and with which rank and GPU. They fail
if two ranks are the same or share a GPU, and if the place where they are to meet is not that of the first rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, wait

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.docs.test_docs import ROOT, blocks
from tests.helpers import GPU, travels

pytestmark = pytest.mark.usefixtures("fake_gpus")

#: The examples, by the library that each needs.
EXAMPLES = {
    how.split()[1]: text for _, how, text in blocks(ROOT / "docs" / "libraries.rst") if how.startswith("needs ")
}
HELD = 3


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue, fake_gpus: None, stand_ins: list[Path]) -> Iterator[LocalGPUCluster]:
    """Two jobs of two GPUs, with the stand-ins on workers and scheduler."""
    pytest.importorskip("pyarrow")
    with LocalGPUCluster(**GPU, jobs=2) as cluster:
        cluster.wait_for_workers(4)
        for package in stand_ins:
            cluster.upload_package(package)
        yield cluster


@pytest.fixture
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.run(forget)
        yield client


@travels
def forget() -> None:
    import meeting

    meeting.took_part.clear()


@travels
def took_part() -> list[tuple[str, int, int, str]]:
    import meeting

    return list(meeting.took_part)


def ran(client: Client) -> dict[str, list[tuple[str, int, int, str]]]:
    """What the stand-ins noted in the workers that took part, by their addresses."""
    return {address: noted for address, noted in client.run(took_part).items() if noted}


def run(library: str, **given: Any) -> dict[str, Any]:
    """Run an example on as many workers as these tests hold; return its names."""
    text = EXAMPLES[library]
    assert text.count("cluster.hold(8)") == 1
    names = {"__name__": "__main__", **given}
    exec(text.replace("hold(8)", f"hold({HELD})"), names)
    return names


def check_ranks(client: Client, names: dict[str, Any], library: str) -> None:
    """Just the held workers took part, once, each with its rank and a GPU of its own."""
    noted, ranks = ran(client), {worker.address: worker.rank for worker in names["workers"]}
    assert noted.keys() == ranks.keys()
    assert {one[::2] for [one] in noted.values()} == {(library, HELD)}
    found = {address: rank for address, [(_, rank, _, _)] in noted.items()}
    assert found == ranks or (library == "raft_dask" and sorted(found.values()) == sorted(ranks.values()))
    assert len({gpu for [(_, _, _, gpu)] in noted.values()}) == HELD


@pytest.fixture
def files(tmp_path: Path) -> str:
    import pandas

    for part in range(6):
        frame = pandas.DataFrame({"shop": [1, 2, 1, part], "price": [2.0, 3.0, 4.0, 100.0]})
        frame.to_parquet(tmp_path / f"{part}.parquet")
    return str(tmp_path / "*.parquet")


#: The sum of the prices of each shop.
SUMS = {0: 100.0, 1: 136.0, 2: 118.0, 3: 100.0, 4: 100.0, 5: 100.0}


@pytest.mark.shows("cudf-polars on held workers: the example, with what stands in for it on CPUs")
def test_the_example_of_polars(cluster: LocalGPUCluster, client: Client, files: str) -> None:
    found = run("cudf_polars", cluster=cluster, files=files)
    assert dict(found["result"].rows()) == SUMS
    check_ranks(client, found, "cudf_polars")
    assert not re.search("--rmm-|--enable-", cluster.job_script()), "the page says that hpcgpu sets none by itself"


@pytest.mark.shows("cuML on held workers: the example, with what stands in for it and for RAFT on CPUs")
def test_the_example_of_cuml(cluster: LocalGPUCluster, client: Client) -> None:
    import dask.array
    import numpy

    rows = 100.0 * (numpy.arange(1200)[:, None] % 10) + numpy.random.default_rng(0).random((1200, 3))
    found = run("cuml", cluster=cluster, points=dask.array.from_array(rows, chunks=(100, 3)))
    assert numpy.allclose(found["model"].cluster_centers_, [rows[n::10].mean(axis=0) for n in range(10)])
    check_ranks(client, found, "raft_dask")


def test_data_that_others_have_comes_to_the_held_workers_as_the_page_promises(
    cluster: LocalGPUCluster, client: Client
) -> None:
    xgboost = pytest.importorskip("xgboost.dask", reason="xgboost-cpu is not installed")
    import dask.array

    [line] = re.findall(r"^   (points = .*)$", (ROOT / "docs" / "libraries.rst").read_text(), re.MULTILINE)
    with cluster.hold(HELD) as workers:
        held = {*workers.addresses}
        [other] = client.scheduler_info()["workers"].keys() - held
        points = client.persist(dask.array.random.random((800, 3), chunks=(100, 3)), workers=[other])
        wait(points)
        data = xgboost.DaskQuantileDMatrix(workers.client, points, points.sum(axis=1))
        assert data.worker_map and data.worker_map.keys() <= held
        names = {"points": points, "workers": workers}
        exec(line, names)
        wait(names["points"])
        places = client.who_has(names["points"]).values()
        assert {address for found in places for address in found} <= held


@pytest.mark.shows("RAFT on held workers: the example, with what stands in for it on CPUs")
def test_the_example_of_raft(cluster: LocalGPUCluster, client: Client) -> None:
    found = run("raft_dask", cluster=cluster)
    check_ranks(client, found, "raft_dask")


@pytest.mark.shows("PyTorch DDP on held workers: the example, with what stands in for PyTorch on CPUs")
def test_the_example_of_pytorch(cluster: LocalGPUCluster, client: Client) -> None:
    found = run("torch", cluster=cluster)
    assert found["biases"] == HELD * [found["biases"][0]], "all ranks begin and go on with the same parameters"
    check_ranks(client, found, "torch")


@travels
def train_on_device_of_local_rank(first_line: str) -> list[str]:
    """What Accelerate, DeepSpeed and Lightning do, after what the page lets users do before."""
    import torch
    import torch.distributed as dist

    exec(first_line)
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    dist.init_process_group("nccl", device_id=torch.device(device))
    try:
        return [os.environ["LOCAL_RANK"], *dist.exchange(os.environ["CUDA_VISIBLE_DEVICES"], device)]
    finally:
        dist.destroy_process_group()


def test_device_0_of_each_rank_is_its_own_gpu_and_the_device_of_its_local_rank_is_not(cluster: LocalGPUCluster) -> None:
    page = (ROOT / "docs" / "libraries.rst").read_text()
    first_line = 'os.environ["LOCAL_RANK"] = "0"'
    assert f"`{first_line}`" in page
    with cluster.hold(2) as workers:
        assert len({worker.job for worker in workers}) == 1
        with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
            workers.run(train_on_device_of_local_rank, "")
    with cluster.hold(4) as workers:
        answers = workers.run(train_on_device_of_local_rank, first_line)
        assert {local_rank for local_rank, *_ in answers} == {"0"}
        visible = answers[0][1:]
        assert len({gpus.split(",")[0] for gpus in visible}) == 4 and {len(gpus.split(",")) for gpus in visible} == {2}
        restored = workers.run(travels(lambda: os.environ["LOCAL_RANK"]))
        assert restored == [str(worker.local_rank) for worker in workers], "hpcgpu restores it"


@pytest.mark.shows("CuPy with NCCL on held workers: the example, with what stands in for both on CPUs")
def test_the_example_of_cupy_with_nccl_adds_over_the_ranks(cluster: LocalGPUCluster) -> None:
    """The stand-in meets on the interface that NCCL_SOCKET_IFNAME names."""
    found = run("cupy", cluster=cluster)
    assert [total.tolist() for total in found["sums"]] == HELD * [4 * [float(HELD)]]


@pytest.mark.shows("cuDF by dask-expr on held workers: the example and a join, with pandas in its place")
def test_the_example_of_cudf(cluster: LocalGPUCluster, client: Client, files: str) -> None:
    with dask.config.set({"dataframe.backend": "pandas"}):  # the example sets it for good
        found = run("cudf", cluster=cluster, files=files)
    assert dict(found["result"]) == SUMS
    assert ran(client).keys() <= {*found["workers"].addresses} and ran(client)
