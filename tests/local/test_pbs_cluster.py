"""Whole clusters on a PBS that pretends: its commands behave as recorded, and the jobs really run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client
from fake_pbs import Site

from hpcgpu import ClusterError, OptionError, PBSGPUCluster, snapshot
from hpcgpu.errors import ClusterWarning
from hpcgpu.runtime.scheduler_connection import FIRST_POLL
from tests.helpers import (
    GPU,
    answers,
    fill,
    have_their_gpus,
    holds_workers,
    hpcgpu,
    names,
)
from tests.helpers import PBS_CPU as CPU

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")

Until = Callable[..., None]


def test_a_cluster_comes_up_computes_and_leaves_no_job(pbs: Site) -> None:
    with PBSGPUCluster(jobs=2, walltime="1h", name="a.cluster-with-a-long-name", **CPU) as cluster:
        cluster.wait_for_workers(2)
        assert names(cluster) == {"a.cluster-with-a-long-name-0", "a.cluster-with-a-long-name-1"}
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2, 3]).result() == 6
            assert set(client.run(os.getcwd).values()) == {str(pbs.home)}
        assert cluster.scheduler_address.startswith("tls://")
        assert {stat.S_IMODE(job.log.stat().st_mode) for job in cluster.jobs} == {0o600}, "logs are the user's own"
        assert {job.kind: job.state for job in cluster.jobs} == {"scheduler": "running", "worker": "running"}
        logs = cluster.get_logs(cluster=False)
        assert len(logs) == 3
        assert all("hpcgpu: on " in log for log in logs.values()), logs
        assert "exec " in cluster.job_script()
    assert pbs.alive() == {}
    assert {tuple(call[:1]) for call in pbs.calls("qdel")} == {("0.pbs01",)}, "one command cancels all"


def test_a_start_needs_one_submit_for_each_job_and_a_stop_one_cancel(pbs: Site) -> None:
    began = time.monotonic()
    with PBSGPUCluster(**CPU | {"poll_interval": 3600.0}, jobs=3, walltime="2h") as cluster:
        cluster.wait_for_workers(3)
        polls, lasted = [call for call in pbs.calls("qstat") if call != ["--version"]], time.monotonic() - began
        assert len(pbs.calls("qsub")) == 4
        assert polls[:1] == [["-B", "-f"]], "which queue this is, once for the cluster"
        assert len(polls) <= 2 or lasted >= FIRST_POLL, "one poll for all jobs, after the last submit"
        ids = sorted(job.id for job in cluster.jobs)
    assert pbs.calls("qdel") == [ids] and pbs.calls("qselect") == pbs.calls("qhold") == []


@pytest.mark.shows("Workers that a program holds")
def test_workers_of_gpu_jobs_have_their_gpus_and_a_program_holds_them(fake_gpus: None, pbs: Site, until: Until) -> None:
    with PBSGPUCluster(jobs=2, **GPU, name="names") as cluster:
        cluster.wait_for_workers(4)
        have_their_gpus(cluster)
        holds_workers(cluster, lambda job_id: pbs.run("qdel", job_id), until)
    assert pbs.alive() == {}


def test_a_job_of_two_nodes_brings_workers_on_each_through_pbsdsh(fake_gpus: None, pbs: Site) -> None:
    with PBSGPUCluster(jobs=1, nodes_per_job=2, **GPU, name="two", env={"GREETING": 'it\'s "me"'}) as cluster:
        cluster.wait_for_workers(4)
        assert names(cluster) == {"two-0-0-0", "two-0-0-1", "two-0-1-0", "two-0-1-1"}
        with Client(cluster) as client:
            found = client.run(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GREETING"]))
        assert {tuple(sorted(devices.split(","))) for devices, _ in found.values()} == {("0", "1"), ("2", "3")}
        assert {greeting for _, greeting in found.values()} == {'it\'s "me"'}
    assert pbs.alive() == {}


@pytest.mark.filterwarnings("ignore::hpcgpu.errors.ClusterWarning")
def test_a_job_whose_two_nodes_are_one_host_is_refused_by_its_own_script(pbs: Site) -> None:
    pbs.set(packed=True)
    words = r"PBS gave this job of 2 nodes only these hosts: n0\. Their workers would use the same GPUs"
    with (
        PBSGPUCluster(jobs=1, nodes_per_job=2, name="packed", **CPU) as cluster,
        pytest.raises(ClusterError, match=words),
    ):
        cluster.wait_for_workers(2)
    assert pbs.alive() == {}


def test_a_start_that_does_not_wait_reports_that_pbs_refused_a_worker_job(pbs: Site) -> None:
    pbs.set(queues={"workq": {"told": {"resources_max.ngpus": "4"}}})
    options = ("--system", "pbs", "--gpus-per-node", "9", "--scheduler", "gpus_per_node=0", "--no-wait")
    started = hpcgpu("start", "refused", "--jobs", "1", *options)
    words = "worker job refused-0 was not submitted: PBS refused job 'refused-0': qsub: Job violates queue and/or"
    assert started.returncode == 1 and started.stderr.count(words) == 1, started.stderr
    assert pbs.alive() == {}, "as where it waits, none is left"
    assert f"problem    {words}" in hpcgpu("status", "refused").stdout


def test_a_job_of_two_nodes_through_an_mpi_launcher(pbs: Site) -> None:
    pbs.replace(
        "mpiexec",
        '#!/bin/bash\n[ "$1 $2 $3 $4" = "-n 2 --ppn 1" ] || exit 9\nshift '
        '4\nPMI_RANK=0 "$@" &\nPMI_RANK=1 "$@" &\nwait\n',
    )
    with PBSGPUCluster(jobs=1, nodes_per_job=2, pbs_launcher="mpiexec --ppn 1", name="mpi", **CPU) as cluster:
        cluster.wait_for_workers(2)
        assert names(cluster) == {"mpi-0-0", "mpi-0-1"}


def test_waiting_jobs_are_given_up_first(fake_gpus: None, pbs: Site, until: Until) -> None:
    with PBSGPUCluster(jobs=1, **GPU, name="full") as cluster:
        cluster.wait_for_workers(2)
        cluster.scale(jobs=3)
        until(lambda: sorted(pbs.alive("full-0", "full-1", "full-2").values()) == ["Q", "R", "R"], "one job waits")
        until(
            lambda: any("no free node has the resources that it requests" in job.reason for job in cluster.jobs),
            "the user is told why",
        )
        cluster.scale(jobs=2)
        until(
            lambda: sorted(pbs.alive("full-0", "full-1", "full-2").values()) == ["R", "R"],
            "the one that waits is cancelled",
        )
        until(lambda: "cancelled" in {job.state for job in cluster.jobs}, "that is seen")
        assert {job.reason for job in cluster.jobs if job.state == "cancelled"} == {"hpcgpu cancelled it"}
        cluster.wait_for_workers(4)
        cluster.scale(jobs=1)
        until(lambda: len(pbs.alive("full-0", "full-1", "full-2")) == 1, "a running one is given up")


def test_a_suspended_job_is_reported_as_suspended(pbs: Site, until: Until) -> None:
    with PBSGPUCluster(jobs=1, name="stopped", **CPU) as cluster:
        cluster.wait_for_workers(1)
        [job_id] = pbs.alive("stopped-0")
        pbs.suspend(job_id)
        suspended = "the batch system has suspended it"
        until(lambda: any(suspended in job.reason for job in cluster.jobs if job.id == job_id), "the program knows")
        [job] = [job for job in snapshot("stopped").jobs if job.id == job_id]
        assert job.state == "running" and suspended in job.reason, "so does any other program"
        pbs.suspend(job_id, False)
        until(lambda: not any(job.reason for job in cluster.jobs), "it was resumed")


def test_a_request_that_no_node_can_fill_is_reported(pbs: Site) -> None:
    """Whatever the poll interval is. What else PBS reports of such requests: tests/queue/test_pbs_batch.py."""
    options = CPU | {"scheduler": {"cores": 1, "select_extra": "gpu_type=a100"}, "poll_interval": 3600.0}
    words = r"no node of its queue is large enough.*no node has ncpus=1.*gpu_type=h100"
    with (
        PBSGPUCluster(**options, jobs=1, select_extra="gpu_type=h100") as cluster,
        pytest.raises(ClusterError, match=f"will never start: {words}"),
    ):
        cluster.wait_for_workers(1)
    assert pbs.alive() == {}


@pytest.mark.timeout(180)  # a start that does not notice it would wait for ever
def test_a_scheduler_job_that_can_never_run_is_reported_and_its_held_workers_are_deleted(pbs: Site) -> None:
    options = CPU | {"name": "big", "scheduler": {"cores": 999}, "poll_interval": 3600.0}
    with pytest.raises(ClusterError, match=r"scheduler job 0\.pbs01 \(big-scheduler\) will never start.*Can Never Run"):
        PBSGPUCluster(jobs=2, **options)
    assert pbs.alive() == {}
    assert pbs.run("qstat", "-x", "-f", "1.pbs01").stdout.count("depend = after:0.pbs01@pbs01") == 1
    with pytest.raises(ClusterError, match="will never start"):
        PBSGPUCluster(jobs=0, **options)


def test_workers_of_a_scheduler_job_that_is_deleted_while_it_waits_are_deleted_too(
    fake_gpus: None, pbs: Site, home: Path, until: Until
) -> None:
    blocker = fill(pbs, home)

    def somebody() -> None:
        until(lambda: sorted(pbs.alive().values()) == ["H", "H", "Q", "R"], "two worker jobs are held")
        pbs.run("qdel", "1.pbs01")

    deletion = threading.Thread(target=somebody)
    deletion.start()
    with pytest.raises(ClusterError, match=r"scheduler job 1\.pbs01 .*cancelled"):
        PBSGPUCluster(jobs=2, name="gone", **GPU | {"scheduler": {"gpus_per_node": 1}})
    deletion.join()
    assert set(pbs.alive()) == {blocker}, "PBS holds them for ever: the cluster deletes them"
    pbs.run("qdel", blocker)


def test_a_server_that_is_away_for_a_while_costs_nothing(pbs: Site, until: Until) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClusterWarning)
        with PBSGPUCluster(jobs=1, name="away", **CPU) as cluster:
            cluster.wait_for_workers(1)
            cluster.batch.sleep = lambda seconds: None
            pbs.set(down=True)
            until(lambda: not answers(cluster), "a poll fails")
            assert {job.state for job in cluster.jobs} == {"running"}
            pbs.set(down=False)
            cluster.scale(jobs=2)
            cluster.wait_for_workers(2)


def test_a_refusal_is_in_pbs_s_own_words(pbs: Site) -> None:
    with pytest.raises(ClusterError, match=r"PBS refused job .*qsub: Unknown queue"):
        PBSGPUCluster(queue="nosuch", **CPU)
    with pytest.raises(
        ClusterError, match=r"Job violates queue and/or server resource limits\. Check `walltime` first"
    ):
        PBSGPUCluster(queue="gpu", walltime="2h", **CPU)
    assert pbs.alive() == {}


def test_where_pbs_keeps_no_history_the_ends_are_known_as_far_as_anybody_can_record_them(
    pbs: Site, until: Until
) -> None:
    pbs.set(history=False)
    with PBSGPUCluster(jobs=2, name="unkept", **CPU) as cluster:
        cluster.wait_for_workers(2)
        [job_id] = pbs.alive("unkept-1")
        pbs.run("qdel", job_id)
        until(lambda: any(job.state == "unknown" for job in cluster.jobs), "the queue has forgotten it")
    with PBSGPUCluster(name="unkept2", **CPU) as cluster:
        assert hpcgpu("stop", "unkept2").returncode == 0
    forgotten = "the queue has forgotten how it ended"
    for name, ends in {
        "unkept": {"unkept-scheduler": "with the cluster", "unkept-0": "with the cluster", "unkept-1": forgotten},
        "unkept2": {"unkept2-scheduler": "with the cluster"},
    }.items():
        bills = json.loads(hpcgpu("report", name, "--json").stdout)["jobs"]
        assert {job["name"]: job["reason"] for job in bills} == ends
        assert all(job["ended"] is not None for job in bills)
        shown = hpcgpu("status", name).stdout
        assert "the queue does not know it" not in shown
        assert shown.count(forgotten) == list(ends.values()).count(forgotten), shown


def test_slurm_s_options_are_refused_before_anything_is_submitted(pbs: Site) -> None:
    with pytest.raises(OptionError, match="constraint is an option of Slurm jobs: set select_extra"):
        PBSGPUCluster(constraint="gpu", **CPU)
    assert pbs.calls("qsub") == []


def test_a_scheduler_in_this_program_leaves_no_jobs_behind(pbs: Site) -> None:
    with pytest.raises(OptionError, match="scheduler='local' does not work with shutdown_on_close=False"):
        PBSGPUCluster(scheduler="local", jobs=1, shutdown_on_close=False, **CPU)
    assert pbs.calls("qsub") == []


def test_the_demo_runs_on_pbs(fake_gpus: None, pbs: Site) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcgpu", "demo", "--system", "pbs"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0 and "This runs on PBS, with one GPU per job." in done.stdout, done.stdout + done.stderr
    assert "no job of this cluster is left" in done.stdout and pbs.alive() == {}
