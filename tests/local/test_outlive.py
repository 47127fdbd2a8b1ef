"""Clusters that outlive the program that made them: left, taken up again, taken over, waited for later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed.exceptions import WorkerStartTimeoutError

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster, NoCluster, OptionError, SlurmGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cluster.notebook import _Control
from hpcgpu.errors import BatchUnavailable, ClusterWarning, SubmitRefused
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.existing_clusters.stop import stop
from hpcgpu.manager import start_cluster
from hpcgpu.manager.manager import Manager
from hpcgpu.orders.change_size import scale_and_wait
from hpcgpu.scaling.wanted_state import Scale, apply
from hpcgpu.software import compare_environments
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import live, told
from tests.helpers import CPU, block_queue, in_queue, names, start_program, travels

pytestmark = pytest.mark.shows("The command line; a cluster that another program takes over")

Until = Callable[..., None]

#: Its jobs wait while the queue's GPUs are taken.
WAITS: dict[str, Any] = {
    "gpus_per_node": 1,
    "protocol": "tcp",
    "scheduler": {"gpus_per_node": 1},
    "poll_interval": 0.5,
    "quiet": True,
}


def test_a_detached_cluster_keeps_its_jobs_and_its_data_and_is_taken_up_again(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(name="kept", jobs=1, **CPU)
    cluster.wait_for_workers(1)
    with cluster.get_client() as client:
        client.publish_dataset(answer=client.scatter(42))
    cluster.detach()
    assert cluster.status.name == "closed" and len(live(queue)) == 2

    with hpcgpu.connect("kept", quiet=True) as client:
        assert client.get_dataset("answer").result() == 42
        assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["hpcgpu"].lease.seconds) is None

    attached = "from hpcgpu import LocalGPUCluster; LocalGPUCluster.from_name('kept', quiet=True)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", attached], check=True, timeout=250)
    assert len(live(queue)) == 2, "a program that attached to it and ends without `close` leaves it"

    again = LocalGPUCluster.from_name("kept")
    assert {job.name: (job.kind, job.state) for job in again.jobs} == {
        "kept-scheduler": ("scheduler", "running"),
        "kept-0": ("worker", "running"),
    }
    again.wait_for_workers()
    again.scale(jobs=2)
    again.wait_for_workers(2)
    assert names(again) == {"kept-0", "kept-1"}, "numbers go on where they were"
    assert any("hpcgpu: on " in log for name, log in again.get_logs(cluster=False).items() if name.startswith("kept-0"))
    again.scale(jobs=1)
    again.wait_for_workers(1)
    with again.get_client() as client:
        assert client.get_dataset("answer").result() == 42
    again.close()
    assert live(queue) == []
    with pytest.raises(ClusterError, match="cluster kept was closed; its logs are in"):
        LocalGPUCluster.from_name("kept")


def test_worker_groups_come_back_with_their_options_and_deleted_ones_do_not(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(name="groups", jobs=0, **CPU)
    cluster.add_worker_group("big", gpus_per_node=0, cores=1, resources={"MEMORY": 2}, jobs=1)
    cluster.wait_for_workers(1)
    cluster.detach()
    again = LocalGPUCluster.from_name("groups")
    again.wait_for_workers(1)
    again.scale(jobs=2, worker_group="big")
    again.wait_for_workers(2)
    assert all(worker["resources"] == {"MEMORY": 2} for worker in again.scheduler_info["workers"].values())
    assert again.options.worker.worker_resources() == ()
    again.delete_worker_group("big")
    again.detach()
    with LocalGPUCluster.from_name("groups") as third, pytest.raises(OptionError, match="no worker group named 'big'"):
        third.scale(jobs=1, worker_group="big")


def test_a_cluster_whose_take_over_fails_goes_on_as_before(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalGPUCluster(name="left", jobs=1, **CPU).detach()
    start = Manager.start

    async def fails(self: Manager) -> None:
        await start(self)
        raise ClusterError("the software of this program does not work with the cluster's")

    with monkeypatch.context() as patch:
        patch.setattr(Manager, "start", fails)
        with pytest.raises((ClusterError, RuntimeError)):
            LocalGPUCluster.from_name("left", shutdown_on_close=True)
    assert len(live(queue)) == 2
    LocalGPUCluster.from_name("left").close()
    assert live(queue) == []


def test_idle_timeout_ends_an_abandoned_cluster(queue: LocalQueue, until: Until) -> None:
    LocalGPUCluster(name="idle", jobs=1, idle_timeout="20s", **CPU).detach()
    until(lambda: live(queue) == [], "scheduler and worker end by themselves")
    with pytest.raises(
        ClusterError, match=r"cluster idle has ended and cannot be taken over: scheduler job .* completed"
    ):
        LocalGPUCluster.from_name("idle")


def test_without_waiting_the_cluster_is_there_in_every_state(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    blocker = block_queue(queue, home)
    cluster = LocalGPUCluster(name="later", jobs=1, wait=False, **WAITS)
    assert [(job.kind, job.state) for job in cluster.jobs] == [("scheduler", "pending"), ("worker", "pending")]
    assert "LocalGPUCluster('later', '<Not Connected>', status=starting, workers=0/1, worker jobs: 1 pending)" in repr(
        cluster
    )
    assert cluster.dashboard_link == "" and cluster._repr_html_()
    with pytest.raises(WorkerStartTimeoutError):
        cluster.wait_for_workers(1, timeout="0.2s")
    with pytest.raises(
        TimeoutError, match=r"the scheduler of cluster later did not answer within 2 s: scheduler job \w+ pending: "
    ):
        hpcgpu.connect("later", timeout=2, quiet=True)
    cluster.scale(jobs=2)
    until(lambda: len(in_queue(queue, "later")) == 3, "a job is added while all wait")
    queue.cancel([blocker])
    with hpcgpu.connect("later", quiet=True) as client:
        assert client.submit(sum, [1, 2]).result() == 3
    with cluster.get_client() as client:
        assert client.submit(sum, [1, 2, 3]).result() == 6
    cluster.wait_for_workers(2)
    assert cluster.status.name == "running"
    cluster.close()
    assert live(queue) == []


def test_without_waiting_a_waiting_cluster_can_be_closed_and_left(
    queue: LocalQueue, home: Path, fake_gpus: None
) -> None:
    blocker = block_queue(queue, home)
    LocalGPUCluster(name="shut", jobs=1, wait=False, **WAITS).close()
    assert live(queue) == [blocker]
    LocalGPUCluster(name="left", jobs=1, wait=False, **WAITS).detach()
    assert len(live(queue)) == 3
    with LocalGPUCluster.from_name("left", wait=False) as cluster:
        assert cluster.status.name == "starting"
    assert live(queue) == [blocker]
    queue.cancel([blocker])


def test_without_waiting_a_scheduler_that_dies_is_reported(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    blocker = block_queue(queue, home)
    cluster = LocalGPUCluster(name="dies", jobs=1, wait=False, **WAITS)
    with told(r"Cluster failed to start: scheduler job \w+ \(dies-scheduler\) cancelled"):
        queue.cancel([cluster.jobs[0].id])
        until(lambda: cluster.status.name == "closed", "the cluster gives up")
    assert "dies-scheduler) cancelled" in repr(cluster)
    with pytest.raises(ClusterError, match="dies-scheduler"):
        cluster.wait_for_workers(1)
    assert live(queue) == [blocker]
    with pytest.raises(ClusterError, match="cluster dies has ended: Cluster failed to start: scheduler job"):
        hpcgpu.connect("dies", quiet=True)
    queue.cancel([blocker])


async def test_awaiting_a_cluster_that_does_not_wait_returns_at_once_and_later_awaits_wait(
    queue: LocalQueue, home: Path, fake_gpus: None
) -> None:
    blocker = block_queue(queue, home)
    async with LocalGPUCluster(name="soon", jobs=0, wait=False, asynchronous=True, **WAITS) as cluster:
        assert cluster.status.name == "starting"
        queue.cancel([blocker])
        await cluster
        assert cluster.status.name == "running"
        async with await hpcgpu.connect("soon", asynchronous=True, quiet=True) as client:
            assert (await client.scheduler.identity())["type"] == "Scheduler"


def test_a_cluster_of_that_name_is_connected_to_where_that_was_asked_for(queue: LocalQueue) -> None:
    LocalGPUCluster(name="one", jobs=1, if_exists="connect", **CPU).detach()
    LocalGPUCluster(name="one", if_exists="connect", shutdown_on_close=False, **CPU).close()
    assert len(live(queue)) == 2, "a close leaves its jobs where that was asked for"
    with told("cluster one already existed: it keeps its own nthreads$"):
        cluster = LocalGPUCluster(name="one", jobs=5, nthreads=3, if_exists="connect", **CPU)
    with cluster:
        cluster.wait_for_workers()
        assert names(cluster) == {"one-0"}, "it is the one that was there"
    assert live(queue) == []


def test_who_wants_to_connect_does_so_also_where_somebody_else_was_faster_to_start_it(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalGPUCluster(name="raced", jobs=0, **CPU).detach()
    look, looks = start_cluster.existing, list[None]()

    def too_early(*arguments: Any) -> ClusterDirectory | None:
        looks.append(None)
        return None if len(looks) == 1 else look(*arguments)

    monkeypatch.setattr(start_cluster, "existing", too_early)
    before = live(queue)
    with LocalGPUCluster(name="raced", jobs=0, if_exists="connect", **CPU) as second:
        assert live(queue) == before and second.scheduler.job_id == before[0], "it is the one that was there"
    assert live(queue) == []


def test_the_second_manager_takes_over_and_the_first_reports_it(queue: LocalQueue, until: Until) -> None:
    first = LocalGPUCluster(name="two", jobs=1, **CPU)
    first.wait_for_workers(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = LocalGPUCluster.from_name("two")
        until(lambda: any("was taken over by" in str(w.message) for w in caught), "the first notices by itself")
    with pytest.raises(
        ClusterError, match=r"cluster two was taken over by .*process \d+.*from_name\('two'\) takes it back"
    ):
        first.scale(jobs=3)
    with pytest.raises(ClusterError, match="was taken over by"):
        first.wait_for_workers()
    second.scale(jobs=2)
    second.wait_for_workers(2)
    with first.get_client() as client:
        assert client.submit(sum, [1, 2]).result() == 3, "its clients go on"
    first.close()
    assert len(live(queue)) == 3, "the jobs are the second's"
    second.close()
    assert live(queue) == []


def test_a_program_that_closes_before_it_notices_a_take_over_leaves_the_cluster_alone(queue: LocalQueue) -> None:
    first = LocalGPUCluster(name="two", jobs=1, **CPU | {"poll_interval": 600})
    second = LocalGPUCluster.from_name("two")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first.close()
    said = [str(warning.message) for warning in caught]
    assert any("was taken over by" in text for text in said)
    assert not any("hpcgpu stop" in text for text in said), "that would end the other program's jobs"
    second.wait_for_workers(1)
    second.close()
    assert live(queue) == []


def test_a_job_that_is_submitted_while_another_manager_takes_over_is_not_left_behind(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    gate, under_way = threading.Event(), threading.Event()

    class Slow(LocalQueue):
        def submit(self, script: Path, **arguments: Any) -> str:
            job_id = super().submit(script, **arguments)
            if arguments["job_name"] == "race-0":
                under_way.set()
                gate.wait()
            return job_id

        def find(self, job_name: str) -> list[str]:
            return []  # the answer of a queue that has not received it yet

    with monkeypatch.context() as patch:
        patch.setattr("hpcgpu.cluster.gpucluster.batch_system", lambda system: Slow(queue.directory, gpus=4))
        first = LocalGPUCluster(name="race", jobs=0, **CPU)
        first.scale(jobs=1)
        under_way.wait()
        with told("was taken over by"), LocalGPUCluster.from_name("race") as second:
            assert [job.id for job in second.jobs if job.name == "race-0"] == [""], "the queue may still show it"
            gate.set()
            until(lambda: in_queue(queue, "race-0") == [], "the first cancels what it submitted")
            first.close()
    assert live(queue) == []


def test_a_queue_that_does_not_answer_costs_a_cluster_no_manager(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(LocalQueue):
        def poll(self, job_ids: Any) -> Any:
            raise BatchUnavailable("the queue does not answer")

    with LocalGPUCluster(name="alive", jobs=0, **CPU) as first:
        with monkeypatch.context() as patch:
            patch.setattr("hpcgpu.cluster.gpucluster.batch_system", lambda system: Silent(queue.directory, gpus=4))
            with pytest.raises(ClusterError, match="the queue does not answer"):
                LocalGPUCluster.from_name("alive")
        first.scale(jobs=1)
        first.wait_for_workers(1)


@pytest.mark.parametrize("why", ["its scheduler does not answer", "client, scheduler and workers are incompatible"])
def test_a_scheduler_that_a_program_cannot_use_costs_a_cluster_no_manager(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with LocalGPUCluster(name="alive", jobs=0, **CPU) as first:
        contact = first.directory.contact()
        assert contact is not None
        limit = "30s" if why.startswith("client") else "1s"
        with monkeypatch.context() as patch, dask.config.set({"distributed.comm.timeouts.connect": limit}):
            if why.startswith("client"):
                patch.setattr(compare_environments, "collect", lambda: {"dask": "2000.1.0"})
            else:  # as on a host from which no way leads to it
                first.directory.publish(replace(contact, client="tls://127.0.0.1:1"))
            for wait in (True, False):
                with pytest.raises(ClusterError, match=f"^Cluster alive cannot be taken over: {why}"):
                    LocalGPUCluster.from_name("alive", wait=wait)
        first.directory.publish(contact)
        first.scale(jobs=1)
        first.wait_for_workers(1)


def test_a_replacement_that_the_queue_refuses_costs_a_cluster_no_manager(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(LocalQueue):
        def submit(self, *arguments: Any, **options: Any) -> str:
            raise SubmitRefused("the account is used up")

    first = LocalGPUCluster(name="short", jobs=1, **CPU)
    first.wait_for_workers(1)
    first.detach()
    first.directory.want(apply(first.directory.wanted(), Scale("default", 2)))  # as if one of two jobs had ended
    with monkeypatch.context() as patch:
        for module in ("cluster.gpucluster", "orders.change_size"):
            patch.setattr(f"hpcgpu.{module}.batch_system", lambda system: Refusing(queue.directory, gpus=4))
        for wait in (False, True):
            with pytest.warns(ClusterWarning, match="was not submitted: the account is used up") as warned:
                again = LocalGPUCluster.from_name("short", wait=wait)
            assert sum("the account is used up" in str(one.message) for one in warned) == 1
            again.wait_for_workers(1)
            assert again.managing
            again.detach()
        again.directory.want(apply(again.directory.wanted(), Scale("default", 2)))
        with pytest.warns(ClusterWarning, match="the account is used up"):
            scale_and_wait(again.directory, jobs=1)
        assert again.directory.wanted().sizes == {"default": 1}
    with LocalGPUCluster.from_name("short", shutdown_on_close=True) as cluster:
        cluster.wait_for_workers(1)


async def test_a_program_that_closes_before_it_has_taken_a_cluster_over_leaves_it_alone(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalGPUCluster(name="kept", jobs=0, shutdown_on_close=False, asynchronous=True, **CPU) as made:
        jobs = live(queue)
    for record in made.directory.path.glob("manager-*.json"):
        record.unlink()  # as of a cluster that `hpcgpu render` has made
    asks = asyncio.Event()

    async def asked(*_: object, **__: object) -> None:
        asks.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr("hpcgpu.manager.connect_to_scheduler.running_scheduler", asked)
        cluster = LocalGPUCluster.from_name("kept", asynchronous=True)
        start = asyncio.ensure_future(cluster.manager.start())
        await asks.wait()
        await cluster.close()
        await asyncio.wait([start])
    assert not made.directory.closing and made.directory.tls.is_dir() and live(queue) == jobs
    stop(made.directory, queue)


def test_what_cannot_be_taken_up_is_reported(queue: LocalQueue, home: Path) -> None:
    with pytest.raises(NoCluster, match=r"there is no cluster named 'nobody' in .*. Existing clusters: none"):
        LocalGPUCluster.from_name("nobody")
    with pytest.raises(NoCluster, match="is not the directory of a cluster"):
        hpcgpu.connect(home / "nowhere")
    with LocalGPUCluster(name="here", scheduler="local", jobs=0, **CPU) as cluster:
        with pytest.raises(ClusterError, match="its scheduler runs in the program that made it"):
            LocalGPUCluster.from_name("here")
        with pytest.raises(ClusterError, match="the scheduler runs in the program that made the cluster"):
            cluster.detach()
    with LocalGPUCluster(name="mine", jobs=0, **CPU) as cluster:
        with pytest.raises(ClusterError, match="cluster mine belongs to batch system 'local', not 'slurm'"):
            SlurmGPUCluster.from_name("mine")
        assert asyncio.run(_name_of(cluster.directory.path)) == "mine"
    (cluster.directory.path / "options.json").unlink()


async def _name_of(path: Path) -> str:
    """Connect by the path of a cluster's directory."""
    async with await hpcgpu.connect(path, asynchronous=True, quiet=True) as client:
        return str(client.id).removeprefix("Client-hpcgpu-").rsplit("-", 5)[0]


