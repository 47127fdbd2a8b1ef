"""Where the data of GPU workers goes when their job drains, and another group has workers without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import told
from tests.helpers import GPU

Until = Callable[..., None]


def workers(client: Client) -> dict[str, Any]:
    """What the scheduler records of its workers, by name."""
    return {
        about["name"]: {**about, "address": address} for address, about in client.scheduler_info()["workers"].items()
    }


def held(client: Client) -> dict[str, int]:
    """Results by name of the worker."""
    has = client.has_what()
    return {name: len(has[about["address"]]) for name, about in workers(client).items()}


@pytest.mark.parametrize("resources", [None, {"FAST": 1}])
def test_data_of_gpu_workers_moves_to_gpu_workers_and_not_to_those_of_a_group_without(
    queue: LocalQueue, fake_gpus: None, home: Path, until: Until, resources: dict[str, float] | None
) -> None:
    with (
        LocalGPUCluster(**GPU | {"gpus_per_node": 1}, jobs=2, resources=resources) as cluster,
        Client(cluster) as client,
    ):
        of_gpus = set(cluster.workers)
        cluster.add_worker_group("cpu", gpus_per_node=0, cores=1, jobs=1)
        cluster.wait_for_workers(3)
        (cpu,) = set(cluster.workers) - of_gpus
        gpus = [about["address"] for name, about in workers(client).items() if name != cpu]
        futures = [client.submit(bytes, 10**6 + i, workers=[gpus[i % 2]], allow_other_workers=True) for i in range(10)]
        assert [len(future.result()) for future in futures] == [10**6 + i for i in range(10)]
        assert held(client)[cpu] == 0
        cluster.scale(jobs=1)
        until(lambda: len(workers(client)) == 2, "one GPU worker drains")
        assert sorted(held(client).values()) == [0, 10] and held(client)[cpu] == 0
        cluster.scale(jobs=0)
        until(lambda: list(workers(client)) == [cpu], "the other one drains")
        assert held(client) == {cpu: 10}, "what is not known to be in GPU memory is saved"


def function() -> Callable[[], Any]:
    """A function of a function, which travels by value: workers cannot import this file."""

    def on_gpu() -> Any:
        """Return an object of a type that is called as CuPy's, and that workers without CuPy can unpickle."""
        return type("ndarray", (), {"__module__": "cupy"})()

    return on_gpu


def test_objects_in_gpu_memory_stay_where_only_workers_without_gpus_are_left(
    queue: LocalQueue, fake_gpus: None, home: Path, until: Until
) -> None:
    with LocalGPUCluster(**GPU | {"gpus_per_node": 1}, jobs=1) as cluster, Client(cluster) as client:
        (gpu,) = cluster.workers
        cluster.add_worker_group("cpu", gpus_per_node=0, cores=1, jobs=1)
        cluster.wait_for_workers(2)
        future = client.submit(function(), workers=[workers(client)[gpu]["address"]], allow_other_workers=True)
        wait(future)
        assert future.status == "finished"
        with told(f"{gpu}.*does not fit on other workers"):
            cluster.scale(jobs=0)
        assert held(client)[gpu] == 1 and sum(held(client).values()) == 1
        future.release()
        cluster.scale(jobs=0)
        until(lambda: gpu not in workers(client), "the job goes once its data is released")
