"""Libraries that make a communicator of workers, on workers that a program holds in a cluster that adapts."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, get_worker, wait

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.dask_worker.run_ranked import free_port
from tests.docs.test_docs import ROOT, blocks
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
        files = travels(lambda dask_worker: os.path.isdir(dask_worker.local_directory))
        assert workers.run(files) == [True, True], "the end of such a process takes nothing from the worker"


@pytest.mark.shows("CuPy with NCCL on held workers: the example, with what stands in for both on CPUs")
def test_the_example_of_cupy_with_nccl_adds_over_the_ranks(cluster: LocalGPUCluster) -> None:
    """The stand-in meets on the interface that NCCL_SOCKET_IFNAME names."""
    [example] = [text for _, how, text in blocks(ROOT / "docs" / "libraries.rst") if how == "needs cupy"]
    cluster.scale(jobs=2)
    cluster.wait_for_workers()
    cluster.upload_package(Path(__file__).parent / "stand_ins" / "cupy")
    names: dict[str, Any] = {"__name__": "__main__", "cluster": cluster}
    exec(example.replace("hold(8)", "hold(4)"), names)
    assert [total.tolist() for total in names["sums"]] == 4 * [[4.0, 4.0, 4.0, 4.0]]


@travels
def gives_place_of_first_rank(host: str) -> tuple[str, int]:
    """What NCCL's root does in the process that makes the unique id: it waits for all ranks, and gives each a place."""
    server = socket.create_server((host, 0))

    def serve() -> None:
        ranks: list[socket.socket] = []
        place, world = "", 1
        with server:
            while len(ranks) < world:
                connection, _ = server.accept()
                rank, world_size, own_place = connection.makefile().readline().split()
                place, world = own_place if rank == "0" else place, int(world_size)
                ranks.append(connection)
        for connection in ranks:
            connection.sendall(f"{place}\n".encode())
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return host, server.getsockname()[1]


class Comms:
    """What `raft_dask.common.Comms` (26.10) does to a client: it gives the workers ranks by their GPUs, makes an id in
    the process of the scheduler or of one worker, and sets up all workers, each in its event loop. Each of these steps
    waits for all ranks. Tasks with the id of the session use the communicator then.
    """

    def __init__(self, client: Client, nccl_root_location: str = "scheduler") -> None:
        self.client, self.root, self.session = client, nccl_root_location, uuid.uuid4().bytes

    def init(self) -> None:
        self.addresses = list(self.client.scheduler_info(n_workers=-1)["workers"])
        gpus = self.client.run(travels(lambda: os.environ["CUDA_VISIBLE_DEVICES"]), workers=self.addresses)
        in_order = sorted(gpus, key=lambda address: (address.rsplit(":", 1)[0], gpus[address], address))
        self.ranks = {address: rank for rank, address in enumerate(in_order)}
        if self.root == "worker":
            first = self.addresses[:1]
            unique_id = self.client.run(self._id_of_worker, root=gives_place_of_first_rank, workers=first, wait=True)
            unique_id = unique_id[first[0]]
        else:
            unique_id = self.client.run_on_scheduler(self._id_of_scheduler, root=gives_place_of_first_rank)
        arguments = (self.session, unique_id, self.ranks)
        self.client.run(self._set_up, *arguments, workers=self.addresses, wait=True)

    @staticmethod
    @travels
    def _id_of_worker(root: Callable[[str], Any], dask_worker: Any) -> Any:
        return root(dask_worker.ip)

    @staticmethod
    @travels
    def _id_of_scheduler(root: Callable[[str], Any], dask_scheduler: Any) -> Any:
        return root(dask_scheduler.ip)

    @staticmethod
    @travels
    async def _set_up(session: bytes, unique_id: tuple[str, int], ranks: dict[str, int], dask_worker: Any) -> None:
        rank, world = ranks[dask_worker.address], len(ranks)
        with socket.create_connection(unique_id) as root:  # holds the event loop, as NCCL does
            root.sendall(f"{rank} {world} {dask_worker.ip}:{free_port(dask_worker.ip)}\n".encode())
            host, port = root.makefile().readline().strip().rsplit(":", 1)
        vars(dask_worker).setdefault("_sessions", {})[session] = (rank, world, (host, int(port)))

    @staticmethod
    @travels
    def all_reduce(session: bytes, own: int) -> tuple[int, int]:
        """A task."""
        rank, *others = get_worker()._sessions[session]
        return rank, sum_over_ranks(own, rank, *others)

    def destroy(self) -> None:
        forget = travels(lambda session, dask_worker: dask_worker._sessions.pop(session))
        self.client.run(forget, self.session, workers=self.addresses, wait=True)


@pytest.mark.shows("RAFT and cuML on held workers: a class that does what `Comms` of RAFT does to a client")
@pytest.mark.parametrize("root", ["scheduler", "worker"])
def test_a_communicator_is_made_of_the_held_workers_and_used_by_tasks(
    cluster: LocalGPUCluster, client: Client, root: str
) -> None:
    cluster.scale(jobs=2)
    client.wait_for_workers(4)
    with hpcgpu.hold(client, 2) as workers:
        comms = Comms(workers.client, nccl_root_location=root)
        comms.init()
        assert sorted(comms.ranks.items(), key=lambda item: item[1]) == [(w.address, w.rank) for w in workers]
        tasks = [
            workers.client.submit(comms.all_reduce, comms.session, 5, workers=[address], pure=False)
            for address in comms.addresses
        ]
        assert sorted(workers.client.gather(tasks)) == [(0, 10), (1, 10)]
        has_session = travels(lambda session, dask_worker: session in getattr(dask_worker, "_sessions", {}))
        found = client.run(has_session, comms.session)
        assert {address for address, has in found.items() if has} == {*workers.addresses} != {*found}
        comms.destroy()
        with pytest.raises(KeyError):
            workers.client.submit(comms.all_reduce, comms.session, 5, pure=False).result()
        # NCCL's first connection begins on the scheduler
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
