"""What libraries that make a communicator need of held workers; test_library_examples.py has the examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, get_worker, wait

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import ADAPT, GPU, travels, waits_for_file

pytestmark = pytest.mark.usefixtures("fake_gpus")

Until = Callable[..., None]


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue, fake_gpus: None, stand_ins: list[Path]) -> Iterator[LocalGPUCluster]:
    """A cluster whose workers may start processes. Each test sets its size first: at most two jobs of two GPUs."""
    with LocalGPUCluster(**GPU, env={"DASK_DISTRIBUTED__WORKER__DAEMON": "False"}) as cluster:
        for package in stand_ins:
            cluster.upload_package(package)
        yield cluster


@pytest.fixture
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@travels
def total(group: Any, own: int) -> int:
    """What a query does on each rank."""
    return sum(group.exchange(own))


@pytest.mark.shows("cudf-polars on held workers: the example, with what stands in for it on CPUs")
def test_an_engine_that_takes_all_workers_of_a_client_keeps_the_held_ones_while_the_cluster_grows(
    cluster: LocalGPUCluster, client: Client
) -> None:
    from cudf_polars.engine.dask import DaskEngine

    cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
    with cluster.hold(2) as workers:
        assert isinstance(workers.client, Client)
        ours, plain = DaskEngine(dask_client=workers.client), DaskEngine(dask_client=client)
        assert ours.nranks == plain.nranks == 2 and plain.evaluate(total, 4) == [8, 8]
        with hpcgpu.hold(client, 2):  # the cluster grows for another program
            assert ours.evaluate(total, 5) == [10, 10]
            with pytest.raises(AttributeError, match=plain.attribute):
                plain.evaluate(total, 5)
            assert list(workers.client.scheduler_info()["workers"]) == workers.addresses
            assert len(client.scheduler_info()["workers"]) == 4
        ours.shutdown()
    with pytest.raises(ClusterError, match="the block that held these workers has ended"):
        ours.evaluate(total, 5)


@pytest.mark.shows("cuDF by dask-expr on held workers: the example and a join, with pandas in its place")
def test_tables_are_joined_on_the_held_workers(cluster: LocalGPUCluster, client: Client) -> None:
    pytest.importorskip("pyarrow")
    import dask.dataframe as dd
    import pandas as pd

    cluster.scale(jobs=2)
    client.wait_for_workers(4)
    with hpcgpu.hold(client, 2) as workers:
        sales = dd.from_pandas(pd.DataFrame({"shop": [i % 7 for i in range(700)], "price": 1.0}), npartitions=6)
        shops = dd.from_pandas(pd.DataFrame({"shop": range(7), "city": list("abcdefg")}), npartitions=3)
        joined = workers.client.persist(sales.merge(shops, on="shop", shuffle_method="p2p"))
        wait(joined)
        places = {address for found in client.who_has(joined).values() for address in found}
        assert places == set(workers.addresses)
        assert workers.client.compute(joined.groupby("city").price.sum()).result().to_dict() == dict.fromkeys(
            "abcdefg", 100.0
        )


@travels
def in_a_process_of_its_own() -> int:
    """What a loader of data with processes does in each rank."""
    import multiprocessing

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: sender.send(int(os.environ["RANK"])))
    process.start()
    process.join()
    return int(receiver.recv())


@pytest.mark.shows("Held workers that start processes, as a `DataLoader` of PyTorch does")
def test_ranks_may_start_processes(cluster: LocalGPUCluster) -> None:
    cluster.scale(jobs=2)
    with cluster.hold(2) as workers:
        assert workers.run(in_a_process_of_its_own) == [0, 1]
        files = travels(lambda dask_worker: os.path.isdir(dask_worker.local_directory))
        assert workers.run(files) == [True, True], "the end of such a process takes nothing from the worker"


@travels
def all_reduce(session: bytes, own: int) -> tuple[int, int]:
    """A task."""
    from raft_dask.common import local_handle

    group = local_handle(session, get_worker())
    return group.rank, sum(group.exchange(own))


@pytest.mark.shows("RAFT on held workers: the example, with what stands in for it on CPUs")
@pytest.mark.parametrize("root", ["scheduler", "worker"])
def test_a_communicator_is_made_of_the_held_workers_and_used_by_tasks(
    cluster: LocalGPUCluster, client: Client, root: str
) -> None:
    from raft_dask.common import Comms

    cluster.scale(jobs=2)
    client.wait_for_workers(4)
    with hpcgpu.hold(client, 2) as workers:
        comms = Comms(workers.client, nccl_root_location=root)
        comms.init()
        assert comms.worker_info(workers.addresses) == {worker.address: {"rank": worker.rank} for worker in workers}
        tasks = [
            workers.client.submit(all_reduce, comms.sessionId, 5, workers=[address], pure=False)
            for address in comms.worker_addresses
        ]
        assert sorted(workers.client.gather(tasks)) == [(0, 10), (1, 10)]
        has_session = travels(lambda session, dask_worker: session in getattr(dask_worker, "_raft_comm_state", {}))
        found = client.run(has_session, comms.sessionId)
        assert {address for address, has in found.items() if has} == {*workers.addresses} != {*found}
        comms.destroy()
        with pytest.raises(KeyError):
            workers.client.submit(all_reduce, comms.sessionId, 5, pure=False).result()
        # NCCL's first connection begins on the scheduler
        variable = travels(lambda: os.environ["NCCL_SOCKET_IFNAME"])
        assert set(workers.client.run(variable).values()) == {workers.client.run_on_scheduler(variable)}


@pytest.mark.shows("cudf-polars on held workers: the example, with what stands in for it on CPUs")
def test_the_loss_of_a_worker_ends_a_query_at_once_and_the_others_can_be_restarted(
    cluster: LocalGPUCluster, client: Client, shared_queue: LocalQueue, home: Path, until: Until
) -> None:
    from cudf_polars.engine.dask import DaskEngine

    cluster.scale(jobs=2)
    with ThreadPoolExecutor(1) as threads, cluster.hold(4) as workers:
        engine = DaskEngine(dask_client=workers.client)
        query = threads.submit(engine.evaluate, travels(lambda _, place: waits_for_file(place)), str(home))
        until(query.running, "the query has begun")
        shared_queue.cancel([workers[-1].job_id])
        with pytest.raises(ClusterError, match=rf"of job {workers[-1].job_id} .* was lost while a program held it"):
            query.result()
        with pytest.raises(ClusterError, match="was lost while a program held it"):
            engine.shutdown()
        blocked = [worker.address for worker in workers if worker.job != workers[-1].job]
        client.restart_workers(blocked, timeout=150)
        with hpcgpu.hold(client, 2) as others:
            assert not set(others.addresses) & set(blocked)


@pytest.mark.shows("XGBoost (its release for CPUs) on held workers")
def test_xgboost_trains_on_the_held_workers_while_the_other_job_drains(
    cluster: LocalGPUCluster, client: Client, until: Until
) -> None:
    pytest.importorskip("xgboost", reason="xgboost-cpu is not installed")
    import dask.array as da
    import xgboost.dask

    cluster.scale(jobs=2)
    with cluster.hold(4):
        cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
    with cluster.hold(2) as workers:
        features = da.random.random((4000, 4), chunks=(500, 4))
        data = xgboost.dask.DaskQuantileDMatrix(workers.client, features, 3 * features[:, 0] - features[:, 1])
        assert sorted(data.worker_map) == sorted(workers.addresses)
        until(lambda: len(cluster.workers) == 1, "the cluster drains the job that nobody holds")
        found = xgboost.dask.train(
            workers.client, {"tree_method": "hist"}, data, num_boost_round=20, evals=[(data, "t")]
        )
        errors = found["history"]["t"]["rmse"]
        assert errors[-1] < errors[0] / 5
    until(lambda: not cluster.workers, "without the hold that job drains too")
