"""`hpcgpu check`, as a user runs it, with real jobs on the embedded queue and on a PBS that pretends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client
from fake_pbs import Site

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live
from tests.helpers import command, hpcgpu, other, printed

pytestmark = pytest.mark.shows("`hpcgpu check`")

Until = Callable[..., None]

ON_CPUS = ("--system", "local", "--gpus-per-node", "0")


def report(*arguments: str, code: int = 0, **environment: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of a check by where and what."""
    done = hpcgpu("check", "--json", *arguments, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    found = printed("check", done.stdout)
    assert found["ok"] == (code == 0) and (found["kept"] is None or Path(found["kept"]).is_dir())
    return {(line["where"], line["what"]): line for line in found["lines"]}


def test_the_login_node_is_checked_without_a_job(queue: LocalQueue, home: Path) -> None:
    done = hpcgpu("check", *ON_CPUS)
    assert done.returncode == 0, done.stderr
    assert "login  queue              ok  local: the queue embedded in hpcgpu" in done.stdout
    assert "`hpcgpu check --in-job` also runs checks in a job of each kind." in done.stdout
    assert not list((queue.directory / "jobs").glob("*.json")), "no job was submitted"


def test_a_job_of_each_kind_is_checked_and_none_is_left(queue: LocalQueue, home: Path) -> None:
    lines = report("--in-job", *ON_CPUS)
    assert {line["grade"] for line in lines.values()} == {"ok"}
    for where in ("scheduler job", "worker job"):
        assert f"at {sys.executable}" in lines[where, "python"]["found"]
        assert lines[where, "reachable from here"]["found"].endswith("by TLS")
        assert lines[where, "filesystem"]["grade"] == "ok"
    assert lines["worker job", "the scheduler's fabric"]["grade"] == "ok" and ("all", "environment") in lines
    done = hpcgpu("check", "--in-job", *ON_CPUS)
    assert [
        line for line in done.stdout.splitlines() if line.split() == ["login", "scheduler", "job", "worker", "job"]
    ] != []
    version = dask.__version__
    assert any(line.split() == ["dask", version, version, version] for line in done.stdout.splitlines()), (
        "and all that each has, as a table"
    )
    assert live(queue) == [] and not list((home / "clusters").glob("check-*")), (
        "nothing is left of a check that went well"
    )


@pytest.mark.parametrize("of_site", ["", "NCCL_SOCKET_IFNAME=hsn"])
def test_the_collectives_of_the_check_are_those_of_the_workers_of_a_cluster(
    queue: LocalQueue, home: Path, of_site: str
) -> None:
    (home / "nccl.conf").write_text(f"NCCL_DEBUG=WARN\n{of_site}\n")
    prologue = f"export NCCL_CONF_FILE={home}/nccl.conf"
    lines = report("--in-job", *ON_CPUS, "--job-script-prologue", prologue)
    with (
        LocalGPUCluster(gpus_per_node=0, jobs=1, job_script_prologue=[prologue], quiet=True) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(1)
        [environ] = client.run(lambda: dict(os.environ)).values()
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    there = [f"{name}={environ[name]}" for name in names if name in environ]
    assert lines["worker job", "collectives"]["found"] == ", ".join([*there, *([of_site] if of_site else [])])
    assert len(there) == (1 if of_site else 2), "NCCL reads the file itself"


def test_gpus_are_checked(queue: LocalQueue, fake_gpus: None, home: Path) -> None:
    lines = report("--in-job", "--system", "local", "--gpus-per-node", "2", "--scheduler", "gpus_per_node=1")
    assert (
        lines["worker job", "GPUs"]["found"].startswith("2 x Fake GPU")
        and "indices (" in lines["worker job", "GPUs"]["found"]
    )
    assert lines["worker job", "fabric"]["found"].startswith("TCP: ")
    assert "compute capability" in lines["worker job", "driver"]["found"]


@pytest.mark.parametrize(("visible", "seen"), [(None, True), ("", False), ("NoDevFiles", False), ("1,0", True)])
def test_only_a_gpu_that_a_process_sees_is_its_own(fake_gpus: None, visible: str | None, seen: bool) -> None:
    code = (
        "from hpcgpu.software.compare_environments import collect; print('GPU' in "
        f"collect({'{}' if visible is None else {'CUDA_VISIBLE_DEVICES': visible}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout == f"{seen}\n", done.stderr


def test_what_is_wrong_in_the_job_is_a_failure_with_advice_and_keeps_the_logs(
    queue: LocalQueue, home: Path, tmp_path: Path
) -> None:
    env = other(tmp_path, "dask", "2020.1.0")["PYTHONPATH"]
    bad = ("--walltime", "2h", "--local-directory", "$NOWHERE/x", "--env", f"PYTHONPATH={env}", "--interface", "nope0")
    lines = report("--in-job", *ON_CPUS, *bad, code=1)
    assert lines["worker job", "local_directory"]["grade"] == "failure"
    assert "the variable NOWHERE is not set" in lines["worker job", "local_directory"]["found"]
    assert "interface 'nope0' does not exist" in lines["scheduler job", "fabric"]["found"]
    assert (lines["all", "dask"]["grade"], lines["all", "python"]["grade"] if ("all", "python") in lines else "") == (
        "failure",
        "",
    )
    [kept] = (home / "clusters").glob("check-*")
    assert (kept / "logs").is_dir() and not (kept / "tls").exists(), "logs stay, credentials do not"
    for script in ("scheduler.sh", "worker.sh"):
        assert "#HPCGPU --time=300\n" in (kept / script).read_text(), "whatever the walltime of the cluster is"


def test_a_job_that_breaks_shows_its_log(queue: LocalQueue, home: Path) -> None:
    lines = report("--in-job", *ON_CPUS, "--job-script-prologue", "echo no such module; exit 3", code=1)
    assert lines["worker job", "job"]["grade"] == "failure"
    assert (
        "exit code 3" in lines["worker job", "job"]["found"] and "no such module" in lines["worker job", "job"]["found"]
    )


def test_what_can_never_run_is_reported_in_the_queue_s_words(queue: LocalQueue, home: Path) -> None:
    lines = report("--in-job", "--system", "local", "--gpus-per-node", "9", code=1)
    assert "requests 9 GPUs, but this machine has 4" in lines["worker job", "job"]["found"]
    assert live(queue) == []


def test_jobs_that_wait_too_long_are_given_up(queue: LocalQueue, home: Path) -> None:
    lines = report("--in-job", *ON_CPUS, "--timeout", "0.5s", "--job-script-prologue", "sleep 300", code=1)
    assert "sent no report within 0 s" in lines["worker job", "job"]["found"]
    assert live(queue) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_check_leaves_no_job(
    queue: LocalQueue, home: Path, until: Until, number: signal.Signals
) -> None:
    check = subprocess.Popen(
        command("check", "--in-job", *ON_CPUS, "--job-script-prologue", "sleep 300"), stderr=subprocess.PIPE, text=True
    )
    until(lambda: len(live(queue)) == 2, "both jobs are there")
    check.send_signal(number)
    _, said = check.communicate(timeout=250)
    assert check.returncode == 130 and "was interrupted and its jobs were cancelled" in said
    assert live(queue) == []


def test_commands_that_are_missing_are_a_failure(home: Path) -> None:
    lines = report("--in-job", "--system", "slurm", code=1, PATH="/nowhere")
    assert (
        lines["login", "queue"]["grade"] == "failure" and "`sbatch` was not found" in lines["login", "queue"]["found"]
    )
    assert not any(where != "login" for where, _ in lines), "no job was tried"
    assert lines["login", "jobs"]["advice"] == "correct this first: queue"


def test_a_cluster_directory_that_cannot_be_is_a_failure_and_no_job_is_tried(queue: LocalQueue, home: Path) -> None:
    lines = report("--in-job", *ON_CPUS, "--cluster-directory", "/proc/none", code=1)
    assert lines["login", "jobs"]["advice"] == "correct this first: cluster directory" and live(queue) == []


def test_directories_that_are_made_are_private_whatever_the_umask(queue: LocalQueue, home: Path) -> None:
    place = home / "a" / "b" / "clusters"
    argv = f"umask 002; exec {shlex.join(command('check', '--json', *ON_CPUS, '--cluster-directory', str(place)))}"
    done = subprocess.run(["bash", "-c", argv], capture_output=True, text=True, timeout=250)
    [line] = [line for line in json.loads(done.stdout)["lines"] if line["what"] == "permissions"]
    assert line["grade"] == "ok", line
    assert {path.stat().st_mode & 0o777 for path in (place, place.parent, place.parent.parent)} == {0o700}


def test_on_pbs(pbs: Site, home: Path) -> None:
    lines = report("--in-job", "--system", "pbs", "--gpus-per-node", "0", "--queue", "workq")
    assert "pbs_version" in lines["login", "queue"]["found"]
    assert {lines[where, "job"]["grade"] for where in ("scheduler job", "worker job")} == {"ok"}
