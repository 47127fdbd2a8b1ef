"""Scaling through a real queue: each kind of failure, walltimes, a controller that is away, a client that is killed,
worker groups.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bed import SlurmBed
from bed import call as bed_call
from distributed import Client, Event, get_worker

from hpcgpu import ClusterError, SlurmGPUCluster
from tests.conftest import told
from tests.helpers import (
    a_refused_request_pauses,
    answers,
    kill_program,
    let_go,
    messages,
    poll_now,
    set_grace,
    tasks,
    travels,
    waiting,
    waits_for,
)
from tests.slurm.helpers import CPU, in_queue, submits

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]

ADAPT: dict[str, Any] = {"idle_timeout": "2s", "target_duration": "1s"}


wait_for, slow = tasks(0.5)


def test_adaptive_brings_jobs_for_work_and_gives_them_back(bed: SlurmBed, until: Until) -> None:
    with SlurmGPUCluster(**CPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(maximum_jobs=2, **ADAPT)
        futures = client.map(slow, range(40))
        assert client.gather(futures) == list(range(40))
        assert len(submits(cluster)) == 2
        del futures
        until(lambda: in_queue(bed) == [f"{cluster.name}-scheduler"], "idle jobs are given back")
        assert adaptive.state.expected_wait is not None and "draining" in adaptive.log[-1][1]


def test_a_request_that_slurm_refuses_pauses_adaptive_scaling(
    bed: SlurmBed, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.replace_failed_jobs._BACKOFF", (0.0,) * 5)
    with SlurmGPUCluster(**CPU) as cluster:
        a_refused_request_pauses(cluster, until, "Invalid feature specification", constraint="nope")


def test_a_job_that_never_connects_is_explained_with_its_log(bed: SlurmBed, until: Until, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    prologue = [f"if [ -e {broken} ] && [ $SLURM_JOB_PARTITION = gpu ]; then echo 'no such module' >&2; exit 3; fi"]
    with SlurmGPUCluster(**CPU | {"worker_restarts": 0}, job_script_prologue=prologue) as cluster:
        with told(r"failed: its script failed.*none of its workers had connected(.|\n)*no such module"):
            adaptive = cluster.adapt(minimum_jobs=1, maximum_jobs=1)
            until(lambda: adaptive.state.paused, "it pauses")
        assert [job.state for job in cluster.jobs] == ["running", "failed"]
        broken.unlink()
        with pytest.raises(ClusterError, match="a worker job failed; it is not replaced"):
            cluster.wait_for_workers(1)
        adaptive.resume()
        cluster.wait_for_workers(1)


def test_a_job_that_its_walltime_kills_is_no_failure_and_its_task_is_not_blamed(bed: SlurmBed, until: Until) -> None:
    environment = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    options = CPU | {
        "walltime": "00:01:00",
        "walltime_margin": "1s",
        "worker_restarts": 0,
        "env": environment,
        "scheduler": {"queue": "shared", "walltime": "1h"},
    }
    with SlurmGPUCluster(**options, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        [first] = cluster.workers
        future = client.submit(wait_for, "go")
        until(lambda: any(client.processing().values()), "the task runs")
        until(lambda: cluster.workers and first not in cluster.workers, "another job takes its place", timeout=250)
        until(lambda: first not in in_queue(bed), "the first job ends", timeout=250)
        cluster.wait_for_workers(1)
        Event("go", client=client).set()
        assert future.result(timeout=250) != first


def test_a_job_whose_walltime_an_operator_extends_works_on_after_its_old_end(bed: SlurmBed, until: Until) -> None:
    """Slurm since 23.02 gives a job its end at the start only: a later end is in the queue alone."""
    tells = "export SLURM_JOB_END_TIME=$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs=$SLURM_JOB_ID --format=%e)"
    options = CPU | {
        "walltime": "00:01:00",
        "walltime_margin": "10s",
        "job_script_prologue": [tells],
        "scheduler": {"queue": "shared", "walltime": "1h"},
    }
    with SlurmGPUCluster(**options) as cluster, Client(cluster) as client:
        cluster.adapt(minimum_jobs=1, maximum_jobs=1)
        cluster.wait_for_workers(1)
        cluster.settle()
        [job] = cluster.workers.values()
        old_end = job.queue_status.end
        future = client.submit(wait_for, "go")
        bed_call("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=10")
        until(lambda: "the walltime of this job was extended by 540 s" in job.log.read_text(), "its log says so")
        until(lambda: time.time() > old_end, "the old end is over")
        assert {name: each.job_id for name, each in cluster.workers.items()} == {job.name: job.job_id}
        assert submits(cluster) == [job.job_id] and in_queue(bed).count(job.name) == 1
        assert [each.time_left > 400 for each in cluster.jobs if each.kind == "worker"] == [True]
        Event("go", client=client).set()
        assert future.result() == job.name
        assert "its workers retire" not in job.log.read_text() + messages(cluster)


def test_a_job_that_is_preempted_is_no_failure_and_comes_back(bed: SlurmBed, until: Until) -> None:
    environment = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with SlurmGPUCluster(**CPU, jobs=1, worker_restarts=0, env=environment) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        cluster.settle()
        [job] = cluster.workers.values()
        future = client.submit(wait_for, "go")
        until(lambda: any(client.processing().values()), "the task runs")
        urgent = [
            "sbatch",
            "--parsable",
            "-p",
            "urgent",
            "-w",
            job.queue_status.node,
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 600",
        ]
        with told(r"preempted: a job of higher priority preempted it(.|\n)*hpcgpu replaces it"):
            blocker = subprocess.run(urgent, check=True, capture_output=True, text=True).stdout.strip()
            until(
                lambda: job.name not in cluster.workers and cluster.workers, "another job takes its place", timeout=250
            )
        cluster.wait_for_workers(1)
        Event("go", client=client).set()
        assert future.result(timeout=250) != job.name
        subprocess.run(["scancel", blocker], check=True)


@travels
def where(index: int) -> str:
    """The worker that runs a task."""
    time.sleep(0.1)
    return str(get_worker().name)


@travels
def has_begun(dask_worker: Any) -> bool:
    """Whether the call runs."""
    return hasattr(dask_worker, "begun")


@pytest.fixture
def grace(bed: SlurmBed) -> Iterator[None]:
    """A partition that gives preempted jobs four minutes."""
    bed.set_partition("gpu", "GraceTime=240")
    yield
    bed.set_partition("gpu", "GraceTime=0")


@pytest.mark.parametrize("nodes", [1, 2])
def test_work_and_data_have_the_time_of_grace_when_their_job_is_preempted(
    bed: SlurmBed, grace: None, until: Until, nodes: int
) -> None:
    """Slurm warns the processes of a job step by SIGTERM. Of other jobs the manager sees the new end."""
    options = CPU | {"nodes_per_job": nodes, "walltime": "1h", "jobs": 1}
    with ThreadPoolExecutor(1) as threads, SlurmGPUCluster(**options) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(nodes)
        cluster.settle()
        [job] = cluster.workers.values()
        names = {str(name): address for address, name in job.workers.items()}
        name, address = next(iter(names.items()))
        [sent] = client.scatter([b"data"], workers=[address])
        call = threads.submit(client.run, waits_for, "go", workers=[address])
        until(lambda: client.run(has_begun, workers=[address])[address], "it runs")
        node = bed_call("squeue", "-h", "-j", str(job.job_id), "-o", "%B").strip()
        preempts = ["-p", "urgent", "-w", node, "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
        blocker = bed_call("sbatch", "--parsable", *preempts).strip()
        try:
            until(
                lambda: cluster.workers and job.name not in cluster.workers,
                lambda: f"another job takes its place: {bed_call('squeue', '-o', '%i %j %T %R %e')}{messages(cluster)}",
                timeout=250,
            )
            warned = "the batch system warns that this job will end"  # a moment after the manager may have seen it
            until(lambda: nodes == 1 or warned in job.log.read_text(), "its log says so")
            until(lambda: not set(names.values()) & set(client.who_has(sent)[sent.key]), "data moves")
            assert client.submit(where, 1).result() not in names, "its workers take no new tasks"
            assert not call.done() and job.name in in_queue(bed)
            client.run(let_go, "go", workers=[address])
            assert call.result() == {address: name}
            until(lambda: job.name not in in_queue(bed), "then it ends")
            assert client.gather(sent) == b"data"
        finally:
            subprocess.run(["scancel", blocker], check=True)


def test_a_job_that_takes_too_much_memory_is_reported_with_its_limit(bed: SlurmBed, until: Until) -> None:
    greedy = f"{sys.executable} -c 'import time; x = bytearray(3 * 2**30); time.sleep(60)'"
    prologue = [f"if [ $SLURM_JOB_PARTITION = gpu ]; then {greedy}; fi"]
    match = r"it used more memory than it requested \(0.93 GiB per node\)(.|\n)*Exceeded job memory limit"
    with (
        SlurmGPUCluster(**CPU | {"worker_restarts": 0}, job_script_prologue=prologue) as cluster,
        told(match),
    ):
        cluster.scale(jobs=1)
        until(lambda: "a worker job failed; it is not replaced" in repr(cluster), "the job ends", timeout=250)


def test_a_node_that_fails_is_avoided_and_its_task_run_elsewhere(bed: SlurmBed, until: Until) -> None:
    environment = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with SlurmGPUCluster(**CPU, jobs=1, env=environment) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        cluster.settle()
        [job] = cluster.workers.values()
        node = job.queue_status.node
        future = client.submit(wait_for, "go")
        until(lambda: any(client.processing().values()), "the task runs")
        try:
            with told(r"node_fail: its node failed"):
                bed.node_down(node)
                until(
                    lambda: job.name not in cluster.workers and cluster.workers,
                    "another job takes its place",
                    timeout=250,
                )
            cluster.wait_for_workers(1)
            cluster.settle()
            [other] = cluster.workers.values()
            assert other.queue_status.node != node
            shown = subprocess.run(["scontrol", "show", "job", str(other.job_id)], check=True, capture_output=True)
            assert f"ExcNodeList={node}\n".encode() in shown.stdout
            Event("go", client=client).set()
            assert future.result(timeout=250) == other.name
        finally:
            bed.node_up(node)


def test_a_controller_that_is_away_loses_no_job_and_doubles_none(
    bed: SlurmBed, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.replace_failed_jobs._BACKOFF", (0.0, 1.0, 1.0, 1.0, 1.0))
    with SlurmGPUCluster(**CPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(maximum_jobs=2, **ADAPT | {"idle_timeout": "10m"})
        assert client.submit(slow, 1).result() == 1
        bed.stop_controller()
        try:
            until(lambda: not answers(cluster), "a poll fails", timeout=250)
            assert client.submit(sum, [1, 2]).result() == 3
            assert cluster.status.name == "running"
            futures = client.map(wait_for, ["go"] * 100, pure=False)  # asks for the second job, until it is there
            until(lambda: "(the queue does not answer: " in waiting(cluster, 2), "a poll fails", timeout=250)
        finally:
            bed.start_controller()
        until(lambda: adaptive.state.running == 2, "scaling goes on", timeout=250)
        Event("go", client=client).set()
        assert len(client.gather(futures)) == 100
        until(lambda: answers(cluster), "a poll succeeds", timeout=250)
        assert {job.state for job in cluster.jobs} == {"running"}
        names = in_queue(bed)
        assert len(names) == len(set(names)) == 3, "a job was submitted twice"


def test_answers_of_squeue_that_cannot_be_change_nothing(
    bed: SlurmBed, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.run(["which", "squeue"], check=True, capture_output=True, text=True).stdout.strip()
    fault = tmp_path / "fault"
    wrapper = tmp_path / "squeue"
    wrapper.write_text(
        f"#!/bin/sh\ncase $(cat {fault} 2>/dev/null) in\n"
        f'slow) sleep 20; echo xxxxxx >> {tmp_path}/seen; exec {real} "$@";;\n'
        f'empty) echo x >> {tmp_path}/seen; exit 0;;\ncut) {real} "$@" | cut -c1-9; echo '
        f'x >> {tmp_path}/seen;;\n*) exec {real} "$@";;\nesac\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with SlurmGPUCluster(**CPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        set_grace(cluster, 600.0)
        for kind in ("empty", "cut", "slow"):
            (tmp_path / "seen").write_text("")
            fault.write_text(kind)
            until(lambda: poll_now(cluster) or len((tmp_path / "seen").read_text()) >= 6, "three such answers")
            assert client.submit(sum, [1, 2], pure=False).result() == 3
            assert cluster.status.name == "running" and len(cluster.workers) == 1
        fault.unlink()
        until(
            lambda: poll_now(cluster) or {j.state for j in cluster.jobs} == {"running"},
            "all is as it was",
        )
        assert len(submits(cluster)) == 1


def test_when_the_client_is_killed_both_kinds_of_job_end_by_themselves(bed: SlurmBed, until: Until) -> None:
    kill_program(CPU | {"jobs": 1, "lease": 20}, "SlurmGPUCluster")
    until(lambda: not in_queue(bed), "the lease ends")


def test_groups_ask_for_what_they_need(bed: SlurmBed, until: Until) -> None:
    with (
        SlurmGPUCluster(**CPU | {"gpus_per_node": 2, "gpu_type": "a100"}, jobs=1) as cluster,
        Client(cluster) as client,
    ):
        cluster.add_worker_group(
            "big", gpus_per_node=0, cores=2, memory="2GB", queue="shared", jobs=1, resources={"MEMORY": 100e9}
        )
        script = (cluster.directory.path / "worker-big.sbatch").read_text()
        assert "#SBATCH --partition=shared" in script and "--gres" not in script
        cluster.wait_for_workers(3)
        where = lambda: str(get_worker().name)  # noqa: E731
        assert client.submit(where, resources={"MEMORY": 70e9}, pure=False).result() == f"{cluster.name}-1"
        assert client.submit(where, resources={"GPU": 1}, pure=False).result().startswith(f"{cluster.name}-0-")
        cluster.delete_worker_group("big")
        until(
            lambda: sorted(in_queue(bed)) == sorted([f"{cluster.name}-scheduler", f"{cluster.name}-0"]),
            "its job is given up",
        )