@pytest.mark.filterwarnings("ignore::hpcgpu.errors.ClusterWarning")
def test_an_old_program_leaves_a_later_cluster_of_the_same_name_alone(queue: LocalQueue) -> None:
    old = LocalGPUCluster(name="same", **CPU | {"poll_interval": 600})
    assert stop(old.directory, queue) == []
    with LocalGPUCluster(name="same", jobs=1, **CPU) as new:
        new.wait_for_workers(1)
        _Control(old).stop()  # a click that the kernel got late
        old.close()
        assert old.snapshot().state != "running" and not new.directory.closing
        assert new.directory.tls.is_dir() and new.directory.contact() is not None and not new.directory.closed
        new.scale(jobs=2)
        new.wait_for_workers(2)


def test_a_cluster_whose_scheduler_is_busy_for_a_while_can_be_taken_over(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalGPUCluster(name="busy", jobs=0, **CPU).detach()
    monkeypatch.setattr("hpcgpu.dask_scheduler.scheduler_client._TIMEOUT", 0.5)
    monkeypatch.setattr("hpcgpu.manager.connect_to_scheduler._ENVIRONMENT_TIMEOUT", 0.0)
    with hpcgpu.connect("busy", quiet=True) as client, ThreadPoolExecutor() as pool:
        busy = pool.submit(client.run_on_scheduler, time.sleep, 5)
        with LocalGPUCluster.from_name("busy") as again:
            busy.result()
            assert again.status.name == "running"
            assert "software was not compared, because the scheduler did not answer" in again.get_logs()["Cluster"]


def test_jobs_that_were_left_outlive_the_end_of_the_program(queue: LocalQueue) -> None:
    """Of the program that made the cluster and does not close it, and of those that take it over and close it."""
    made = start_program({**CPU, "jobs": 1, "name": "left", "shutdown_on_close": False, "lease": 2}, then="pass")
    _, said = made.communicate(timeout=250)
    assert made.returncode == 0, said
    assert len(live(queue)) == 2
    program = "from hpcgpu import LocalGPUCluster; LocalGPUCluster.from_name('left', shutdown_on_close=False).close()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    with LocalGPUCluster.from_name("left", shutdown_on_close=False) as cluster:
        cluster.wait_for_workers(1)
    directory = cluster.directory
    assert len(live(queue)) == 2 and (directory.path / "contact.json").exists()
    assert directory.detached, "no lease ends it"
    manager = directory.manager()
    assert manager is not None and manager.lives is False, "this program, which goes on, is not in the way of commands"
    assert stop(directory, queue) == []


def test_a_cluster_is_left_in_the_size_that_was_requested_last(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(name="less", jobs=2, **CPU) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(2)
        data = client.scatter([*range(20)])
        cluster.scale(jobs=1)
        cluster.detach()
        assert client.gather(data) == [*range(20)]
    until(lambda: len(live(queue)) == 2, "the scheduler and one worker job are left")
    stop(cluster.directory, queue)
    more = LocalGPUCluster(name="more", jobs=0, shutdown_on_close=False, **CPU)
    more.scale(jobs=8)
    more.close()
    assert len(live(queue)) == 9
    assert stop(more.directory, queue) == []


def test_a_job_that_works_when_its_cluster_is_left_takes_tasks_until_the_next_manager_ends_it(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, until: Until
) -> None:
    monkeypatch.setattr("hpcgpu.manager.manager._DETACH_TIMEOUT", 0.0)
    cluster = LocalGPUCluster(name="busy", jobs=2, **CPU)
    cluster.wait_for_workers(2)
    workers = [*cluster.scheduler_info["workers"]]
    ends = tmp_path / "ends"
    with hpcgpu.connect("busy", quiet=True) as client:

        def works(end: Path) -> int:
            import time

            while not end.exists():
                time.sleep(0.05)
            return 1

        calls = [client.submit(travels(works), ends, workers=[worker], pure=False) for worker in workers]
        until(lambda: all(map(len, client.processing().values())), "both work")
        cluster.scale(jobs=1)
        with told("busy-[01] of cluster busy should end, but still works"):
            cluster.detach()
        ends.touch()
        assert client.gather(calls) == [1, 1]
        assert client.gather([client.submit(len, "ab", workers=[worker], pure=False) for worker in workers]) == [2, 2]
        with LocalGPUCluster.from_name("busy"):
            until(lambda: len(live(queue)) == 2, "the next manager ends it")
    assert live(queue) == []


def test_a_detach_is_recorded_before_it_waits_for_work(queue: LocalQueue, tmp_path: Path, until: Until) -> None:
    cluster = LocalGPUCluster(name="busy", jobs=2, **CPU)
    cluster.wait_for_workers(2)
    ends = tmp_path / "ends"
    os.mkfifo(ends)
    with hpcgpu.connect("busy", quiet=True) as client, ThreadPoolExecutor() as pool:
        workers = [*cluster.scheduler_info["workers"]]
        calls = [
            client.submit(travels(lambda end: len(end.read_text())), ends, workers=[w], pure=False) for w in workers
        ]
        until(lambda: all(map(len, client.processing().values())), "both work")
        cluster.scale(jobs=1)
        left = pool.submit(cluster.detach)
        until(lambda: cluster.directory.detached, "whatever happens to the program now, its jobs stay")
        end = os.open(ends, os.O_RDWR)
        os.close(end)
        assert client.gather(calls) == [0, 0]
        left.result(timeout=250)
    stop(cluster.directory, queue)
    until(lambda: live(queue) == [], "it is stopped")


async def test_a_drain_that_outlasts_a_cancel_ends_with_the_close(queue: LocalQueue) -> None:
    async def drains() -> None:
        with contextlib.suppress(asyncio.CancelledError):  # as a call of Dask, which makes it an error of the network
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with LocalGPUCluster(scheduler="local", jobs=0, asynchronous=True, **CPU) as cluster:
        drain = cluster.manager.state.spawn(drains())
        await asyncio.sleep(0)
    assert drain.done()


def test_a_scheduler_that_hangs_holds_no_program_that_leaves_its_cluster(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, until: Until
) -> None:
    monkeypatch.setattr("hpcgpu.manager.manager._DETACH_TIMEOUT", 0.1)
    monkeypatch.setattr("hpcgpu.dask_scheduler.scheduler_client._TIMEOUT", 3600.0)
    cluster = LocalGPUCluster(name="hangs", jobs=2, **CPU)
    cluster.wait_for_workers(2)
    ends = tmp_path / "ends"
    os.mkfifo(ends)
    with (
        hpcgpu.connect("hangs", quiet=True) as client,
        ThreadPoolExecutor() as pool,
        dask.config.set({"distributed.comm.timeouts.connect": "1h"}),
    ):
        hangs = pool.submit(client.run_on_scheduler, Path.read_text, ends)
        end = os.open(ends, os.O_WRONLY)
        try:
            cluster.scale(jobs=1)
            left = pool.submit(cluster.detach)
            with told("hangs-[01] of cluster hangs should end, but still works"):
                left.result(timeout=120)
        finally:
            os.close(end)
        hangs.result()
    assert cluster.directory.detached
    assert not any(submit.unwanted for submit in cluster.directory.submits()), "the next manager decides"
    stop(cluster.directory, queue)
    until(lambda: live(queue) == [], "it is stopped")


def test_an_interrupted_take_over_leaves_the_lease_in_force(queue: LocalQueue, home: Path, until: Until) -> None:
    blocker = block_queue(queue, home)
    crashes = "import os, signal; from hpcgpu import LocalGPUCluster; "
    crashes += f"LocalGPUCluster(name='late', wait=False, jobs=0, **{WAITS!r}); os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", crashes], check=False).returncode == -signal.SIGKILL
    directory = locate("late")
    takes = "from hpcgpu import LocalGPUCluster; LocalGPUCluster.from_name('late', quiet=True)"
    program = subprocess.Popen([sys.executable, "-c", takes], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (manager := directory.manager()) is not None and manager.number == 2, "it has taken over")
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=250)
    finally:
        program.kill()
    assert "KeyboardInterrupt" in said and not directory.detached
    assert stop(directory, queue) == []
    queue.cancel([blocker])
    until(lambda: live(queue) == [], "nothing is left")


def test_what_is_given_up_altogether_ends_with_what_it_holds(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(jobs=1, **CPU) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        held = client.scatter(42)
        assert held.status == "finished"
        cluster.scale(jobs=0)
        until(lambda: not cluster.workers and len(live(queue)) == 1, "the job that held data alone has ended")
