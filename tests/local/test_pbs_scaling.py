"""Scaling and walltimes on a PBS that pretends, where PBS does something of its own. What is the same for all batch
systems is tested on the embedded queue and on the real Slurm.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, get_worker
from fake_pbs import Site

import hpcgpu
from hpcgpu import PBSGPUCluster
from tests.helpers import (
    GPU,
    a_refused_request_pauses,
    workers_retire_without_a_manager,
)
from tests.helpers import PBS_CPU as CPU

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]


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


def test_without_a_manager_workers_retire_before_the_walltime_that_their_job_really_has(
    pbs: Site, until: Until
) -> None:
    options = CPU | {"walltime": "90s", "walltime_margin": "30s", "scheduler": {"walltime": "1h"}}
    cluster = PBSGPUCluster(**options, name="short", jobs=1)

    def submit(script: Path) -> str:
        return pbs.run("qsub", "-l", "walltime=01:00:00", str(script)).stdout.strip()

    pbs.run("qdel", workers_retire_without_a_manager(cluster, submit, lambda: in_queue(pbs), until))
    PBSGPUCluster.from_name("short").close()


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
