"""The whole cluster on the embedded queue: what the user sees, and what is broken in plain SpecCluster.

Row numbers are those of the list of SpecCluster's traps in docs/architecture.md; each such test fails on a plain
SpecCluster.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client
from distributed.comm import connect
from distributed.exceptions import WorkerStartTimeoutError

from hpcgpu import ClusterError, LocalGPUCluster, OptionError, SlurmGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import BatchError, BatchUnavailable, ClusterExists, ClusterWarning, SubmitRefused
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.existing_clusters.snapshot import snapshot
from hpcgpu.manager.scheduler_client import SchedulerClient
from hpcgpu.orders import manager_in_scheduler_job
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import live, running, told
from tests.helpers import CPU, GPU, block_queue, decide_now, have_their_gpus, in_queue, poll_now, start_program

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")

Until = Callable[..., None]


def test_a_cluster_comes_up_computes_and_leaves_no_job(queue: LocalQueue) -> None:
    with LocalGPUCluster(jobs=2, **CPU) as cluster:
        cluster.wait_for_workers(2)
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2, 3]).result() == 6
            assert cluster.scheduler_address.startswith("tls://")
            assert all(address.startswith("tls://") for address in cluster.scheduler_info["workers"])
        assert {job.kind: job.state for job in cluster.jobs} == {"scheduler": "running", "worker": "running"}
        assert "workers=2/2" in repr(cluster)
    assert live(queue) == []
    assert not cluster.directory.tls.exists(), "credentials outlived the cluster"
    assert (cluster.directory.path / "journal.jsonl").exists()


def test_workers_of_gpu_jobs_are_named_after_their_job_and_have_a_gpu_resource(
    queue: LocalQueue, fake_gpus: None
) -> None:
    with LocalGPUCluster(jobs=2, **GPU, name="names") as cluster:
        cluster.wait_for_workers(4)
        have_their_gpus(cluster)


def test_scale_counts_workers_and_rounds_up_to_jobs(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:  # rows 1 and 15
    with LocalGPUCluster(jobs=0, **GPU, cores=8, memory="8GB") as cluster:
        for arguments, jobs in [
            ({"n": 3}, 2),
            ({"gpus": 1}, 1),
            ({"jobs": 2}, 2),
            ({"cores": 1}, 1),
            ({"memory": "9GB"}, 2),
            ({"n": 0}, 0),
        ]:
            cluster.scale(**arguments)
            cluster.settle()
            until(lambda jobs=jobs: len(cluster.worker_spec) == jobs, f"{arguments} are {jobs} jobs")


def test_names_are_never_used_twice(queue: LocalQueue, until: Until) -> None:  # row 6
    with LocalGPUCluster(**CPU, jobs=1) as cluster:
        cluster.wait_for_workers(1)
        cluster.scale(jobs=0)
        cluster.scale(jobs=1)
        until(
            lambda: f"{cluster.name}-1" in {w["name"] for w in cluster.scheduler_info["workers"].values()},
            "a worker of a new name joins",
        )


def test_adaptive_with_several_workers_a_job_does_not_oscillate(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:  # rows 1, 16
    with LocalGPUCluster(**GPU) as cluster:
        adaptive = cluster.adapt(minimum=4, maximum=4, idle_timeout="100ms")
        cluster.wait_for_workers(4)
        with Client(cluster) as client:
            for _ in range(20):
                client.submit(int, pure=False).result()
                decide_now(cluster)
        until(lambda: adaptive.state.running == 2, "both jobs run")
        assert [text for _, text in adaptive.log if "draining" in text or "cancelling" in text] == []
        assert sorted(cluster.worker_spec) == [f"{cluster.name}-0", f"{cluster.name}-1"], "jobs were replaced"
        adaptive.stop()


def test_scaling_down_moves_the_data_of_all_workers_of_the_job(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:  # row 2
    with LocalGPUCluster(jobs=2, **GPU) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(4)
        futures = client.scatter(list(range(40)))
        assert len(set(map(tuple, client.who_has(futures).values()))) == 4
        cluster.scale(jobs=1)
        until(lambda: len(cluster.scheduler_info["workers"]) == 2, "two workers left")
        assert client.gather(futures) == list(range(40))
        until(lambda: len(live(queue)) == 2, "the job is gone from the queue")


def test_adaptive_giving_up_one_worker_keeps_the_job_of_its_sibling(
    queue: LocalQueue, fake_gpus: None
) -> None:  # row 5
    with LocalGPUCluster(jobs=2, **GPU, name="sibling") as cluster, Client(cluster) as client:
        cluster.wait_for_workers(4)
        sibling = next(a for a, w in cluster.scheduler_info["workers"].items() if w["name"] == "sibling-1-0")
        future = client.scatter({"only": "copy"}, workers=[sibling])
        cluster.sync(cluster.scale_down, workers=["sibling-1-1"])
        assert set(cluster.worker_spec) == {"sibling-0", "sibling-1"}
        assert client.gather(future) == {"only": "copy"}
        cluster.sync(cluster.scale_down, workers=["sibling-1-0", "sibling-1-1"])
        assert set(cluster.worker_spec) == {"sibling-0"}
        assert client.gather(future) == {"only": "copy"}


def test_a_pending_job_is_given_up_before_a_running_one(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:  # row 3
    with LocalGPUCluster(jobs=3, **GPU, name="pend") as cluster:  # the queue has GPUs for two of them
        cluster.wait_for_workers(4)
        until(
            lambda: "it waits for a free GPU, or for a free slot of this machine [Resources]" in repr(cluster.jobs),
            "the third job waits",
        )
        [waiting] = [job.name for job in cluster.jobs if job.state == "pending"]
        cluster.scale(jobs=2)
        cluster.settle()
        assert set(cluster.worker_spec) == {"pend-0", "pend-1", "pend-2"} - {waiting}
        assert len(cluster.scheduler_info["workers"]) == 4
        assert next(job.state for job in cluster.jobs if job.name == waiting) == "cancelled"


def test_a_job_that_dies_is_noticed_explained_and_replaced_under_a_new_name(  # rows 4 and 6
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(jobs=1, **GPU, name="dies") as cluster:
        cluster.wait_for_workers(2)
        victim = cluster.jobs[-1]
        with told(f"worker job {victim.id}.*cancelled"):
            queue.cancel([victim.id])
            until(lambda: set(cluster.worker_spec) == {"dies-1"}, "a replacement is planned")
            cluster.wait_for_workers(2)
        assert {w["name"] for w in cluster.scheduler_info["workers"].values()} == {"dies-1-0", "dies-1-1"}
        logs = cluster.get_logs()
        assert all(re.fullmatch(r"[\w.()\[\] -]+", title) for title in logs), "a notebook shows titles as HTML"
        assert f"dies-0 (job {victim.id})" in logs and "Start worker at" in logs[f"dies-0 (job {victim.id})"]
        assert not any("RuntimeWarning" in log for log in logs.values()), logs


def test_jobs_that_fail_again_and_again_are_not_replaced_for_ever(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The times themselves: tests/unit/test_replace_failed_jobs.py
    monkeypatch.setattr("hpcgpu.scaling.replace_failed_jobs._BACKOFF", (0.0,) * 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClusterWarning)
        with LocalGPUCluster(jobs=1, **CPU, worker_restarts=2, worker_extra_args=["--no-such-option"]) as cluster:
            with pytest.raises(ClusterError, match=r"3 worker jobs failed in a row.*worker_restarts=2") as caught:
                cluster.wait_for_workers(1)
            assert "--no-such-option" in str(caught.value), "the tail of the log is missing"
            assert "3 worker jobs failed in a row" in repr(cluster)
            assert len([j for j in cluster.jobs if j.kind == "worker"]) == 3


class Refusing(LocalQueue):
    """A queue that accepts the scheduler job and refuses workers while it is told to."""

    refuse: Exception | None = None

    def submit(self, script: Path, **arguments: Any) -> str:
        if self.refuse is not None and "scheduler" not in arguments["job_name"]:
            raise self.refuse
        return super().submit(script, **arguments)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch, queue: LocalQueue) -> Refusing:
    batch = Refusing(queue.directory)
    monkeypatch.setattr("hpcgpu.cluster.gpucluster.batch_system", lambda name: batch)
    return batch


def test_a_submit_refused_in_the_background_reaches_the_user(refusing: Refusing, until: Until) -> None:  # row 7
    with LocalGPUCluster(**CPU) as cluster:
        refusing.refuse = SubmitRefused("Slurm refused job 'x': invalid account")
        with told("invalid account"):
            cluster.scale(jobs=2)
            until(lambda: "invalid account" in repr(cluster), "the submit is refused")
        until(lambda: cluster.plan == cluster.requested == set(), "a job that does not exist no longer counts")
        with pytest.raises(ClusterError, match="invalid account"):
            cluster.wait_for_workers(2)
        refusing.refuse = None
        cluster.scale(jobs=1)
        cluster.wait_for_workers(1)


def test_a_worker_job_refused_at_the_start_is_an_error_and_leaves_no_job(refusing: Refusing) -> None:  # row 8
    refusing.refuse = SubmitRefused("Slurm refused job 'x': Invalid account or account/partition combination specified")
    with pytest.raises(ClusterError, match="Invalid account or account/partition combination"):
        LocalGPUCluster(name="refused", jobs=1, **CPU)
    assert live(refusing) == []
    assert locate("refused").submits()[0].job_id, "the scheduler job was in the queue: its log and journal stay"


def test_a_scheduler_that_cannot_start_is_an_error_with_its_log_and_leaves_no_job(queue: LocalQueue) -> None:  # row 8
    with pytest.raises(ClusterError, match=r"scheduler job \d+ .*exit code 3") as caught:
        LocalGPUCluster(jobs=1, **CPU, job_script_prologue=["echo the module is broken", "exit 3"])
    assert "the module is broken" in str(caught.value)
    assert live(queue) == []


def test_closing_while_the_scheduler_job_waits_leaves_no_job(queue: LocalQueue, home: Path) -> None:  # row 9
    async def main() -> None:
        cluster = LocalGPUCluster(
            jobs=1, gpus_per_node=1, poll_interval=0.5, quiet=True, asynchronous=True, name="waits"
        )
        starting = asyncio.ensure_future(cluster._start())
        while len(in_queue(queue, "waits")) < 2:
            await asyncio.sleep(0.05)
        await cluster.close()
        assert in_queue(queue, "waits") == []
        assert cluster.status.name == "closed"
        with pytest.raises((asyncio.CancelledError, ClusterError)):
            await starting

    blocker = block_queue(queue, home)
    asyncio.run(main())
    queue.cancel([blocker])


def test_a_cancelled_await_leaves_no_job(queue: LocalQueue, home: Path) -> None:
    async def main() -> None:
        async def start() -> None:
            await LocalGPUCluster(
                jobs=1, gpus_per_node=1, poll_interval=0.5, quiet=True, asynchronous=True, name="waits"
            )

        task = asyncio.ensure_future(start())
        while len(in_queue(queue, "waits")) < 2:
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert in_queue(queue, "waits") == []

    blocker = block_queue(queue, home)
    asyncio.run(main())
    queue.cancel([blocker])


def test_asynchronous_use(queue: LocalQueue) -> None:
    async def main() -> None:
        async with LocalGPUCluster(asynchronous=True, **CPU) as cluster:
            cluster.scale(1)
            await cluster.wait_for_workers(1)
            async with Client(cluster, asynchronous=True) as client:
                assert await client.submit(sum, [1, 2]) == 3
            logs = await cluster.get_logs()
            assert any("Start worker at" in text for text in logs.values())

    asyncio.run(main())
    assert live(queue) == []


def test_a_scheduler_that_dies_is_named_and_its_workers_are_cancelled(
    queue: LocalQueue, until: Until
) -> None:  # row 11
    cluster = LocalGPUCluster(jobs=1, **CPU)
    cluster.wait_for_workers(1)
    scheduler = next(job for job in cluster.jobs if job.kind == "scheduler")
    with told(f"scheduler job {scheduler.id}"):
        queue.cancel([scheduler.id])
        until(lambda: cluster.status.name == "failed", "the death is noticed")
    until(lambda: live(queue) == [], "the worker jobs are gone")
    with pytest.raises(ClusterError, match=f"scheduler job {scheduler.id} .*a user or the batch system cancelled it"):
        cluster.wait_for_workers(1)
    with pytest.raises(ClusterError, match="is gone"):
        cluster.scale(2)
    assert "is gone" in repr(cluster)
    cluster.close()
    assert cluster.status.name == "closed"


def test_pending_jobs_of_a_lost_cluster_are_cancelled_when_the_queue_answers_again(
    queue: LocalQueue, until: Until, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalGPUCluster(**GPU)
    blocker = block_queue(queue, home)
    cluster.scale(jobs=1)
    until(lambda: len(live(queue)) == 3, "a worker job waits")
    refused = list[int]()

    def away(job_ids: Collection[str], *, only_pending: bool = False) -> None:
        refused.append(len(list(job_ids)))
        raise BatchUnavailable("the queue does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.batch, "cancel", away)
        with told(
            "could not cancel .*: the queue does not answer. hpcgpu tries again until the queue has cancelled them"
        ):
            queue.cancel([job.id for job in cluster.jobs if job.kind == "scheduler"])
        until(lambda: len(refused) > 2, "it tries again")
        assert len(live(queue)) == 2
    until(lambda: live(queue) == [blocker], "the worker job is cancelled, before anybody closes the cluster")
    cluster.close()
    queue.cancel([blocker])


def test_a_second_manager_does_not_silence_the_first(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:  # row 12
    with LocalGPUCluster(**CPU) as cluster:

        async def listen() -> Any:
            comm = await cluster.scheduler_comm.live_comm()
            await comm.write({"op": "hpcgpu_listen"})
            await comm.read()
            return comm

        async def no_answer(client: SchedulerClient) -> None:
            raise OSError("here only the stream reports workers")

        second = cluster.sync(listen)
        monkeypatch.setattr(SchedulerClient, "workers", no_answer)
        cluster.scale(1)
        until(lambda: len(cluster.scheduler_info["workers"]) == 1, "the stream reports the worker")
        cluster.sync(second.close)


def test_jobs_keep_the_cluster_s_name_whatever_the_scheduler_s_metadata_say(queue: LocalQueue) -> None:  # row 13
    with LocalGPUCluster(**CPU, name="mine") as cluster:
        cluster._cluster_info["name"] = "other"  # as Cluster._start takes it from them
        assert cluster.name == "mine"
        cluster.scale(1)
        cluster.settle()
        assert set(cluster.worker_spec) == {"mine-0"}


def test_a_worker_that_its_nanny_restarts_does_not_cost_the_job(queue: LocalQueue, until: Until) -> None:  # row 17
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}),
        LocalGPUCluster(jobs=1, **CPU) as cluster,
    ):
        cluster.wait_for_workers(1)
        [address] = cluster.scheduler_info["workers"]
        with Client(cluster) as client:
            [pid] = client.run(os.getpid).values()
            status = lambda dask_worker: dask_worker.status.name  # noqa: E731
            until(lambda: set(client.run(status, nanny=True).values()) == {"running"}, "the nanny has started")
            psutil.Process(pid).kill()
            until(
                lambda: cluster.scheduler_info["workers"] and address not in cluster.scheduler_info["workers"],
                "a new worker",
            )
            assert client.submit(int).result() == 0
        assert [j.state for j in cluster.jobs if j.kind == "worker"] == ["running"]
        assert set(cluster.worker_spec) == {f"{cluster.name}-0"}


def test_waiting_for_more_workers_than_were_asked_for_fails_at_once(queue: LocalQueue) -> None:
    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        with pytest.raises(
            ClusterError, match=r"will have only 1 worker in 1 job, but the program waits for 5: call scale\(5\)"
        ):
            cluster.wait_for_workers(5)
        with pytest.raises(ValueError, match="positive integer"):
            cluster.wait_for_workers(0)


def test_waiting_ends_at_its_timeout(queue: LocalQueue, home: Path, fake_gpus: None) -> None:
    with LocalGPUCluster(jobs=3, **GPU, name="full") as cluster, pytest.raises(WorkerStartTimeoutError) as error:
        cluster.wait_for_workers(6, timeout="6s")
    assert re.search(r"^cluster full: .*pending", error.value.__notes__[0]), "it says what it waited for"


def test_the_scheduler_may_run_in_the_client_s_process(queue: LocalQueue) -> None:
    with LocalGPUCluster(scheduler="local", jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        assert [job.kind for job in cluster.jobs] == ["worker"]
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3
        with pytest.raises(ClusterError, match="runs in this process"):
            cluster.scheduler_script()
        assert snapshot(cluster.directory.path).manager == str(cluster.directory.manager()) != ""
        with pytest.raises(ClusterError, match=r"has no scheduler job.*Call `adapt` in that program"):
            manager_in_scheduler_job.in_scheduler_job(cluster.directory, Adapt("default", Limits(maximum=2), 5.0))
        assert not cluster.directory.detached


def test_without_security_the_user_is_told_what_that_means(queue: LocalQueue) -> None:
    with told("can run programs with your rights"), LocalGPUCluster(security=False, **CPU) as cluster:
        assert cluster.scheduler_address.startswith("tcp://")


async def identity(address: str, **credentials: Any) -> dict[str, Any]:
    """Ask a process of Dask who it is, in the protocol that all of them speak."""
    comm = await connect(address, timeout=5, **credentials)
    try:
        await comm.write({"op": "identity", "reply": True})
        answer: dict[str, Any] = await comm.read()
        return answer
    finally:
        comm.abort()


def test_nobody_without_credentials_gets_in(queue: LocalQueue) -> None:
    anonymous = ssl.create_default_context()
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        [worker] = cluster.scheduler_info["workers"].values()
        own = cluster.security.get_connection_args("client")
        for address, kind in (
            (cluster.scheduler_address, "Scheduler"),
            (*cluster.scheduler_info["workers"], "Worker"),
            (worker["nanny"], "Nanny"),
        ):
            assert asyncio.run(identity(address, **own))["type"] == kind
            for url, credentials in (
                (address.replace("tls://", "tcp://"), {}),
                (address, {"ssl_context": anonymous}),
            ):
                with pytest.raises(OSError, match=address.split("://")[1]):
                    asyncio.run(identity(url, **credentials))


def test_environment_values_arrive_as_they_are(queue: LocalQueue) -> None:
    values = {"ODD": 'a"; rm -rf "$HOME" #\n\ttwo  lines ', "TICKS": "`id` $(id) \\n 'q'", "UNICODE": "gauß – µ"}
    with LocalGPUCluster(jobs=1, **CPU, env=values) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        [found] = client.run(lambda names: {name: os.environ[name] for name in names}, list(values)).values()
        assert found == values


def test_the_same_name_twice_is_refused_and_a_closed_name_may_be_used_again(queue: LocalQueue) -> None:
    with LocalGPUCluster(name="twice", **CPU) as cluster:
        with pytest.raises(ClusterExists, match=r"'twice' exists: its jobs .* are in the queue"):
            LocalGPUCluster(name="twice", **CPU)
        assert len(live(queue)) == 1
    with LocalGPUCluster(name="twice", **CPU) as again:
        assert again.directory.path == cluster.directory.path
    kept = [p for p in cluster.directory.path.parent.iterdir() if p.name.startswith("twice~")]
    assert len(kept) == 1 and list((kept[0] / "logs").iterdir()), "the logs of the first cluster are gone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes_per_job": 2}, "the local queue has one node"),
        ({"interface": "nope0"}, r"interface: interface 'nope0' does not exist .*Interfaces with an address: .*lo"),
        ({"scheduler": "local", "interface": "nope0"}, r"'nope0' does not exist"),
        ({"scheduler": "local", "protocol": "ucx"}, "scheduler='local' does not work with protocol='ucx'"),
        (
            {"scheduler": "local", "jobs": 1, "shutdown_on_close": False},
            "scheduler='local' does not work with shutdown_on_close=False",
        ),
        ({"jobs": -1}, "jobs must be 0 or more, not -1"),
        ({"walltime": "25:99"}, "walltime='25:99' is not a time"),
        ({"memory": "10 parsecs"}, "memory='10 parsecs' is not an amount of memory"),
        ({"name": 'x"; rm -rf ~'}, "is not a valid name"),
        ({"quue": "gpu"}, "did you mean 'queue'"),
        (
            {"gpus_per_node": 1, "protocol": "ucx", "scheduler": {"gpus_per_node": 0}},
            "Give it a GPU, or use protocol='tcp'",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_submitted(
    queue: LocalQueue, home: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        LocalGPUCluster(**({"gpus_per_node": 0, "quiet": True} | options))
    assert list((queue.directory / "jobs").glob("*.json")) == []
    assert not (home / "clusters").exists() or list((home / "clusters").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "a\nb"}, r"queue='a\\nb' holds the control character"),
        ({"account": "a\0b"}, r"account='a\\x00b' holds the control character"),
        ({"queue": 'gpu"; rm -rf ~'}, "is not a valid name"),
        ({"job_script_prologue": "/no/such/file"}, "is not a file"),
        ({"job_script_prologue": ["a\nb"]}, "holds the control character"),
        ({"env": {"A": "x\0y"}}, "must be a string without NUL"),
        ({"cores": 0}, "cores must be 1 or more"),
    ],
)
def test_slurm_never_sees_what_cannot_be(
    home: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    (home / "bin").mkdir()
    for command in ("sbatch", "squeue", "scancel"):
        (home / "bin" / command).write_text(f"#!/bin/sh\ntouch {home}/asked\n")
        (home / "bin" / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(home / "bin"), prepend=":")
    with pytest.raises(OptionError, match=message):
        SlurmGPUCluster(**options)
    assert not (home / "asked").exists() and not (home / "clusters").exists()


def test_where_slurm_is_not_installed_that_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(
        BatchError, match=r"`sbatch` was not found on the PATH. hpcgpu needs Slurm's commands: run this on a login node"
    ):
        SlurmGPUCluster(queue="gpu")
    assert not (home / "clusters").exists()


@pytest.mark.parametrize("option", ["log_directory", "cluster_directory"])
def test_a_directory_that_cannot_be_written_is_refused(queue: LocalQueue, home: Path, option: str) -> None:
    (home / "file").write_text("not a directory")
    with pytest.raises(OptionError, match=f"{option}=.*{home}/file/below"):
        LocalGPUCluster(**CPU, **{option: home / "file" / "below"})
    assert list((queue.directory / "jobs").glob("*.json")) == []


def test_scale_refuses_what_cannot_be(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU) as cluster:
        for arguments, message in [
            ({"n": -1}, "n must be"),
            ({"jobs": 1.5}, "jobs must be"),
            ({"gpus": 1}, "gpus_per_node is 0"),
            ({}, "give a"),
        ]:
            with pytest.raises(OptionError, match=message):
                cluster.scale(**arguments)


def test_a_queue_that_does_not_answer_changes_nothing(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        polls: list[None] = []

        def away(self: LocalQueue, ids: object) -> None:
            polls.append(None)
            raise BatchUnavailable("the controller is down")

        with monkeypatch.context() as patch:
            patch.setattr(LocalQueue, "poll", away)
            poll_now(cluster)
            until(lambda: len(polls) >= 2, "two polls fail")
            assert cluster.status.name == "running"
            assert {job.state for job in cluster.jobs} <= {"running", "pending"}
        cluster.wait_for_workers(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["waiting for the scheduler job", "running"])
def test_a_signal_leaves_no_job(queue: LocalQueue, home: Path, until: Until, number: signal.Signals, when: str) -> None:
    waiting = when != "running"
    blocker = [block_queue(queue, home)] if waiting else []
    program = start_program({**CPU, "gpus_per_node": int(waiting), "jobs": 2, "name": "sig"})
    until(lambda: len(in_queue(queue, "sig")) == 3, "all jobs are submitted")
    if not waiting:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
    program.send_signal(number)
    program.communicate(timeout=250)
    assert program.returncode != 0
    assert running(queue) == blocker
    queue.cancel(blocker)
    until(lambda: live(queue) == [], "the queue is empty")


def test_a_program_that_ends_without_closing_leaves_no_job(queue: LocalQueue, until: Until) -> None:
    program = start_program({**CPU, "jobs": 1, "name": "ends"}, then="pass")
    out, err = program.communicate(timeout=250)
    assert (out, program.returncode) == ("up\n", 0), err
    until(lambda: live(queue) == [], "the queue is empty")


def test_jobs_may_be_told_to_outlive_the_program(queue: LocalQueue, until: Until) -> None:
    program = start_program({**CPU, "jobs": 1, "name": "stays", "shutdown_on_close": False}, then="pass")
    _, err = program.communicate(timeout=250)
    assert program.returncode == 0, err
    assert len(in_queue(queue, "stays")) == 2
    queue.cancel(live(queue))
    until(lambda: live(queue) == [], "the queue is empty")


def test_the_journal_knows_every_job_before_the_queue_does(queue: LocalQueue, home: Path) -> None:
    with LocalGPUCluster(jobs=2, **CPU, name="journal") as cluster:
        submits = ClusterDirectory(home / "clusters" / "journal").submits()
        assert {s.name for s in submits} == {"journal-scheduler", "journal-0", "journal-1"}
        assert {s.job_id for s in submits} == {job.id for job in cluster.jobs}


def test_what_is_in_the_cluster_directory_is_for_its_owner_alone(queue: LocalQueue, home: Path) -> None:
    before = os.umask(0)
    try:
        with LocalGPUCluster(jobs=1, **CPU) as cluster:
            cluster.wait_for_workers(1)
            for path in [cluster.directory.path, *cluster.directory.path.rglob("*")]:
                assert path.stat().st_mode & 0o077 == 0, path
    finally:
        os.umask(before)


def test_no_secret_stands_in_scripts_logs_arguments_or_reprs(queue: LocalQueue) -> None:
    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        # the first lines of any two keys begin alike
        secrets = (cluster.directory.tls / "key.pem").read_text().splitlines()[2:-1]
        secrets.append(cluster.directory.dashboard_token())
        own = [p for p in psutil.process_iter(["cmdline"]) if cluster.name in " ".join(p.info["cmdline"] or [])]
        texts = [
            cluster.job_script(),
            cluster.scheduler_script(),
            repr(cluster),
            repr(cluster.jobs),
            repr(cluster.options),
        ]
        texts += [*cluster.get_logs().values(), *(" ".join(p.info["cmdline"]) for p in own)]
        assert own and all(len(secret) > 20 for secret in secrets)
        assert not any(secret in text for secret in secrets for text in texts)
