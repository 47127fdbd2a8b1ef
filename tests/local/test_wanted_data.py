"""Adaptive scaling and what clients still want: jobs that hold it stay, as few as can hold it; nothing is computed
twice.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Event, Queue, Variable

from hpcgpu import LocalGPUCluster
from hpcgpu import connect as connect_to
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, told
from tests.helpers import ADAPT, CPU, decisions, drain_now, messages, names, tasks

Until = Callable[..., None]


def functions() -> tuple[Callable[[int, str], int], type]:
    """Functions of a function, which travel by value: schedulers and workers cannot import this file."""

    def counted(index: int, file: str) -> int:
        with open(file, "a") as executions:
            executions.write(f"{index}\n")
        time.sleep(0.5)
        return index

    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def increment(self) -> int:
            self.n += 1
            return self.n

    return counted, Counter


counted, Counter = functions()
wait_for, _ = tasks()


class Holders:
    """Everything by which something can be wanted: each method begins it and returns what ends it."""

    def __init__(self, cluster: LocalGPUCluster, client: Client, file: Path) -> None:
        self.cluster = cluster
        self.client = client
        self.file = file
        self.count = 0

    def result(self, client: Client | None = None) -> Any:
        self.count += 1
        future = (client or self.client).submit(counted, self.count, file=str(self.file))
        future.result()
        return future

    def future(self) -> Callable[[], object]:
        return self.result().release  # type: ignore[no-any-return]

    def persisted_collection(self) -> Callable[[], object]:
        self.count += 1
        collections = [self.client.persist(dask.delayed(counted)(self.count, file=str(self.file)))]
        collections[0].compute()
        return collections.clear

    def published_dataset(self) -> Callable[[], object]:
        future = self.result()
        self.client.publish_dataset(future, name="dataset")
        future.release()
        return lambda: self.client.unpublish_dataset("dataset")

    def variable(self) -> Callable[[], object]:
        variable, future = Variable("variable", client=self.client), self.result()
        variable.set(future)
        future.release()
        return variable.delete  # type: ignore[no-any-return]

    def queue(self) -> Callable[[], object]:
        queue, future = Queue("queue", client=self.client), self.result()
        queue.put(future)
        future.release()
        return lambda: queue.get().release()

    def task_that_waits(self) -> Callable[[], object]:
        future = self.result()
        waiting = self.client.submit(str, future, resources={"NOBODY HAS IT": 1})
        future.release()
        return waiting.release  # type: ignore[no-any-return]

    def actor(self) -> Callable[[], object]:
        future = self.client.submit(Counter, actor=True)
        counter = future.result()
        assert counter.increment().result() == 1

        def end() -> None:
            nonlocal counter
            assert counter.increment().result() == 2, "the actor was lost"
            counter = None
            future.release()
            gc.collect()  # distributed's `Actor` is part of a cycle: until then the client wants it

        return end

    def another_client(self) -> Callable[[], object]:
        client = Client(self.cluster)
        self.result(client)  # wanted until that client is gone
        self.kept = self.result(client)
        return client.close  # type: ignore[no-any-return]


def worker_jobs(cluster: LocalGPUCluster) -> int:
    """Worker jobs that were ever submitted."""
    return sum(job.kind == "worker" for job in cluster.jobs)


def test_results_that_a_client_holds_stay_on_one_job_until_they_are_released(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    executions = home / "executions"
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
        futures = client.map(counted, range(20), file=str(executions))
        assert client.gather(futures) == list(range(20))
        submitted = worker_jobs(cluster)
        until(lambda: len(live(queue)) == 2, "one of the jobs goes")
        assert "1 job needed to hold" in adaptive.state.reason
        decisions(cluster, until)
        assert len(live(queue)) == 2, "the job that holds the results went"
        assert client.gather(futures) == list(range(20))
        assert sorted(map(int, executions.read_text().split())) == list(range(20)), (
            "results were lost, and computed again"
        )
        assert worker_jobs(cluster) == submitted, "jobs were submitted again"
        del futures
        until(lambda: not cluster.workers and len(live(queue)) == 1, "all jobs go once the results are released")
        assert adaptive.state.reason.startswith("there is no work")


def test_whatever_is_wanted_by_somebody_keeps_its_job(queue: LocalQueue, home: Path, until: Until) -> None:
    executions = home / "executions"
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        holders = Holders(cluster, client, executions)
        kinds = [
            *(holders.future, holders.persisted_collection, holders.published_dataset, holders.variable, holders.queue),
            *(holders.task_that_waits, holders.actor, holders.another_client),
        ]
        holds = list[Callable[[], object]]()
        for hold in kinds:
            holds.append(hold())
            for release in holds[:-1]:
                release()
            del holds[:-1]
            decisions(cluster, until, 5)
            assert [job.state for job in cluster.jobs if job.kind == "worker"] == ["running"], (
                f"{hold.__name__} does not keep its job"
            )
            kept = "1 actor" if hold == holders.actor else "that clients still need"
            until(
                lambda kept=kept: "1 job needed to hold" in adaptive.state.reason and kept in adaptive.state.reason,
                lambda name=hold.__name__: f"{name}: {adaptive.state.reason}",
            )
        holds.pop()()
        until(lambda: len(live(queue)) == 1, "the job goes once nobody wants anything")
        done = sorted(map(int, executions.read_text().split()))
        assert done == list(range(1, holders.count + 1)), "something was computed twice"


def test_data_that_came_to_be_wanted_after_the_decision_stays_and_an_explicit_zero_gives_it_up(
    queue: LocalQueue, home: Path, until: Until, recwarn: pytest.WarningsRecorder
) -> None:
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        future = client.submit(counted, 1, file=str(home / "executions"))
        assert future.result() == 1
        [name] = cluster.workers
        drain_now(cluster, name)
        until(
            lambda: any(
                f"job {name} continues: its data does not fit on other workers" in text for _, text in adaptive.log
            ),
            "it stays",
        )
        assert not [warning for warning in recwarn if "does not fit on" in str(warning.message)], "nothing is wrong"
        until(lambda: "1 job needed to hold" in adaptive.state.reason, "it is kept")
        assert future.result() == 1 and (home / "executions").read_text() == "1\n"
        cluster.scale(jobs=0)
        until(lambda: len(live(queue)) == 1, "the job goes with its data")


def test_results_move_to_another_job_in_time_when_the_walltime_of_theirs_ends(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    options = CPU | {"walltime": "100s", "walltime_margin": "50s", "scheduler": {"walltime": "10m"}}
    with LocalGPUCluster(**options) as cluster, Client(cluster) as client:
        cluster.adapt(minimum_jobs=0, maximum_jobs=1, **ADAPT)
        future = client.submit(counted, 1, file=str(home / "executions"))
        assert future.result() == 1
        [first] = cluster.workers
        until(lambda: first not in cluster.workers and cluster.workers, "another job takes its place")
        until(lambda: [job.state for job in cluster.jobs if job.name == first] != ["running"], "the first job ends")
        [state] = [job.state for job in cluster.jobs if job.name == first]
        assert state in ("completed", "cancelled", "completing"), "its walltime does not kill it"
        assert future.result() == 1 and (home / "executions").read_text() == "1\n"
        future.release()
        until(lambda: len(live(queue)) == 1, "the other job goes once the result is released")


def test_a_deleted_group_takes_no_new_tasks_and_goes_once_its_data_is_released(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        cluster.add_worker_group("big", gpus_per_node=0, cores=1, jobs=1, resources={"BIG": 1})
        cluster.wait_for_workers(1)
        [big] = cluster.workers
        future = client.submit(counted, 1, file=str(home / "executions"), resources={"BIG": 1})
        runs = client.submit(wait_for, "go", resources={"BIG": 1})
        until(lambda: runs.key in str(client.processing()), "it runs")
        assert future.result() == 1
        with told("job .* of the deleted group big continues until its data is released.*It takes no new tasks"):
            cluster.delete_worker_group("big")
        assert cluster.workers == {}
        waits = client.submit(counted, 2, file=str(home / "executions"), resources={"BIG": 1})
        plain = client.submit(counted, 3, file=str(home / "executions"))
        Event("go", client=client).set()
        assert runs.result() == big, "what ran has ended"
        cluster.scale(jobs=1)
        assert plain.result() == 3 and waits.status == "pending"
        said = "tasks that need 1 BIG wait: only the workers of group big had that, and the group was deleted"
        until(lambda: messages(cluster).count(said) == 1, "it is said")
        runs.release()
        assert client.submit(counted, 4, file=str(home / "executions")).result() == 4
        assert (home / "executions").read_text() == "1\n3\n4\n"
        until(lambda: names(cluster) == set(cluster.workers), "its data has moved to the other job, and it goes")
        assert future.result() == 1
        waits.cancel()


def test_a_deleted_group_keeps_data_that_fits_nowhere_else(queue: LocalQueue, home: Path, until: Until) -> None:
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        cluster.add_worker_group("big", gpus_per_node=0, cores=1, jobs=1)
        cluster.wait_for_workers(1)
        future = client.submit(counted, 1, file=str(home / "executions"))
        assert future.result() == 1
        with told("of the deleted group big continues until its data is released"):
            cluster.delete_worker_group("big")
        plain = client.submit(counted, 2, file=str(home / "executions"))
        assert future.result() == 1 and (home / "executions").read_text() == "1\n"
        future.release()
        until(lambda: len(live(queue)) == 1, "the job goes once its data is released")
        assert plain.status == "pending"
        plain.cancel()


def test_a_program_that_takes_over_goes_on_draining_a_deleted_group(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    with LocalGPUCluster(**CPU, name="kept", shutdown_on_close=False) as cluster:
        cluster.add_worker_group("big", gpus_per_node=0, cores=1, jobs=1)
        cluster.wait_for_workers(1)
        client = connect_to("kept", quiet=True)
        future = client.submit(counted, 1, file=str(home / "executions"))
        assert future.result() == 1
        with told("of the deleted group big continues until its data is released"):
            cluster.delete_worker_group("big")
    with client, LocalGPUCluster.from_name("kept") as cluster:
        plain = client.submit(counted, 2, file=str(home / "executions"))
        assert cluster.workers == {} and len(live(queue)) == 2 and future.result() == 1
        until(lambda: "continues until its data is released" in messages(cluster), "it drains on")
        assert plain.status == "pending", "it takes no new tasks"
        future.release()
        until(lambda: len(live(queue)) == 1, "the job goes once its data is released")
        plain.cancel()


def test_a_blip_of_the_network_while_data_moves_loses_none(queue: LocalQueue, home: Path, until: Until) -> None:
    with LocalGPUCluster(**CPU, jobs=2) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        futures = client.scatter(list(range(10)))
        until(lambda: len([held for held in client.has_what().values() if held]) == 2, "both hold some")
        retire, blips = (
            cluster.scheduler_comm.retire_workers,
            [OSError("connection reset"), OSError("connection reset")],
        )

        async def flaky(**arguments: Any) -> Any:
            if blips:
                raise blips.pop()
            return await retire(**arguments)

        cluster.scheduler_comm.retire_workers = flaky
        cluster.scale(jobs=1)
        until(lambda: len(live(queue)) == 2, "a job goes")
        assert not blips and client.gather(futures) == list(range(10))
