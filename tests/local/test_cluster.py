"""The whole cluster on the embedded queue: what the user sees, and what is broken in plain SpecCluster.

Row numbers are those of the list of SpecCluster's traps in docs/architecture.md; each such test fails on a plain
SpecCluster.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, SpecCluster
from distributed.deploy.cluster import Cluster
from distributed.exceptions import WorkerStartTimeoutError

from hpcgpu import ClusterError, LocalGPUCluster, OptionError, SlurmGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.dask_scheduler.scheduler_client import SchedulerClient
from hpcgpu.errors import BatchError, ClusterExists, SubmitRefused
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.existing_clusters.snapshot import snapshot
from hpcgpu.orders import manager_in_scheduler_job
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt
from tests.conftest import live, running, told
from tests.helpers import CPU, GPU, block_queue, decide_now, have_their_gpus, in_queue, names, start_program

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")

Until = Callable[..., None]


def test_a_cluster_comes_up_computes_and_leaves_no_job(queue: LocalQueue) -> None:
    with LocalGPUCluster(jobs=2, **CPU, name="journal") as cluster:
        submits = cluster.directory.submits()
        assert {s.name for s in submits} == {"journal-scheduler", "journal-0", "journal-1"}, "the journal knows all"
        assert {s.job_id for s in submits} == {job.id for job in cluster.jobs}
        cluster.wait_for_workers(2)
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2, 3]).result() == 6
            assert cluster.scheduler_address.startswith("tls://")
            assert all(address.startswith("tls://") for address in cluster.scheduler_info["workers"])
        assert {job.kind: job.state for job in cluster.jobs} == {"scheduler": "running", "worker": "running"}
        assert "workers=2/2" in repr(cluster)
        more = r"will have only 2 workers in 2 jobs, but the program waits for 5: call scale\(5\)"
        for wrong, error, message in ((5, ClusterError, more), (0, ValueError, "positive integer")):
            with pytest.raises(error, match=message):
                cluster.wait_for_workers(wrong)
        for arguments, message in WRONG_SIZES:
            with pytest.raises(OptionError, match=message):
                cluster.scale(**arguments)
        assert cluster.plan == cluster.requested == {"journal-0", "journal-1"}, "what Dask means by them"
    assert live(queue) == []
    assert not cluster.directory.tls.exists(), "credentials outlived the cluster"
    assert (cluster.directory.path / "journal.jsonl").exists()


WRONG_SIZES: list[tuple[dict[str, Any], str]] = [
    ({"n": -1}, "n must be"),
    ({"jobs": 1.5}, "jobs must be"),
    ({"gpus": 1}, "gpus_per_node is 0"),
    ({}, "give a"),
]


@pytest.fixture(scope="module")
def shared(shared_queue: LocalQueue, fake_gpus: None) -> Iterator[LocalGPUCluster]:
    with LocalGPUCluster(jobs=2, **GPU, name="shared") as cluster:
        yield cluster


@pytest.fixture
def two_jobs(shared: LocalGPUCluster) -> LocalGPUCluster:
    """A cluster with two jobs of two GPUs, all that the queue has, for the tests that leave some of its jobs."""
    shared.scale(jobs=2)
    shared.wait_for_workers(4)
    return shared


def test_workers_of_gpu_jobs_are_named_after_their_job_and_have_a_gpu_resource(two_jobs: LocalGPUCluster) -> None:
    have_their_gpus(two_jobs)


def test_scale_counts_workers_and_rounds_up_to_jobs(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:  # rows 1 and 15
    blocker = block_queue(queue, home)  # the jobs need not start
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
    queue.cancel([blocker])


def test_adaptive_with_several_workers_a_job_does_not_oscillate(
    two_jobs: LocalGPUCluster, until: Until
) -> None:  # rows 1, 16
    jobs = set(two_jobs.worker_spec)
    adaptive = two_jobs.adapt(minimum=4, maximum=4, idle_timeout="100ms")
    with Client(two_jobs) as client:
        for _ in range(20):
            client.submit(int, pure=False).result()
            decide_now(two_jobs)
    until(lambda: adaptive.state.running == 2, "both jobs run")
    assert [text for _, text in adaptive.log if "draining" in text or "cancelling" in text] == []
    assert set(two_jobs.worker_spec) == jobs, "jobs were replaced"
    adaptive.stop()


def test_a_pending_job_is_given_up_before_a_running_one(two_jobs: LocalGPUCluster, until: Until) -> None:  # row 3
    begun = set(two_jobs.worker_spec)
    two_jobs.scale(jobs=3)
    until(
        lambda: "it waits for a free GPU, or for a free slot of this machine [Resources]" in repr(two_jobs.jobs),
        "the third job waits",
    )
    [waiting] = [job.name for job in two_jobs.jobs if job.state == "pending"]
    with pytest.raises(WorkerStartTimeoutError) as error:
        two_jobs.wait_for_workers(6, timeout="1s")
    assert re.search(r"^cluster shared: .*pending", error.value.__notes__[0]), "it says what it waited for"
    two_jobs.scale(jobs=2)
    two_jobs.settle()
    assert set(two_jobs.worker_spec) == begun
    assert len(two_jobs.scheduler_info["workers"]) == 4
    assert next(job.state for job in two_jobs.jobs if job.name == waiting) == "cancelled"


def test_adaptive_giving_up_one_worker_keeps_the_job_of_its_sibling(two_jobs: LocalGPUCluster) -> None:  # row 5
    kept, given_up = sorted(two_jobs.worker_spec)
    with Client(two_jobs) as client:
        workers = two_jobs.scheduler_info["workers"]
        sibling = next(address for address, about in workers.items() if about["name"] == f"{given_up}-0")
        future = client.scatter({"only": "copy"}, workers=[sibling])
        two_jobs.sync(two_jobs.scale_down, workers=[f"{given_up}-1"])
        assert set(two_jobs.worker_spec) == {kept, given_up}
        assert client.gather(future) == {"only": "copy"}
        two_jobs.sync(two_jobs.scale_down, workers=[f"{given_up}-0", f"{given_up}-1"])
        assert set(two_jobs.worker_spec) == {kept}
        assert client.gather(future) == {"only": "copy"}


def test_scaling_down_moves_the_data_of_all_workers_of_the_job(
    two_jobs: LocalGPUCluster, shared_queue: LocalQueue, until: Until
) -> None:  # row 2
    with Client(two_jobs) as client:
        futures = client.scatter(list(range(40)))
        assert len(set(map(tuple, client.who_has(futures).values()))) == 4
        two_jobs.scale(jobs=1)
        until(lambda: len(two_jobs.scheduler_info["workers"]) == 2, "two workers left")
        assert client.gather(futures) == list(range(40))
        until(lambda: len(live(shared_queue)) == 2, "the job is gone from the queue")


def test_a_job_that_dies_is_noticed_explained_and_replaced_under_a_new_name(  # rows 4 and 6
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(jobs=1, **GPU, name="dies") as cluster:
        cluster.wait_for_workers(2)
        victim = cluster.jobs[-1]
        with told(f"worker job {victim.id}.*cancelled"):
            queue.cancel([victim.id])
            until(lambda: set(cluster.worker_spec) == {"dies-1"}, "a replacement is planned")
            until(lambda: names(cluster) == {"dies-1-0", "dies-1-1"}, "the workers of the replacement are there")
        logs = cluster.get_logs()
        assert all(re.fullmatch(r"[\w.()\[\] -]+", title) for title in logs), "a notebook shows titles as HTML"
        assert f"dies-0 (job {victim.id})" in logs and "Start worker at" in logs[f"dies-0 (job {victim.id})"]
        assert not any("RuntimeWarning" in log for log in logs.values()), logs


class Refusing(LocalQueue):
    """A queue that accepts the scheduler job and refuses workers while that is requested."""

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


def test_a_scheduler_job_that_does_not_write_its_contact_is_an_error_and_leaves_no_job(queue: LocalQueue) -> None:
    hangs = {"job_script_prologue": ["sleep 600"]}
    with pytest.raises(ClusterError, match=r"runs on \S+, but published no contact within 2 s.* set cluster_directory"):
        LocalGPUCluster(jobs=1, **CPU, death_timeout="2s", scheduler=hangs)
    assert live(queue) == []


def test_the_start_the_plan_and_the_end_of_spec_cluster_never_run(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for kind, name in ((SpecCluster, "_start"), (SpecCluster, "_correct_state"), (SpecCluster, "_close")):
        monkeypatch.setattr(kind, name, lambda *_, name=name: ran.append(name))
    for name in ("_start", "_close"):
        monkeypatch.setattr(Cluster, name, lambda *_, name=name: ran.append(name))

    async def in_a_notebook() -> None:  # which has an event loop, and its cluster another one
        with LocalGPUCluster(**CPU) as cluster:
            cluster.scale(jobs=1)
            cluster.wait_for_workers(1)

    async def asynchronous() -> None:
        made = LocalGPUCluster(**CPU, asynchronous=True)
        async with made as cluster, Client(cluster, asynchronous=True):
            await cluster.scale(jobs=1)
            await cluster.wait_for_workers(1)
        await cluster.close()

    asyncio.run(in_a_notebook())
    asyncio.run(asynchronous())
    with LocalGPUCluster(**CPU) as cluster, cluster.get_client() as client:
        cluster.close()
    cluster.close()
    assert client.status == "closed" and cluster.status.name == "closed" and live(queue) == [] and not ran


def test_closing_while_the_scheduler_job_waits_leaves_no_job(queue: LocalQueue, home: Path) -> None:  # row 9
    async def main() -> None:
        cluster = LocalGPUCluster(
            jobs=1, gpus_per_node=1, poll_interval=0.5, quiet=True, asynchronous=True, name="waits"
        )
        starting = asyncio.ensure_future(cluster._begin())
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


def test_jobs_keep_the_cluster_s_name_whatever_the_scheduler_s_metadata_contain(queue: LocalQueue) -> None:  # row 13
    with LocalGPUCluster(**CPU, name="mine") as cluster:
        cluster._cluster_info["name"] = "other"  # as Cluster._start takes it from them
        assert cluster.name == "mine"
        cluster.scale(1)
        cluster.settle()
        assert set(cluster.worker_spec) == {"mine-0"}


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


def test_without_security_the_user_is_shown_what_that_means(queue: LocalQueue) -> None:
    with told("can run programs with your rights"), LocalGPUCluster(security=False, **CPU) as cluster:
        assert cluster.scheduler_address.startswith("tcp://")


def test_environment_values_arrive_as_they_are(queue: LocalQueue) -> None:
    values = {"ODD": 'a"; rm -rf "$HOME" #\n\ttwo  lines ', "TICKS": "`id` $(id) \\n 'q'", "UNICODE": "gauß – µ"}
    with LocalGPUCluster(jobs=1, **CPU, env=values) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        [found] = client.run(lambda names: {name: os.environ[name] for name in names}, list(values)).values()
        assert found == values


def test_a_job_that_is_submitted_after_its_script_was_edited_uses_the_edited_one(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        script = cluster.directory.path / "worker.sh"
        script.write_text(script.read_text().replace("\numask 077\n", "\numask 077\nexport EDITED=yes\n"))
        cluster.scale(jobs=1)
        cluster.wait_for_workers(1)
        assert [*client.run(lambda: os.environ.get("EDITED")).values()] == ["yes"]
        assert cluster.job_script() == script.read_text()


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


def test_where_slurm_is_not_installed_that_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("waiting for the scheduler job", signal.SIGINT),
        ("waiting for the scheduler job", signal.SIGTERM),
        ("running", signal.SIGTERM),  # by the other signals: tests/slurm/test_slurm_cluster.py, test_exit.py
    ],
)
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
