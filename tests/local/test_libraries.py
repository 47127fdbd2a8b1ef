"""Libraries that make a communicator of workers, on workers that a program holds in a cluster that adapts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.dask_worker.run_ranked import free_port
from tests.helpers import ADAPT, GPU, sum_over_ranks, travels, waits_for_file

pytestmark = pytest.mark.usefixtures("fake_gpus")

Until = Callable[..., None]


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue, fake_gpus: None) -> Iterator[LocalGPUCluster]:
    """A cluster whose workers may start processes. Each test sets its size first: at most two jobs of two GPUs."""
    with LocalGPUCluster(**GPU, env={"DASK_DISTRIBUTED__WORKER__DAEMON": "False"}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalGPUCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


class Engine:
    """What `cudf_polars.engine.dask.DaskEngine` (26.10) does to a client: it counts the workers, sets up the first one,
    then all of them, and runs each query on all of them. Each step but the first ends when all ranks have arrived.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.attribute = client, f"_engine_{uuid.uuid4().hex}"
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        self.n_ranks = len(addresses)
        [place] = client.run(self._set_up_root, workers=addresses[:1]).values()
        client.run(self._set_up, self.attribute, addresses, place)

    @staticmethod
    @travels
    def _set_up_root(dask_worker: Any) -> tuple[str, int]:
        return dask_worker.ip, free_port(dask_worker.ip)

    @staticmethod
    @travels
    def _set_up(attribute: str, addresses: list[str], place: tuple[str, int], dask_worker: Any) -> None:
        communicator = (addresses.index(dask_worker.address), len(addresses), place)
        sum_over_ranks(0, *communicator)
        setattr(dask_worker, attribute, communicator)

    @staticmethod
    @travels
    def _evaluate(attribute: str, query: Callable[..., Any], arguments: Any, dask_worker: Any) -> tuple[int, int]:
        rank, *others = getattr(dask_worker, attribute)
        return rank, sum_over_ranks(query(*arguments) or 0, rank, *others)

    def collect(self, query: Callable[..., Any], *arguments: Any) -> list[int]:
        answers = self.client.run(self._evaluate, self.attribute, query, arguments)
        return [total for _, total in sorted(answers.values())]

    def shut_down(self) -> None:
        self.client.run(travels(lambda attribute, dask_worker: delattr(dask_worker, attribute)), self.attribute)


@pytest.mark.shows("cudf-polars on held workers: a class that does what its `DaskEngine` does to a client")
def test_an_engine_that_takes_all_workers_of_a_client_keeps_the_held_ones_while_the_cluster_grows(
    cluster: LocalGPUCluster, client: Client
) -> None:
    cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
    with cluster.hold(2) as workers:
        assert isinstance(workers.client, Client)
        ours, plain = Engine(workers.client), Engine(client)
        assert ours.n_ranks == plain.n_ranks == 2 and plain.collect(travels(lambda: 4)) == [8, 8]
        with hpcgpu.hold(client, 2):  # the cluster grows for another program
            assert ours.collect(travels(lambda: 5)) == [10, 10]
            with pytest.raises(AttributeError, match=plain.attribute):
                plain.collect(travels(lambda: 5))
            assert list(workers.client.scheduler_info()["workers"]) == workers.addresses
            assert len(client.scheduler_info(n_workers=-1)["workers"]) == 4
        ours.shut_down()
    with pytest.raises(ClusterError, match="the block that held these workers has ended"):
        ours.collect(travels(lambda: 5))


@pytest.mark.shows("cuDF by dask-expr on held workers, with pandas in its place")
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


@pytest.mark.shows("PyTorch DDP on held workers: the ranks, the meeting and the processes that it needs")
def test_ranks_may_start_processes(cluster: LocalGPUCluster) -> None:
    cluster.scale(jobs=2)
    with cluster.hold(2) as workers:
        assert workers.run(in_a_process_of_its_own) == [0, 1]


@pytest.mark.shows("RAFT and cuML on held workers: the calls and the variables that they need")
def test_a_communicator_that_begins_on_the_scheduler_uses_the_interface_of_the_workers(
    cluster: LocalGPUCluster,
) -> None:
    cluster.scale(jobs=2)
    with cluster.hold(2) as workers:
        ranks = dict(enumerate(workers.client.scheduler_info()["workers"]))  # as `raft_dask.common.Comms.init` does
        assert list(ranks.values()) == workers.addresses
        variable = travels(lambda: os.environ["NCCL_SOCKET_IFNAME"])
        assert set(workers.client.run(variable).values()) == {workers.client.run_on_scheduler(variable)}


@pytest.mark.shows("cudf-polars on held workers: a class that does what its `DaskEngine` does to a client")
def test_the_loss_of_a_worker_ends_a_query_at_once_and_the_others_can_be_restarted(
    cluster: LocalGPUCluster, client: Client, shared_queue: LocalQueue, home: Path, until: Until
) -> None:
    cluster.scale(jobs=2)
    with ThreadPoolExecutor(1) as threads, cluster.hold(4) as workers:
        engine = Engine(workers.client)
        query = threads.submit(engine.collect, waits_for_file, str(home))
        until(query.running, "the query has begun")
        shared_queue.cancel([workers[-1].job_id])
        with pytest.raises(ClusterError, match=rf"of job {workers[-1].job_id} .* was lost while a program held it"):
            query.result()
        with pytest.raises(ClusterError, match="was lost while a program held it"):
            engine.shut_down()
        blocked = [worker.address for worker in workers if worker.job != workers[-1].job]
        client.restart_workers(blocked, timeout=100)
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
