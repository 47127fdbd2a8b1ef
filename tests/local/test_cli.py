"""The command line, as a user types it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest
from fake_pbs import Site

from hpcgpu import LocalGPUCluster, connect
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cli import start_and_run
from hpcgpu.cluster.dask_ctl import discover
from hpcgpu.configuration.resolve import resolve
from hpcgpu.dask_scheduler.keep_manager_running import LOG
from hpcgpu.errors import ClusterError
from hpcgpu.orders import manager_in_scheduler_job
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt
from hpcgpu.store import create_directory, saved_options
from tests.conftest import live, told
from tests.helpers import CPU, ON_CPUS, block_queue, command, hpcgpu, printed, start_program

pytestmark = pytest.mark.shows("The command line; a cluster that another program takes over")

Until = Callable[..., None]

#: Its jobs wait while the queue's GPUs are taken.
WAITS = ("--system", "local", "--gpus-per-node", "1", "--protocol", "tcp", "--poll-interval", "0.5")


def status(name: str) -> dict[str, Any]:
    done = hpcgpu("status", name, "--json")
    assert done.returncode == 0, done.stderr
    return dict(printed("status", done.stdout))


def test_a_cluster_whose_program_crashed_is_listed_and_stopped_and_no_other(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    program = start_program(CPU | {"name": "orphan", "jobs": 1})
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.send_signal(signal.SIGKILL)
    program.communicate()
    with LocalGPUCluster(**CPU, name="mine") as cluster:
        listed = {entry["name"]: entry for entry in printed("list", hpcgpu("list", "--json").stdout)}
        assert set(listed) == {"orphan", "mine"}
        assert sorted(job["name"] for job in listed["orphan"]["jobs"]) == ["orphan-0", "orphan-scheduler"]
        assert "orphan" in hpcgpu("list").stdout
        done = hpcgpu("stop", "orphan")
        assert (done.returncode, done.stdout) == (0, "orphan: 2 jobs cancelled, no job is left\n")
        assert len(live(queue)) == 1 and cluster.status.name == "running"
    assert not (home / "clusters" / "orphan" / "tls").exists()
    assert hpcgpu("list").stdout == "No clusters.\n"


def test_all_clusters_are_stopped(queue: LocalQueue, home: Path) -> None:
    for name in ("a", "b"):
        program = start_program(CPU | {"name": name})
        assert program.stdout is not None and program.stdout.readline() == "up\n"
        program.send_signal(signal.SIGKILL)
        program.communicate()
    done = hpcgpu("stop", "--all")
    assert done.returncode == 0 and done.stdout.count("no job is left") == 2
    assert live(queue) == []


def test_a_name_that_is_not_there_is_reported(home: Path) -> None:
    done = hpcgpu("stop", "nobody")
    assert done.returncode == 2 and "there is no cluster named 'nobody' in" in done.stderr
    assert hpcgpu("stop").returncode == 2


def test_a_cluster_is_started_shown_scaled_and_stopped(queue: LocalQueue, home: Path, until: Until) -> None:
    done = hpcgpu("start", "stays", *ON_CPUS, "--jobs", "1", "--idle-timeout", "10m")
    assert done.returncode == 0, done.stderr
    assert "stays-scheduler" in done.stdout and 'Connect in Python: hpcgpu.connect("stays")' in done.stdout
    with connect("stays", quiet=True) as client:
        client.wait_for_workers(1)
        assert client.submit(sum, [1, 2, 3]).result() == 6
    found = status("stays")
    assert (found["state"], found["workers"], found["gpus"]) == ("running", 1, 0)
    assert found["detached"] and found["manager"] == ""
    assert found["dashboard"].startswith("http://") and found["scheduler"].startswith("tls://")
    jobs = {(job["kind"], job["state"], job["workers"]) for job in found["jobs"]}
    assert jobs == {("scheduler", "running", 0), ("worker", "running", 1)}
    shown = hpcgpu("status", "stays").stdout
    assert f"dashboard  {found['dashboard']} (link with its token: hpcgpu dashboard stays)" in shown
    opened = hpcgpu("dashboard", "stays").stdout
    assert opened == f"{found['dashboard']}?token={(home / 'clusters' / 'stays' / 'dashboard.token').read_text()}\n"
    assert "cluster    stays on local: running, continues without the program that started it" in shown
    assert "manager    none: the number of jobs does not change" in shown and "stays-0" in shown

    done = hpcgpu("scale", "stays", "--jobs", "2", "--json")
    assert done.returncode == 0 and "stays-1" in [job["name"] for job in printed("scale", done.stdout)], done.stderr
    with connect("stays", quiet=True) as client:
        client.wait_for_workers(2)
        kept = client.scatter({"answer": 42})
        client.publish_dataset(kept=kept["answer"])
        shown = printed("scale", hpcgpu("scale", "stays", "--jobs", "1", "--json").stdout)
        running = sorted(job["kind"] for job in shown if job["state"] == "running")
        assert running == ["scheduler", "worker"], "a drained job does not run"
        assert sum(job["workers"] for job in shown) == 1
        assert client.get_dataset("kept").result() == 42, "the data of the job that was given up has moved"
    until(lambda: len(live(queue)) == 2, "the job that was given up has ended")

    logs = hpcgpu("logs", "stays").stdout
    assert logs.count("==> ") == 3 and "hpcgpu: on " in logs
    one = hpcgpu("logs", "stays", "--job", "stays-scheduler").stdout
    assert one.count("==> ") == 1 and "Scheduler at:" in one
    done = hpcgpu("logs", "stays", "--job", "nothing")
    assert done.returncode == 1 and "cluster stays has no job 'nothing'; it has stays-scheduler (" in done.stderr

    done = hpcgpu("stop", "stays")
    assert (done.returncode, done.stdout) == (0, "stays: 2 jobs cancelled, no job is left\n")
    assert status("stays")["state"] == "closed"
    assert hpcgpu("scale", "stays", "--jobs", "1").returncode == 1


def test_logs_are_followed_until_the_cluster_ends(queue: LocalQueue, home: Path) -> None:
    assert hpcgpu("start", "tail", *ON_CPUS).returncode == 0
    follower = subprocess.Popen(command("logs", "tail", "--follow"), stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    assert follower.stdout.readline().startswith("==> scheduler job ")
    hpcgpu("stop", "tail")
    with follower.stdout as rest:
        assert "Scheduler at:" in rest.read() and follower.wait(150) == 0


def test_start_need_not_wait_and_status_reports_what_is_waited_for(
    queue: LocalQueue, home: Path, fake_gpus: None
) -> None:
    blocker = block_queue(queue, home)
    done = hpcgpu("start", "later", *WAITS, "--jobs", "1", "--no-wait")
    assert done.returncode == 0 and "dashboard  when the scheduler job runs" in done.stdout, done.stderr
    early = hpcgpu("dashboard", "later")
    assert early.returncode == 1 and "its scheduler is not running" in early.stderr
    found = status("later")
    assert (found["state"], found["dashboard"], found["workers"]) == ("waiting", "", 0)
    assert {(job["kind"], job["state"]) for job in found["jobs"]} == {("scheduler", "pending"), ("worker", "pending")}
    assert all(job["reason"] for job in found["jobs"])
    assert "later on local: waiting" in hpcgpu("status", "later").stdout
    assert hpcgpu("scale", "later", "--jobs", "2").returncode == 0
    assert len(live(queue)) == 4, "it is scaled while it waits"
    assert hpcgpu("stop", "later").returncode == 0
    assert live(queue) == [blocker]
    queue.cancel([blocker])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_leaves_no_job(
    number: signal.Signals, queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    blocker = block_queue(queue, home)
    program = subprocess.Popen(command("start", "never", *WAITS, "--jobs", "1"), stderr=subprocess.PIPE, text=True)
    until(lambda: len(live(queue)) == 3, "its jobs wait")
    program.send_signal(number)
    _, words = program.communicate(timeout=250)
    assert program.returncode == 130 and "the start of never was interrupted, and its jobs are cancelled" in words
    assert live(queue) == [blocker]
    queue.cancel([blocker])


def test_a_start_that_fails_while_it_leaves_its_cluster_leaves_no_job(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    slow = ["trap '' TERM", f"until [ -e {home}/never ]; do sleep 0.1; done"]  # its end takes longer than the command
    fails = {"job_script_prologue": [f"until [ -e {home}/fail ]; do sleep 0.1; done", "exit 3"]}
    options: dict[str, Any] = {**CPU, "job_script_prologue": slow, "scheduler": fails, "shutdown_on_close": False}
    cluster = LocalGPUCluster(name="fails", jobs=1, wait=False, **options)
    with told(r"Cluster failed to start: scheduler job \w+ \(fails-scheduler\) failed"):
        (home / "fail").touch()
        until(lambda: cluster.manager.state.phase.lost, "it fails")
        with pytest.raises(ClusterError, match="fails-scheduler"):
            start_and_run._leave(cluster)
    assert live(queue) == []


def test_a_start_under_nohup_goes_on_when_its_terminal_is_closed(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    blocker = block_queue(queue, home)
    start = ["nohup", *command("start", "demo", *WAITS)]
    program = subprocess.Popen(start, stdout=PIPE, stderr=PIPE, text=True)
    until(lambda: len(live(queue)) == 2, "its job waits")
    program.send_signal(signal.SIGHUP)
    queue.cancel([blocker])
    _, words = program.communicate(timeout=250)
    assert program.returncode == 0, words
    assert status("demo")["state"] == "running"
    assert hpcgpu("stop", "demo").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus-per-node", "-1"), "gpus_per_node must be 0 or more, not -1"),
        (("--walltime", "60"), "walltime='60' has no unit"),
        (("--adapt",), "--adapt needs --maximum-jobs"),
        (("--maximum-jobs", "2"), "need --adapt"),
        (("--env", "A"), "--env 'A': write NAME=VALUE"),
        (("--scheduler", "colour=red"), "unknown option 'colour'"),
        (("--scheduler", "local", "--jobs", "1"), "does not work with shutdown_on_close=False or with `hpcgpu start`"),
        (("--config", "nowhere.yaml"), "does not exist"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_submitted(
    arguments: tuple[str, ...], words: str, queue: LocalQueue, home: Path
) -> None:
    done = hpcgpu("start", "bad", "--system", "local", *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and live(queue) == []


def test_options_of_a_file_count_after_those_of_the_command_line(home: Path) -> None:
    file = home / "site.yaml"
    file.write_text("gpus-per-node: 4\nwalltime: '02:00:00'\nenv: {A: '1'}\nscheduler: {queue: small, walltime: 4h}\n")
    given = ("--config", str(file), "--walltime", "1h", "--scheduler", "queue=tiny", "--system", "slurm", "--json")
    shown = {name: option["value"] for name, option in printed("config", hpcgpu("config", *given).stdout).items()}
    assert (shown["gpus_per_node"], shown["walltime"], shown["env"]) == (4, 3600, {"A": "1"})
    assert (shown["scheduler.queue"], shown["scheduler.walltime"]) == ("tiny", 4 * 3600)


def test_config_reports_where_each_option_comes_from(home: Path) -> None:
    (home / "dask").mkdir()
    file = home / "dask" / "hpcgpu.yaml"
    file.write_text("hpcgpu:\n  cores: 8\n  memory: 10GB\n  slurm:\n    cores: 16\n    scheduler: {queue: small}\n")
    environment = {"DASK_CONFIG": str(home / "dask"), "DASK_HPCGPU__SLURM__ACCOUNT": "m1234"}
    done = hpcgpu("config", "--system", "slurm", "--gpus-per-node", "4", "--json", **environment)
    shown = {name: (option["value"], option["source"]) for name, option in printed("config", done.stdout).items()}
    assert shown["gpus_per_node"] == (4, "argument")
    assert shown["account"] == ("m1234", "environment") and shown["scheduler.account"] == ("m1234", "inherited")
    assert shown["cores"] == (16, str(file)) and shown["memory"] == (10**10, str(file))
    assert shown["scheduler.queue"] == ("small", str(file))
    assert "walltime" not in shown
    everything = json.loads(hpcgpu("config", "--system", "slurm", "--all", "--json", **environment).stdout)
    assert everything["walltime"] == {"value": None, "source": "default"}
    assert "argument" in hpcgpu("config", "--system", "slurm", "--jobs", "2").stdout


PROGRAM = """
import os, signal, sys, time
from distributed import Client
with Client() as client:
    print("sum", client.submit(sum, [1, 2, 3]).result(), "workers", len(client.scheduler_info()["workers"]), flush=True)
    sys.exit(int(sys.argv[1]))
