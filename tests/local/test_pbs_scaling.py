"""Scaling, failures, walltimes, signals and clusters that outlive their program on a PBS that pretends, where PBS does
something of its own. What is the same for all batch systems is tested on the embedded queue and on the real Slurm.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Event, get_worker
from fake_pbs import Site

import hpcgpu
from hpcgpu import ClusterError, PBSGPUCluster
from tests.conftest import told
from tests.helpers import (
    GPU,
    a_refused_request_pauses,
    interrupt_program,
    names,
    tasks,
    workers_retire_without_a_manager,
)
from tests.helpers import PBS_CPU as CPU

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]

wait_for, _ = tasks()


def in_queue(pbs: Site) -> set[str]:
    """Names of the jobs that have not ended."""

    def act(state: dict[str, Any]) -> set[str]:
        return {job["variables"]["HPCGPU_PBS_JOB"] for job in state["jobs"].values() if "end" not in job}

    pbs.alive()
    return set(pbs.change(act))


def test_a_request_that_pbs_refuses_pauses_adaptive_scaling(
    pbs: Site, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.replace_failed_jobs._BACKOFF", (0.0,) * 5)
    with PBSGPUCluster(**CPU) as cluster:
        a_refused_request_pauses(cluster, until, "Unknown queue", cores=1, queue="nosuch")


def test_a_job_that_never_connects_is_explained_with_its_log(pbs: Site, until: Until, home: Path) -> None:
    broken = home / "broken"
    broken.touch()
    prologue = [f"if [ -e {broken} ] && [ $HPCGPU_PBS_JOB = odd-0 ]; then echo 'no such module' >&2; exit 3; fi"]
    with PBSGPUCluster(**CPU | {"worker_restarts": 0}, name="odd", job_script_prologue=prologue) as cluster:
        with told(
            r"failed: it ended with an error, exit code 3 .*none of its workers had connected(.|\n)*no such module"
        ):
            adaptive = cluster.adapt(minimum_jobs=1, maximum_jobs=1)
            until(lambda: adaptive.state.paused, "it pauses")
        broken.unlink()
        with pytest.raises(ClusterError, match="a worker job failed; it is not replaced"):
            cluster.wait_for_workers(1)
        adaptive.resume()
        cluster.wait_for_workers(1)
        assert names(cluster) == {"odd-1"}


def test_a_job_that_its_walltime_kills_is_no_failure(pbs: Site, until: Until) -> None:
    options = CPU | {"walltime": "25s", "walltime_margin": "1s", "worker_restarts": 0, "scheduler": {"walltime": "1h"}}
    with PBSGPUCluster(**options, name="killed", jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        future = client.submit(wait_for, "go")
        until(lambda: cluster.workers and "killed-0" not in cluster.workers, "another job takes its place", timeout=250)
        until(lambda: "killed-0" not in in_queue(pbs), "the first job ends")
        Event("go", client=client).set()
        assert future.result(timeout=250) != "killed-0"


def test_without_a_manager_workers_retire_before_the_walltime_that_their_job_really_has(
    pbs: Site, until: Until
) -> None:
    options = CPU | {"walltime": "60s", "walltime_margin": "30s", "scheduler": {"walltime": "1h"}}
    cluster = PBSGPUCluster(**options, name="short", jobs=1)

    def submit(script: Path) -> str:
        return pbs.run("qsub", "-l", "walltime=01:00:00", str(script)).stdout.strip()

    pbs.run("qdel", workers_retire_without_a_manager(cluster, submit, lambda: in_queue(pbs), until))
    PBSGPUCluster.from_name("short").close()


def test_a_signal_leaves_no_job(pbs: Site) -> None:
    assert interrupt_program(signal.SIGTERM, CPU | {"jobs": 2}, "PBSGPUCluster") != 0
    assert {state for state in pbs.alive().values() if state != "E"} == set()


def test_a_worker_script_may_be_submitted_by_hand(pbs: Site, until: Until) -> None:
    with PBSGPUCluster(**CPU, name="hand") as cluster:
        script = cluster.directory.path / "worker.pbs"
        assert script.read_text() == cluster.job_script()
        job = pbs.run("qsub", str(script)).stdout.strip()
        until(lambda: names(cluster) == {f"hand-by-hand-{job}"}, "the worker joins")
        pbs.run("qdel", job)


def test_groups_ask_for_what_they_need(fake_gpus: None, pbs: Site, until: Until) -> None:
    with PBSGPUCluster(**GPU | {"gpus_per_node": 1}, jobs=1, name="groups") as cluster, Client(cluster) as client:
        cluster.add_worker_group(
            "big", gpus_per_node=0, cores=2, memory="2GB", queue="workq", jobs=1, resources={"MEMORY": 100e9}
        )
        script = (cluster.directory.path / "worker-big.pbs").read_text()
        assert "#PBS -q workq" in script and "ngpus" not in script
        cluster.wait_for_workers(2)
        where = lambda: str(get_worker().name)  # noqa: E731
        assert client.submit(where, resources={"MEMORY": 70e9}, pure=False).result() == "groups-1"
        assert client.submit(where, resources={"GPU": 1}, pure=False).result() == "groups-0"
        cluster.delete_worker_group("big")
        until(lambda: in_queue(pbs) == {"groups-scheduler", "groups-0"}, "its job is given up")


def test_a_cluster_outlives_its_program_and_is_taken_up_again(pbs: Site, until: Until) -> None:
    PBSGPUCluster(**CPU, jobs=1, name="a.cluster-that-is-kept").detach()
    with hpcgpu.connect("a.cluster-that-is-kept", quiet=True) as client:
        client.wait_for_workers(1)
        client.publish_dataset(kept=client.scatter(42))
    cluster = PBSGPUCluster.from_name("a.cluster-that-is-kept")
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    assert names(cluster) == {"a.cluster-that-is-kept-0", "a.cluster-that-is-kept-1"}
    cluster.scale(jobs=1)
    cluster.settle()
    with cluster.get_client() as client:
        assert client.get_dataset("kept").result() == 42
    cluster.close()
    until(lambda: not pbs.alive(), "its jobs end")


def test_the_scheduler_job_scales_the_cluster_without_any_client(pbs: Site, home: Path, until: Until) -> None:
    def call(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "hpcgpu", *arguments], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = ("--system", "pbs", "--gpus-per-node", "0", "--cores", "1", "--memory", "1GB", "--poll-interval", "0.5")
    assert "its scheduler job scales it" in call("start", "alone", *asked, "--adapt", "--maximum-jobs", "2")
    with hpcgpu.connect("alone", quiet=True) as client:
        assert client.submit(sum, [1, 2, 3]).result() == 6
    until(lambda: in_queue(pbs) == {"alone-scheduler"}, "the idle worker job is given up", timeout=250)
    assert json.loads(call("status", "alone", "--json"))["manager"]
    assert "no job is left" in call("stop", "alone")
