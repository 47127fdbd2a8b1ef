"""The whole cluster on a real Slurm, with real `dask cuda worker` processes on pretended GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bed import SlurmBed
from bed import call as bed_call
from distributed import Client
from distributed.client import FutureCancelledError

import hpcgpu
from hpcgpu import ClusterError, SlurmGPUCluster
from hpcgpu.scaling.scheduler_restarts import STANDBY
from tests.conftest import told
from tests.helpers import (
    holds_workers,
    interrupt_program,
    messages,
    package_reaches_all_workers,
    workers_retire_without_a_manager,
)
from tests.helpers import hpcgpu as command_line
from tests.slurm.helpers import A100, CPU, in_queue, stop
from tests.slurm.strangers import REFUSED, attempts, other_clusters

pytestmark = pytest.mark.shows("Clusters: start, compute, stop; what is refused; signals")

Until = Callable[..., None]

SMALL: dict[str, Any] = A100 | {"gpus_per_node": 1, "cores": 1, "memory": "1GB"}


def node_of(cluster: SlurmGPUCluster, kind: str) -> list[str]:
    cluster.settle()
    return [job.node for job in cluster.jobs if job.kind == kind]


@pytest.mark.parametrize(("protocol", "gpus"), [("tcp", 4), ("ucx", 2)])
@pytest.mark.on_site
def test_three_jobs_of_four_gpus_shuffle_an_array(bed: SlurmBed, protocol: str, gpus: int) -> None:
    import dask.array as da

    with SlurmGPUCluster(**A100 | {"protocol": protocol, "gpus_per_node": gpus}, jobs=2) as cluster:
        cluster.scale(jobs=3)
        cluster.wait_for_workers(3 * gpus)
        workers = cluster.scheduler_info["workers"]
        assert {a.split("://")[0] for a in workers} == {"tls" if protocol == "tcp" else "ucx"}
        assert {w["name"] for w in workers.values()} == {
            f"{cluster.name}-{job}-{gpu}" for job in range(3) for gpu in range(gpus)
        }
        assert cluster.scheduler_address.startswith("tls://"), "the client speaks TLS whatever the workers speak"
        with Client(cluster) as client:
            host = np.arange(1200 * 1200, dtype="f8").reshape(1200, 1200)
            array = da.from_array(host, chunks=(100, 1200)).persist()
            columns = array.rechunk((1200, 100)).T  # every worker needs a piece of every other's
            assert np.array_equal(columns.compute(), host.T)
            received = client.run(lambda dask_worker: sum(e["total"] for e in dask_worker.transfer_incoming_log))
            assert sum(n > 0 for n in received.values()) >= 3 * gpus - 2, "the workers did not talk to each other"
            resources = {w["resources"]["GPU"] for w in cluster.scheduler_info["workers"].values()}
            assert resources == {1.0}
        assert node_of(cluster, "scheduler") == ["s0"]
    assert [job for job in bed.squeue() if job.state != "COMPLETING"] == []


@pytest.mark.parametrize("security", [True, "authenticated"])
@pytest.mark.on_site
def test_workers_of_two_nodes_compute_and_strangers_are_refused(
    bed: SlurmBed, home: Path, monkeypatch: pytest.MonkeyPatch, security: bool | str
) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    two = SMALL | {"gpus_per_node": 1, "nodes_per_job": 2, "security": security}
    with SlurmGPUCluster(**two, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        first, second = workers = list(cluster.scheduler_info["workers"])
        addresses = [cluster.scheduler_address, *workers]
        assert {address.split("://")[0] for address in addresses} == {"tls" if security is True else "authenticated"}
        data = client.submit(bytes, 1_000_000, workers=[first])
        assert client.submit(len, data, workers=[second]).result() == 1_000_000, "workers talk to each other"
        others = other_clusters(home)
        for address in addresses:
            assert attempts(address, others) == REFUSED
        assert client.submit(sum, [1, 2, 3]).result() == 6
        assert set(client.run(os.environ.get, "LC_ALL").values()) == {"C.UTF-8"}, "the user's locale reaches the job"
        assert "refused a connection from " in "".join(map(str, cluster.get_logs().values()))


@pytest.mark.on_site
def test_a_job_over_two_nodes(bed: SlurmBed) -> None:
    with SlurmGPUCluster(**A100 | {"gpus_per_node": 2}, nodes_per_job=2, jobs=1) as cluster:
        cluster.wait_for_workers()
        names = {w["name"] for w in cluster.scheduler_info["workers"].values()}
        assert names == {f"{cluster.name}-0-{node}-{gpu}" for node in range(2) for gpu in range(2)}
        assert [job.workers for job in cluster.jobs if job.kind == "worker"] == [4]
        assert len(bed.squeue()) == 2


@pytest.mark.shows("Workers that a program holds")
@pytest.mark.on_site
def test_a_program_holds_workers_and_a_job_that_drains_takes_none_of_them(bed: SlurmBed, until: Until) -> None:
    with SlurmGPUCluster(**SMALL | {"gpus_per_node": 2}, jobs=2) as cluster:
        nodes = holds_workers(cluster, lambda job_id: subprocess.run(["scancel", job_id], check=True), until)
        assert nodes <= {"n0", "n1", "n2", "n3"}


@pytest.mark.shows("A package of the user's own on all workers")
@pytest.mark.on_site
def test_a_package_reaches_present_and_later_workers(bed: SlurmBed, tmp_path: Path) -> None:
    with SlurmGPUCluster(**SMALL, jobs=1) as cluster:
        package_reaches_all_workers(cluster, tmp_path)


@pytest.mark.filterwarnings("ignore::hpcgpu.errors.ClusterWarning")
def test_two_nodes_of_a_job_are_never_one_host(bed: SlurmBed) -> None:
    """With directives that give a node two tasks, or the job one node, workers shared GPUs in silence."""
    two = SMALL | {"nodes_per_job": 2, "job_directives_skip": ["--ntasks-per-node"]}
    with SlurmGPUCluster(**two, job_extra_directives=["--ntasks-per-node=2"], jobs=1) as cluster:
        cluster.wait_for_workers(2)
        with Client(cluster) as client:
            assert sorted(client.run(os.getenv, "SLURM_LOCALID").values()) == ["0", "0"]
            assert len(set(client.run(os.getenv, "SLURMD_NODENAME").values())) == 2
        other: dict[str, Any] = {"job_directives_skip": two["job_directives_skip"] + ["--nodes"]}
        other |= {"nodes_per_job": 2, "job_extra_directives": ["--nodes=1", "--ntasks=2"]}
        cluster.add_worker_group("narrow", jobs=1, **other)
        with pytest.raises(
            ClusterError, match=r"Slurm gave this job 1 of its 2 nodes \(n\d\)\. Their workers would use the"
        ):
            cluster.wait_for_workers()


@pytest.mark.on_site
def test_the_scheduler_goes_elsewhere_when_the_preferred_node_is_taken(bed: SlurmBed, until: Until) -> None:
    command = [
        "sbatch",
        "--parsable",
        "-p",
        "shared",
        "-w",
        "s0",
        "--gres=gpu:t4:1",
        "--output=/dev/null",
        "--wrap=sleep 600",
    ]
    blocker = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    until(lambda: [j.state for j in bed.squeue()] == ["RUNNING"], "the t4 node is taken")
    with SlurmGPUCluster(**SMALL) as cluster:
        assert node_of(cluster, "scheduler")[0] in {"n0", "n1", "n2", "n3"}
    subprocess.run(["scancel", blocker], check=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue": "nope", "scheduler": {"queue": "shared"}}, "invalid partition specified: nope"),
        ({"gpus_per_node": 5}, "Requested node configuration is not available"),
        ({"scheduler": {"prefer": "nope"}}, "Invalid preferred feature specification|Invalid feature specification"),
        ({"constraint": "nope"}, "Invalid feature specification"),
    ],
)
@pytest.mark.on_site
def test_what_slurm_refuses_is_an_error_with_its_words_and_leaves_no_job(
    bed: SlurmBed, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClusterError, match=words):
        SlurmGPUCluster(**A100 | options, jobs=1)
    assert [job for job in bed.squeue() if job.state != "COMPLETING"] == []


def test_connections_across_nodes_are_reported_and_measured(bed: SlurmBed, home: Path) -> None:
    with SlurmGPUCluster(
        **SMALL | {"gpus_per_node": 2, "nodes_per_job": 2, "protocol": "ucx"}, name="woven", jobs=1
    ) as cluster:
        cluster.wait_for_workers(4)
        kinds = [
            (link.first.split("-")[2] == link.second.split("-")[2], link.same_node) for link in cluster.fabric.links
        ]
        assert sorted(kinds) == [(False, False), (True, True), (True, True)], (
            "one connection in each node, one between them"
        )
        assert cluster.fabric.rdma is False and cluster.fabric.transports
        argv = [sys.executable, "-m", "hpcgpu", "bench-fabric", "woven", "--size", "64KiB", "--host-only"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=250)
        assert "same node" in done.stdout and "across nodes" in done.stdout, done.stdout + done.stderr


@pytest.mark.on_site
def test_an_interface_that_the_node_does_not_have_is_named_with_those_it_has(bed: SlurmBed) -> None:
    with pytest.raises(
        ClusterError, match=r"interface 'nope0' does not exist on .*Interfaces with an address: .*lo \(127.0.0.1\)"
    ):
        SlurmGPUCluster(**SMALL, interface="nope0", jobs=1)
    assert [job for job in bed.squeue() if job.state != "COMPLETING"] == []


@pytest.mark.on_site
def test_a_worker_job_cancelled_from_outside_is_replaced_once(bed: SlurmBed, until: Until) -> None:
    with SlurmGPUCluster(**SMALL, jobs=1) as cluster:
        cluster.wait_for_workers(1)
        victim = next(job for job in cluster.jobs if job.kind == "worker")
        with told(f"worker job {victim.id} .*a user or the batch system cancelled it"):
            subprocess.run(["scancel", victim.id], check=True)
            until(lambda: f"{cluster.name}-1" in cluster.worker_spec, "a replacement")
        cluster.wait_for_workers(1)
        assert [job.state for job in cluster.jobs if job.kind == "worker"] == ["cancelled", "running"]
        assert "Start worker at" in cluster.get_logs()[f"{victim.name} (job {victim.id})"]


def test_a_scheduler_job_cancelled_while_it_waits_is_named_and_no_worker_job_stays(bed: SlurmBed, until: Until) -> None:
    script = [
        sys.executable,
        "-c",
        f"from hpcgpu import SlurmGPUCluster; SlurmGPUCluster(**{SMALL | {'jobs': 2, 'name': 'waits'}!r})",
    ]
    for node in ("n0", "n1", "n2", "n3", "s0"):
        bed.node_down(node)
    try:
        program = subprocess.Popen(script, stderr=subprocess.PIPE, text=True)
        until(lambda: len(bed.squeue()) == 3, "all jobs wait")
        scheduler = next(job.id for job in bed.squeue() if job.name == "waits-scheduler")
        subprocess.run(["scancel", scheduler], check=True)
        _, err = program.communicate(timeout=250)
    finally:
        for node in ("n0", "n1", "n2", "n3", "s0"):
            bed.node_up(node)
    assert program.returncode == 1
    assert f"scheduler job {scheduler} (waits-scheduler) cancelled: a user or the batch system cancelled it" in err
    assert bed.squeue() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.on_site
def test_a_signal_leaves_no_job(bed: SlurmBed, until: Until, number: signal.Signals) -> None:
    assert interrupt_program(number, SMALL | {"jobs": 2}, "SlurmGPUCluster") != 0
    assert [job for job in bed.squeue() if job.state != "COMPLETING"] == []


@pytest.mark.on_site
def test_a_worker_script_may_be_submitted_by_hand(bed: SlurmBed, until: Until) -> None:
    with SlurmGPUCluster(**SMALL) as cluster:
        script = cluster.directory.path / "worker.sbatch"
        assert script.read_text() == cluster.job_script()
        subprocess.run(["bash", "-n", str(script)], check=True)
        argv = ["sbatch", "--parsable", "--array=1-2", str(script)]
        job = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
        cluster.wait_for_workers(2)
        names = {worker["name"] for worker in cluster.scheduler_info["workers"].values()}
        assert len(names) == 2 and all(name.startswith(f"{cluster.name}-by-hand-") for name in names)
        subprocess.run(["scancel", job], check=True)


def test_without_a_manager_workers_retire_before_the_walltime_that_their_job_really_has(
    bed: SlurmBed, until: Until
) -> None:
    short: dict[str, Any] = CPU | {"walltime": "2m", "walltime_margin": "1m"}
    short["scheduler"] = short["scheduler"] | {"walltime": "1h"}
    cluster = SlurmGPUCluster(**short, name="short", jobs=1)

    def submit(script: Path) -> str:
        argv = ["sbatch", "--parsable", "--time=60", str(script)]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    later = workers_retire_without_a_manager(cluster, submit, lambda: in_queue(bed), until)
    assert sorted(in_queue(bed)) == ["short", "short-scheduler"]
    subprocess.run(["scancel", later], check=True)
    stop("short")


@pytest.mark.shows("A scheduler job that ends too early, and is restarted")
def test_worker_jobs_outlive_the_walltime_of_the_scheduler_job(bed: SlurmBed, until: Until) -> None:
    options = SMALL | {"nodes_per_job": 2, "scheduler": SMALL["scheduler"] | {"walltime": "2m"}}
    with SlurmGPUCluster(**options, jobs=1, on_scheduler_end="restart") as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        workers = {job.id for job in cluster.jobs if job.kind == "worker"}
        lost = client.submit(abs, -1, workers=["nowhere"])
        until(lambda: f"{cluster.name}-scheduler2" in in_queue(bed), "the next scheduler job is in the queue", 250)
        assert client.submit(pow, 2, 4).result() == 16 and not lost.done(), "the present one still works"
        waits = [job.reason for job in cluster.jobs if job.name.endswith("-scheduler2") and job.state == "running"]
        assert waits in ([], [STANDBY])
        with (
            told("the scheduler of cluster .* is gone and another one is started.* timeout: it reached the end of its"),
            pytest.raises(FutureCancelledError, match="timeout: it reached the end of its walltime"),
        ):
            lost.result(timeout=250)
        assert client.submit(pow, 2, 5).result(timeout=250) == 32
        cluster.wait_for_workers(2)
        assert {job.id for job in cluster.jobs if job.kind == "worker"} == workers, "no worker job was submitted again"
        # it has run for a minute before it took over, so that another one may already wait
        left = [f"{cluster.name}-0", f"{cluster.name}-scheduler2"]
        assert sorted(in_queue(bed)) in (left, [*left, f"{cluster.name}-scheduler3"])


@pytest.mark.shows("A detached cluster goes on with another scheduler")
def test_a_detached_cluster_outlives_its_scheduler_job(bed: SlurmBed, until: Until) -> None:
    SlurmGPUCluster(name="kept", jobs=1, on_scheduler_end="restart", **SMALL).detach()
    with hpcgpu.connect("kept", quiet=True) as client:
        client.wait_for_workers(1)
        before = bed_call("squeue", "--noheader", "--name=kept-0", "--format=%i")
        until(lambda: "kept-scheduler2" in in_queue(bed), "Slurm holds the next one")
        shown = command_line("status", "kept").stdout
        assert "it starts once the present scheduler job has ended [Dependency]" in shown, shown
        lost = client.submit(abs, -1, workers=["nowhere"])
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
        with pytest.raises(FutureCancelledError, match="another one is started"):
            lost.result(timeout=120)
        assert client.submit(pow, 2, 5).result(timeout=250) == 32
        client.wait_for_workers(1)
        assert bed_call("squeue", "--noheader", "--name=kept-0", "--format=%i") == before, "the same worker job"
        until(lambda: "kept-scheduler3" in in_queue(bed), "the manager in the scheduler job submits one more")
    stop("kept")


def end_of(job_id: str) -> float:
    """When the walltime of a job ends, in epoch seconds."""
    told_by_slurm = bed_call("squeue", "--noheader", f"--jobs={job_id}", "--format=%e")
    return datetime.fromisoformat(told_by_slurm.strip()).timestamp()


def test_a_cluster_whose_scheduler_job_was_suspended_works_on(bed: SlurmBed, until: Until) -> None:
    """A suspended scheduler receives nothing: that time counts for none of its limits, which are shorter here."""
    limits = {"lease": "30s", "idle_timeout": "30s", "env": {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "30s"}}
    limits["scheduler"] = CPU["scheduler"] | {"walltime": "1h"}
    with SlurmGPUCluster(**CPU | limits, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(1)
        cluster.settle()
        before = [(job.id, job.state, job.reason) for job in cluster.jobs]
        scheduler = cluster.jobs[0].id
        planned = end_of(scheduler)
        pid = client.submit(os.getpid).result()
        kept = client.scatter({"answer": 42}, hash=False)["answer"]
        with told("has not answered for 60 s: the batch system has suspended it: nothing in it runs until the batch"):
            bed_call("scontrol", "suspend", scheduler)
        shown = next(job for job in cluster.jobs if job.id == scheduler)
        assert "the batch system has suspended it" in shown.reason and shown.time_left is None
        later = client.submit(os.getpid, pure=False)
        bed_call("scontrol", "resume", scheduler)
        until(lambda: "the scheduler answers again" in messages(cluster), "it answers")
        assert later.result() == pid, "the worker is the same"
        assert kept.result() == 42, "its data is still there"
        cluster.settle()
        assert [(job.id, job.state, job.reason) for job in cluster.jobs] == before
        moved = end_of(scheduler)
        assert moved >= planned + 60, "Slurm has moved its end"

        def shown() -> bool:
            began = time.time()
            left = cluster.jobs[0].time_left
            return left is not None and began + left - 1 <= moved <= time.time() + left + 1

        until(shown, "the table shows the end that Slurm has now")


@pytest.mark.on_site
def test_the_demo_runs_on_slurm_and_leaves_no_job(bed: SlurmBed, tmp_path: Path) -> None:
    program = subprocess.run(
        [sys.executable, "-m", "hpcgpu", "demo"], capture_output=True, text=True, timeout=250, check=False
    )
    assert program.returncode == 0, program.stderr
    assert "This runs on Slurm, with one GPU per job." in program.stdout
    assert "336,776 flights (pandas alone gives the same)" in program.stdout
    assert "The queue is empty again" in program.stdout


def test_the_example_for_slurm_runs(bed: SlurmBed) -> None:
    program = [sys.executable, str(Path(__file__).parents[2] / "examples" / "slurm.py"), "gpu", "2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:2" in done.stdout and "symmetric part has mean 0.5" in done.stdout
    assert [job for job in bed.squeue() if job.state != "COMPLETING"] == []


def test_a_snapshot_shows_when_slurm_expects_to_start_a_job_and_how_long_the_others_last(
    bed: SlurmBed, until: Until
) -> None:
    whole = CPU | {"cores": 16, "walltime": "02:00:00"}  # a node has sixteen, and there are four such nodes
    whole["scheduler"] = whole["scheduler"] | {"walltime": "01:00:00"}
    with SlurmGPUCluster(**whole, name="expected", jobs=5) as cluster:
        until(lambda: [job for job in cluster.snapshot().jobs if job.expected_start], "Slurm plans the fifth job", 250)
        for picture in (cluster.snapshot(), hpcgpu.snapshot("expected")):
            [waits] = [job for job in picture.jobs if job.state == "pending"]
            works = [job for job in picture.jobs if job.state == "running" and job.kind == "worker"]
            assert waits.expected_start is not None and waits.time_left is None and waits.started is None
            ends = min(picture.time + (job.time_left or 0) for job in works)
            assert abs(waits.expected_start - ends) < 300, "it can start when the first of the others ends"
            assert all(6600 < (job.time_left or 0) <= 7200 for job in works)
            assert 3000 < (picture.time_left or 0) <= 3600, "the scheduler job's"
            assert len(works) == 4
