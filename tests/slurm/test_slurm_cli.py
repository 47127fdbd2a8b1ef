"""The command line and clusters that outlive their program, on a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from bed import SlurmBed

import hpcgpu
from hpcgpu import SlurmGPUCluster
from tests.helpers import printed

pytestmark = pytest.mark.shows("The command line; a cluster that another program takes over")

Until = Callable[..., None]

ASKED = (
    "--queue",
    "gpu",
    "--walltime",
    "30m",
    "--gpus-per-node",
    "2",
    "--cores",
    "1",
    "--protocol",
    "tcp",
    "--poll-interval",
    "1",
)


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hpcgpu", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=250, env=os.environ | environment)


def running(bed: SlurmBed) -> int:
    return len([job for job in bed.squeue() if job.state != "COMPLETING"])


def status(name: str) -> dict[str, Any]:
    done = call("status", name, "--json")
    assert done.returncode == 0, done.stderr
    return dict(printed("status", done.stdout))


def test_start_scale_and_stop_and_take_up_between(bed: SlurmBed, home: Path, until: Until) -> None:
    done = call("start", "stays", *ASKED, "--jobs", "2", "--scheduler", "queue=shared")
    assert done.returncode == 0, done.stderr
    with hpcgpu.connect("stays", quiet=True) as client:
        client.wait_for_workers(4)
        client.publish_dataset(kept=client.scatter(42))
    found = status("stays")
    assert (found["state"], found["workers"], found["gpus"]) == ("running", 4, 4)
    assert all(job["node"] for job in found["jobs"])
    cluster = SlurmGPUCluster.from_name("stays")
    cluster.scale(jobs=3)
    cluster.wait_for_workers(6)
    cluster.detach()
    assert call("scale", "stays", "--jobs", "1").returncode == 0
    until(lambda: len(bed.squeue()) == 2, "two jobs were given up, and have ended")
    with hpcgpu.connect("stays", quiet=True) as client:
        assert client.get_dataset("kept").result() == 42
    done = call("stop", "stays")
    assert (done.returncode, done.stdout) == (0, "stays: 2 jobs cancelled, no job is left\n")
    bed.wait_empty()


def test_the_scheduler_job_scales_the_cluster_from_its_compute_node(bed: SlurmBed, home: Path, until: Until) -> None:
    done = call("start", "alone", *ASKED, "--adapt", "--maximum-jobs", "2")
    assert done.returncode == 0 and "alone: its scheduler job scales it from now on" in done.stdout, done.stderr
    with hpcgpu.connect("alone", quiet=True) as client:
        assert client.submit(sum, [1, 2, 3]).result() == 6
    until(lambda: running(bed) == 1, "the idle worker job is given up", timeout=250)
    assert "adaptive, 0 to 2 jobs" in status("alone")["manager"]
    assert call("stop", "alone").returncode == 0
    bed.wait_empty()


def test_start_does_not_wait_for_a_full_partition_and_an_interrupt_leaves_no_job(
    bed: SlurmBed, home: Path, until: Until
) -> None:
    done = call(
        "start", "later", *ASKED, "--scheduler", "job_extra_directives=--begin=now+1hour", "--no-wait", "--jobs", "1"
    )
    assert done.returncode == 0, done.stderr
    until(
        lambda: any("its earliest start time is in the future" in job["reason"] for job in status("later")["jobs"]),
        "the reason is told in words",
    )
    assert status("later")["state"] == "waiting"
    about = home / "clusters" / "later" / "cluster.json"
    here = about.read_text()
    assert json.loads(here)["queue"] == bed.cluster
    about.write_text(json.dumps(json.loads(here) | {"queue": "another"}))
    done = call("stop", "later")
    assert (
        done.returncode == 1 and "cluster later belongs to the queue 'another' of batch system 'slurm'" in done.stderr
    )
    about.write_text(here)
    assert call("stop", "later").returncode == 0
    argv = [
        sys.executable,
        "-m",
        "hpcgpu",
        "start",
        "never",
        *ASKED,
        "--scheduler",
        "job_extra_directives=--begin=now+1hour",
    ]
    program = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    until(lambda: running(bed) == 1, "its scheduler job waits")
    program.send_signal(signal.SIGINT)
    _, words = program.communicate(timeout=250)
    assert program.returncode == 130 and "the start of never was interrupted, and its jobs are cancelled" in words
    bed.wait_empty()


@pytest.mark.parametrize("code", [0, 3])
def test_run_brings_a_cluster_up_for_one_program(bed: SlurmBed, home: Path, code: int) -> None:
    program = (
        "import sys; from distributed import Client; print(Client().submit(sum, "
        f"[1, 2]).result(), flush=True); sys.exit({code})"
    )
    done = call("run", *ASKED, "--jobs", "1", "--quiet", "--", sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (code, "3\n"), done.stderr
    bed.wait_empty()


def test_a_profile_is_drafted_from_what_slurm_reports(bed: SlurmBed, home: Path) -> None:
    done = call("profiles", "new", "bed", "-o", "-", "--system", "slurm", HOME=str(home))
    options = yaml.safe_load(done.stdout)["options"]
    assert (options["gpus-per-node"], options["gpu-type"], options["cores"]) == (4, "a100", 16), done.stdout
    assert "gpu-type: t4" in done.stdout


def test_check_examines_a_job_of_each_kind(bed: SlurmBed, home: Path) -> None:
    done = call("check", "--in-job", "--json", "--queue", "gpu", "--gpus-per-node", "4", "--scheduler", "queue=shared")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {(line["where"], line["what"]): line for line in printed("check", done.stdout)["lines"]}
    assert "slurm-wlm" in lines["login", "queue"]["found"]
    assert "gpu: 4 x a100 per node" in lines["login", "GPU queues"]["found"]
    assert (
        lines["worker job", "GPUs"]["found"].startswith("4 x ")
        and "indices (0,1,2,3)" in lines["worker job", "GPUs"]["found"]
    )
    assert lines["scheduler job", "GPUs"]["found"].startswith("1 x ")
    assert "by TLS" in lines["scheduler job", "reachable from here"]["found"]
    bed.wait_empty()


def test_check_reports_before_any_job_that_a_queue_has_no_such_gpus(bed: SlurmBed, home: Path) -> None:
    done = call("check", "--json", "--queue", "gpu", "--gpus-per-node", "4", "--gpu-type", "h100")
    assert done.returncode == 1
    [line] = [line for line in printed("check", done.stdout)["lines"] if line["what"] == "GPU queues"]
    assert line["grade"] == "failure" and "gpu-type h100: its nodes have a100 (write gpu-type: a100)" in line["advice"]