"""


def test_a_job_that_hpcgpu_did_not_cancel_is_not_called_so_after_a_change_of_size(
    queue: LocalQueue, until: Until
) -> None:
    assert hpcgpu("start", "lost", *ON_CPUS, "--jobs", "1").returncode == 0
    [job] = queue.find("lost-0")
    until(lambda: status("lost")["workers"] == 1, "its worker is there")
    queue.cancel([job])

    def seen() -> dict[str, Any]:
        return next(one for one in status("lost")["jobs"] if one["id"] == job)

    until(lambda: seen()["state"] == "cancelled", "the queue has ended it")
    before = seen()["reason"]
    done = hpcgpu("scale", "lost", "--jobs", "0", "--json")
    after = next(one["reason"] for one in json.loads(done.stdout) if one["id"] == job)
    assert after == before != "hpcgpu cancelled it", done.stdout
    assert hpcgpu("stop", "lost").returncode == 0


def test_run_passes_the_exit_code_on_and_leaves_no_job(queue: LocalQueue, home: Path) -> None:
    (home / "program.py").write_text(PROGRAM)
    done = hpcgpu("run", *ON_CPUS, "--jobs", "2", "--quiet", "--", sys.executable, str(home / "program.py"), "7")
    assert (done.returncode, done.stdout) == (7, "sum 6 workers 2\n"), done.stderr
    assert live(queue) == []


@pytest.mark.parametrize("scheduler", [(), ("--scheduler", "local")])
def test_run_closes_its_cluster_whatever_the_configuration_requests(
    scheduler: tuple[str, ...], queue: LocalQueue
) -> None:
    kept = {"DASK_HPCGPU__SHUTDOWN_ON_CLOSE": "false"}
    done = hpcgpu("run", *ON_CPUS, *scheduler, "--jobs", "1", "--quiet", "--", "true", **kept)
    assert (done.returncode, live(queue)) == (0, []), done.stderr


def test_run_hands_signals_on_to_the_program(queue: LocalQueue, home: Path) -> None:
    sleeper = "import time; print('up', flush=True); time.sleep(1000)"
    program = subprocess.Popen(
        command("run", *ON_CPUS, "--quiet", "--", sys.executable, "-c", sleeper), stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.terminate()
    program.communicate(timeout=250)
    assert program.returncode == 128 + signal.SIGTERM and live(queue) == []


def test_run_of_no_program_starts_nothing(queue: LocalQueue, home: Path) -> None:
    done = hpcgpu("run", *ON_CPUS, "--", "no-such-program")
    assert done.returncode == 127 and "'no-such-program' cannot be run" in done.stderr
    assert hpcgpu("run", *ON_CPUS).returncode == 2
    assert not (home / "clusters").exists()


def test_the_scheduler_job_scales_the_cluster_without_any_client(queue: LocalQueue, home: Path, until: Until) -> None:
    done = hpcgpu("start", "alone", *ON_CPUS, "--adapt", "--maximum-jobs", "2")
    assert done.returncode == 0 and "alone: its scheduler job scales it from now on" in done.stdout, done.stderr
    with connect("alone", quiet=True) as client:
        assert client.submit(sum, [1, 2, 3]).result() == 6, "a worker job came for it"
    until(lambda: "adaptive, 0 to 2 jobs" in status("alone")["manager"], "it is told who scales")
    assert "hpcgpu in the scheduler job" in status("alone")["manager"]
    until(lambda: len(live(queue)) == 1, "the idle worker job is given up")
    assert "manager in the scheduler job" in hpcgpu("logs", "alone").stdout
    assert hpcgpu("adapt", "alone", "--minimum-jobs", "1", "--maximum-jobs", "3").returncode == 0
    until(lambda: len(live(queue)) == 2, "the minimum is there")
    assert hpcgpu("scale", "alone", "--jobs", "0").returncode == 0
    until(lambda: len(live(queue)) == 1, "it has no worker job left")

    def kept() -> bool:
        manager = status("alone")["manager"]
        return "adaptive" not in manager and "hpcgpu in the scheduler job" in manager

    until(kept, "the scheduler job keeps it at that size")
    assert hpcgpu("stop", "alone").returncode == 0
    assert live(queue) == []


def test_the_scheduler_job_scales_the_cluster_again_when_a_program_that_took_it_over_has_left(
    queue: LocalQueue, home: Path, until: Until
) -> None:
    assert hpcgpu("start", "alone", *ON_CPUS, "--adapt", "--maximum-jobs", "2").returncode == 0
    until(lambda: "adaptive" in status("alone")["manager"], "the scheduler job scales it")
    LocalGPUCluster.from_name("alone", shutdown_on_close=False, quiet=True).close()
    with connect("alone", quiet=True) as client:
        assert client.submit(sum, [1, 2, 3]).result(timeout=250) == 6, "a worker job came for it"
    until(lambda: "hpcgpu in the scheduler job" in status("alone")["manager"], "it is told who scales")
    assert hpcgpu("stop", "alone").returncode == 0
    assert live(queue) == []


def test_a_program_that_scales_a_cluster_reads_that_the_scheduler_job_does_now(queue: LocalQueue, until: Until) -> None:
    cluster = LocalGPUCluster(name="given", jobs=1, **CPU)
    cluster.wait_for_workers(1)
    with told("cluster given was taken over by"):
        manager_in_scheduler_job.in_scheduler_job(
            cluster.directory, Adapt("default", Limits(minimum=1, maximum=2), 5.0)
        )
        until(lambda: not cluster.managing, "it notices")
    cluster.close()
    assert len(live(queue)) == 2
    assert hpcgpu("stop", "given").returncode == 0


def test_a_waiting_cluster_adapts_as_soon_as_it_starts(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    blocker = block_queue(queue, home)
    done = hpcgpu("start", "soon", *WAITS, "--no-wait", "--adapt", "--minimum-jobs", "1", "--maximum-jobs", "2")
    assert done.returncode == 0 and "soon: adaptive scaling begins when its scheduler job does" in done.stdout, (
        done.stderr
    )
    queue.cancel([blocker])
    until(lambda: "adaptive, 1 to 2 jobs" in status("soon")["manager"], "its scheduler job scales it")
    assert hpcgpu("stop", "soon").returncode == 0


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_where_compute_nodes_cannot_submit_a_process_of_the_login_node_scales_the_cluster(
    pbs: Site, home: Path, until: Until
) -> None:
    pbs.change(lambda state: state["environment"].update(PATH="/usr/bin:/bin"))
    on_pbs = ("--system", "pbs", "--gpus-per-node", "0", "--cores", "1", "--poll-interval", "0.5")
    assert hpcgpu("start", "there", *on_pbs).returncode == 0
    done = hpcgpu("adapt", "there", "--minimum-jobs", "1", "--maximum-jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "compute nodes of this site cannot submit jobs: `qsub` was not found" in done.stdout
    until(lambda: "adaptive, 1 to 2 jobs" in status("there")["manager"], "the scheduler knows who scales")
    until(lambda: status("there")["workers"] == 1, "the minimum is there")
    [manager] = re.findall(r"hpcgpu manage [(]process ([0-9]+) on", status("there")["manager"])
    again = hpcgpu("manage", "there")
    assert again.returncode == 1 and "manages cluster there already" in again.stderr
    assert hpcgpu("scale", "there", "--jobs", "0").returncode == 0
    until(lambda: status("there")["workers"] == 0, "it does what is requested")
    os.kill(int(manager), signal.SIGTERM)
    until(lambda: not runs(int(manager)), "it leaves the cluster")
    until(lambda: "no program scales the cluster" in status("there")["manager"], "the scheduler job cannot")
    both = [subprocess.Popen(command("manage", "there"), stdout=PIPE, stderr=PIPE, text=True) for _ in range(2)]
    said = [(*one.communicate(timeout=250), one.returncode) for one in both]
    [(other, why, code), (done, _, done_code)] = sorted(said)
    assert (code, other, done_code) == (1, "", 0) and "there: hpcgpu manage (process " in done, said
    [manager] = re.findall(r"[(]process ([0-9]+) on", done)
    assert f"(process {manager} on " in why and "manages cluster there already" in why, "one of both, and says who"
    assert hpcgpu("stop", "there").returncode == 0
    until(lambda: not runs(int(manager)), "it ends with the cluster")
    ended = hpcgpu("manage", "there")
    assert ended.returncode == 1 and "cluster there was closed" in ended.stderr, ended.stderr
    assert "Traceback" not in (home / "clusters" / "there" / "logs" / LOG).read_text()


def test_it_is_a_command_of_dask_too(home: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "dask", "hpcgpu", "list"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "No clusters.\n")


def test_names_of_clusters_are_completed_and_discovered(queue: LocalQueue) -> None:
    with LocalGPUCluster(name="kept", **CPU):
        done = hpcgpu(_HPCGPU_COMPLETE="bash_complete", COMP_WORDS="hpcgpu status k", COMP_CWORD="2")
        assert done.stdout == "plain,kept\n"

        async def discovered() -> list[tuple[str, type[Any]]]:
            return [found async for found in discover()]

        assert asyncio.run(discovered()) == [("kept", LocalGPUCluster)]
    assert "_HPCGPU_COMPLETE=bash_complete" in hpcgpu("completion", "bash").stdout


def test_a_manager_in_the_scheduler_job_that_dies_is_reported(queue: LocalQueue, home: Path, until: Until) -> None:
    assert hpcgpu("start", "mind", *ON_CPUS, "--adapt", "--maximum-jobs", "1").returncode == 0
    until(lambda: "adaptive" in status("mind")["manager"], "the manager in the scheduler job is there")
    managers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "hpcgpu.orders.manager_in_scheduler_job" in (process.info["cmdline"] or [])
    ]
    [manager] = [process for process in managers if str(home) in " ".join(process.info["cmdline"])]
    manager.kill()
    until(
        lambda: (
            "nothing is scaled or replaced: the manager in the scheduler job ended with exit code -9"
            in status("mind")["manager"]
        ),
        "it is told",
    )
    assert hpcgpu("stop", "mind").returncode == 0
    assert live(queue) == []


# What others wrote is text


EVIL = "\x1b]0;owned\x07\x1b[2J[/red][bold]\u202e"


def test_words_of_the_queue_are_shown_and_neither_obeyed_nor_read_as_markup(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = home / "bin"
    fakes.mkdir()
    (home / "words").write_text(EVIL * 100_000)
    for name in ("sbatch", "squeue", "scancel", "sacct"):
        (fakes / name).write_text(f'#!/bin/sh\ncat "{home}/words" >&2\nexit 1\n')
        (fakes / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(fakes), prepend=os.pathsep)
    directory = create_directory.claim(
        home / "clusters" / f"evil{EVIL.replace('/', '')}", lambda submits: [], system="slurm"
    )
    directory.intend("evil-0", "worker")
    directory.submitted("evil-0", "7")
    for arguments in (
        ["list"],
        ["status", str(directory.path)],
        ["stop", str(directory.path)],
        ["logs", "no such"],
        ["list", "--json"],
    ):
        done = hpcgpu(*arguments)
        said = done.stdout + done.stderr
        assert "Traceback" not in said and len(said) < 20_000
        assert said.replace("\n", "").isprintable(), f"hpcgpu {arguments[0]} prints commands to the terminal"
        assert "[bold]" in said, "all that was said is shown"


def test_logs_are_shown_on_a_terminal_and_kept_as_they_are_in_a_pipe(home: Path) -> None:
    directory = create_directory.claim(home / "clusters" / "logged", lambda submits: [], system="local")
    saved_options.write(
        directory, resolve("local", {"name": "logged", "cluster_directory": str(home / "clusters")}), {}
    )
    directory.intend("logged-0", "worker")
    directory.submitted("logged-0", "1")
    text = f"first\tline\n{EVIL} second\n"
    (directory.logs / "logged-0-1.log").write_text(text)
    assert text in hpcgpu("logs", "logged").stdout
    main, terminal = os.openpty()
    process = subprocess.Popen(command("logs", "logged"), stdout=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(main, 1000):
            shown += part
    os.close(main)
    assert process.wait(150) == 0
    assert "first\tline\r\n\\x1b]0;owned\\x07\\x1b[2J[/red][bold]\\u202e second\r\n" in shown.decode()
