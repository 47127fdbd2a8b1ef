"""A laptop uses the clusters of a login node: the whole life of a cluster, over a real ssh."""

from __future__ import annotations

import asyncio
import http.cookiejar
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Event
from distributed.client import FutureCancelledError
from laptop import Terminal, queue_of
from sshd_bed import LoginNode, Nodes

import hpcgpu
from hpcgpu.client import reached_by_ssh
from hpcgpu.client.reached_by_ssh import close_tunnels
from hpcgpu.cluster.cluster_by_ssh import ClusterBySSH
from hpcgpu.software import compare_environments
from hpcgpu.ssh.login import Login
from tests.conftest import Until, live, told

pytestmark = pytest.mark.shows("A cluster of a login node, from a laptop over a real ssh")

HPCGPU = str(Path(sys.executable).with_name("hpcgpu"))
#: A small worker job without GPUs.
SMALL: dict[str, Any] = {"gpus_per_node": 0, "cores": 1, "memory": "1GB", "quiet": True}
#: The same on the command line.
OPTIONS = ("--system", "local", "--gpus-per-node", "0", "--cores", "1", "--memory", "1GB")


def run(*arguments: str) -> str:
    done = subprocess.run([HPCGPU, *arguments], capture_output=True, text=True, timeout=150, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_program_on_a_laptop_has_the_whole_life_of_a_cluster(node: LoginNode, until: Until) -> None:
    with hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **SMALL) as cluster:
        assert isinstance(cluster, ClusterBySSH)
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result() == 3
            cluster.scale(jobs=2)
            cluster.wait_for_workers(2, timeout=120)
            assert len(client.scheduler_info()["workers"]) == 2
        assert [job.state for job in cluster.jobs] == ["running"] * 3
        assert "in the scheduler job" in cluster.snapshot().manager
        cluster.add_worker_group("large", jobs=1, gpus_per_node=0, cores=1, memory="2GB", resources={"LARGE": 1})
        with cluster.get_client() as client:
            assert client.submit(pow, 2, 3, resources={"LARGE": 1}).result(timeout=120) == 8
        cluster.delete_worker_group("large")
        until(lambda: [group["name"] for group in cluster.snapshot().groups] == ["default"], "only that group is left")
        with pytest.raises(hpcgpu.OptionError, match="no worker group named 'large'"):
            cluster.scale(jobs=1, worker_group="large")
        cluster.adapt(minimum_jobs=0, maximum_jobs=2)
        assert [group["maximum"] for group in cluster.snapshot().groups] in ([2], [None], [])
        assert "Scheduler at" in str(cluster.get_logs())
        assert "scheduler job" in cluster.report()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        assert b"Dask" in browser.open(cluster.dashboard_link_with_token(), timeout=60).read()
        assert str(node.home) in cluster.directory
    assert "closed" in repr(cluster)
    assert json.loads(run("list", "--json", "--host", "login1")) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"security": False}, "all users of this machine could use the way to it"),
        ({"scheduler": "local"}, "workers do not reach this machine"),
        ({"on_ending": print}, "on_ending does not work with host='login1'"),
        ({"notify": print}, "it is a command, which runs on the login node"),
    ],
)
def test_what_a_laptop_cannot_have_is_refused_before_anything_is_submitted(
    home: Path, option: dict[str, Any], said: str
) -> None:
    with pytest.raises(hpcgpu.OptionError, match=said):
        hpcgpu.LocalGPUCluster(host="login1", **SMALL | option)


def test_software_that_differs_is_an_error_before_anything_is_submitted(
    node: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**compare_environments.collect(), "dask": "2020.1.0"}
    monkeypatch.setattr("hpcgpu.cluster.cluster_by_ssh.collect", lambda: other)
    refused = pytest.raises(hpcgpu.ClusterError, match=r"(?s)Nothing was submitted; .*fatal +dask +2020\.1\.0 ")
    with refused, hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **SMALL):
        pass
    assert not list((queue_of(node).directory / "jobs").glob("*.json"))


def test_checkpoints_are_on_the_disk_of_the_cluster(node: LoginNode) -> None:
    options = SMALL | {"checkpoint_directory": "~/saved"}  # the home there, which is not that of this program
    with hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **options) as cluster:
        client = cluster.get_client()
        data = {"squares": client.map(pow, range(4), [2] * 4)}
        for number in (1, 2):
            assert cluster.checkpoint(data, name="numbers").path == node.home / f"saved/numbers/00000{number}"
        assert [future.result() for future in cluster.restore("numbers")["squares"]] == [0, 1, 4, 9]
        with pytest.raises(hpcgpu.CheckpointError, match=f"there is no checkpoint {node.home}/saved/others"):
            cluster.restore("others")
        (node.home / "closed").touch()
        with pytest.raises(hpcgpu.CheckpointError, match=f"checkpoint {node.home}/closed/numbers was not saved: .*"):
            cluster.checkpoint(data, "~/closed", name="numbers")
        with pytest.raises(hpcgpu.OptionError, match="cannot be the name of a directory"):
            cluster.checkpoint(data, name="../numbers")
        with hpcgpu.connect("login1:demo", quiet=True) as other:
            restored = hpcgpu.restore(other, "~/saved", name="numbers", quiet=True)
            assert other.gather(restored) == {"squares": [0, 1, 4, 9]}


async def test_an_asynchronous_program_has_the_whole_life_of_a_cluster(
    node: LoginNode, until: Until, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("def answer(): return 'of my own'\n")
    options: dict[str, Any] = SMALL | {"resources": {"SEAT": 1}, "asynchronous": True}
    async with hpcgpu.LocalGPUCluster(host="login1", name="demo", **options) as cluster:
        cluster.scale(jobs=1)  # a change begins also where nobody awaits it
        await cluster.wait_for_workers(timeout=120)
        async with cluster.get_client() as client:
            assert await client.submit(sum, [1, 2]) == 3
        async with Client(cluster, asynchronous=True) as client:
            assert await client.submit(sum, [2, 3]) == 5
        assert await cluster.upload_package(tmp_path / "mine") == ["mine"]
        block = cluster.hold(jobs=1, resources={"SEAT": 1})
        for _ in range(2):
            async with block as workers:
                assert [worker.rank for worker in workers] == [0]
        await cluster.adapt(minimum_jobs=1, maximum_jobs=2)
        assert [group["maximum"] for group in (await cluster.snapshot()).groups] in ([2], [None], [])
        with pytest.raises(hpcgpu.OptionError, match="no worker group named 'large'"):
            await cluster.scale(jobs=1, worker_group="large")
        await asyncio.to_thread(cluster.scale, jobs=1)
        assert [job.state for job in await cluster.jobs] == ["running"] * 2
        assert "Scheduler at" in str(await cluster.get_logs())
        assert "scheduler job" in await cluster.report()
        assert "token=" in cluster.dashboard_link_with_token()
        async with await hpcgpu.connect("login1:demo", quiet=True, asynchronous=True) as client:
            assert await client.submit(pow, 2, 3) == 8
    assert "closed" in repr(cluster)
    assert not live(queue_of(node))


async def test_an_asynchronous_program_may_go_on_before_the_scheduler_answers_and_leave_the_cluster(
    node: LoginNode,
) -> None:
    cluster = hpcgpu.LocalGPUCluster(host="login1", name="demo", wait=False, asynchronous=True, **SMALL)
    with pytest.raises(hpcgpu.ClusterError, match="cluster demo was not started yet: write `await cluster`"):
        await cluster.scale(1)
    await cluster
    with pytest.raises(hpcgpu.ClusterError, match="cluster demo waits for its scheduler"):
        Client(cluster, asynchronous=True)
    async with await cluster.get_client() as client:
        assert not client.scheduler_info()["workers"]
    await cluster.detach()
    assert len(live(queue_of(node))) == 1
    await hpcgpu.LocalGPUCluster(host="login1", name="other", wait=False, asynchronous=True, **SMALL).close()
    assert len(live(queue_of(node))) == 1
    await asyncio.to_thread(run, "stop", "demo", "--host", "login1")


async def test_an_asynchronous_start_that_is_cancelled_leaves_no_job(node: LoginNode, until: Until) -> None:
    starting = asyncio.ensure_future(
        hpcgpu.LocalGPUCluster(host="login1", name="demo", asynchronous=True, **SMALL).__aenter__()
    )
    await asyncio.to_thread(until, lambda: live(queue_of(node)), "a job is submitted")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not live(queue_of(node))


def test_the_command_line_shows_and_changes_a_cluster_of_a_login_node(node: LoginNode, tmp_path: Path) -> None:
    assert "1 worker job" in run("plan", *OPTIONS, "--jobs", "1", "--walltime", "1h", "--host", "login1")
    (tmp_path / "site.yaml").write_text("gpus-per-node: 0\ncores: 1\nmemory: 1GB\n")
    started = run("start", "demo", "--system", "local", "--config", str(tmp_path / "site.yaml"), "--host", "login1")
    assert 'hpcgpu.connect("login1:demo")' in started
    assert "demo on local: running" in run("status", "demo", "--host", "login1")
    assert "hpcgpu dashboard demo --host login1" in run("status", "demo", "--host", "login1")
    assert "demo on local: running" in run("top", "demo", "--host", "login1")
    assert "demo-0" in run("scale", "demo", "--jobs", "1", "--host", "login1")
    assert "scales it from now on" in run("adapt", "demo", "--maximum-jobs", "1", "--host", "login1")
    assert "Scheduler at" in run("logs", "demo", "--host", "login1")
    assert "/status?token=" in run("dashboard", "demo", "--host", "login1")
    run("report", "demo", "--host", "login1", "--html", str(tmp_path / "report.html"))
    assert "demo" in (tmp_path / "report.html").read_text()
    assert "no job is left" in run("stop", "demo", "--host=login1")


def test_ctrl_c_while_a_cluster_starts_leaves_no_job(node: LoginNode, until: Until) -> None:
    queue_of(node).check()
    command = [HPCGPU, "start", "demo", *OPTIONS, "--jobs", "1", "--host", "login1"]
    with Terminal(command, dict(os.environ)) as terminal:
        until(lambda: live(queue_of(node)), "a job is submitted")
        os.kill(terminal.pid, signal.SIGINT)
        shown = terminal.end()
        assert terminal.exit_status == 130, shown
    assert not live(queue_of(node))


def test_a_start_whose_scheduler_fails_leaves_no_job(node: LoginNode, tmp_path: Path) -> None:
    fails = f"job_script_prologue=until [ -e {tmp_path}/fail ]; do sleep 0.1; done; exit 3"
    command = [HPCGPU, "start", "demo", *OPTIONS, "--jobs", "1", "--scheduler", fails, "--host", "login1"]
    shown = ""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as start:
        assert start.stderr is not None
        for line in start.stderr:
            shown += line
            if "waiting for its scheduler" in line:
                (tmp_path / "fail").touch()
    assert start.returncode == 1 and "the scheduler of cluster demo is gone" in shown, shown
    assert not live(queue_of(node))


def test_a_cluster_without_security_is_not_reached(node: LoginNode) -> None:
    run("start", "demo", *OPTIONS, "--security", "false", "--host", "login1")
    with pytest.raises(hpcgpu.ClusterError, match="cluster demo has no security: it is not reached by ssh"):
        hpcgpu.connect("login1:demo", quiet=True)
    run("stop", "demo", "--host", "login1")


def test_a_command_whose_connection_breaks_may_go_on_and_names_where_to_read_on(node: LoginNode) -> None:
    prints = threading.Event()

    def follow() -> None:
        Login("login1").call(["logs", "demo", "--follow"], output=lambda _: prints.set())

    with (
        hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **SMALL),
        ThreadPoolExecutor(1) as thread,
    ):
        following = thread.submit(follow)
        assert prints.wait(120)
        node.break_connections()
        with pytest.raises(hpcgpu.HostError, match=r"may go on there.*run: hpcgpu list --host login1"):
            following.result(120)


def test_a_program_holds_workers_and_brings_a_package_and_needs_not_close_its_client(
    node: LoginNode, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("def answer(): return 'of my own'\n")
    program = (
        "import distributed, hpcgpu\n"
        f"options = {SMALL | {'resources': {'SEAT': 1}}!r}\n"
        "with hpcgpu.LocalGPUCluster(host='login1', jobs=1, **options) as cluster:\n"
        "    client = cluster.get_client()\n"
        f"    cluster.upload_package({str(tmp_path / 'mine')!r})\n"
        "    print(client.submit(lambda: __import__('mine').answer()).result())\n"
        "    block = cluster.hold(1, resources={'SEAT': 1})\n"
        "    for _ in range(2):\n"
        "        with block as workers:\n"
        "            print([worker.rank for worker in workers])\n"
        "            held = workers.client\n"
        "            scheduler = held.scheduler_info()['address']\n"
        "            reached = held.run(lambda dask_worker: dask_worker.scheduler.address).values()\n"
        "            print({scheduler} == {*reached}, scheduler == held.scheduler.address)\n"
        "    try:\n"
        "        cluster.hold(1, resources={'x': -1})\n"
        "    except hpcgpu.OptionError:\n"
        "        print(len([one for one in cluster._clients if one.status == 'running']))\n"
        "    print(distributed.default_client() is client, client.status, held.status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (done.stdout, done.stderr) == (
        "of my own\n[0]\nTrue False\n[0]\nTrue False\n1\nTrue running closed\n",
        "",
    ), "the page on libraries finds the scheduler's address for workers so"


def test_a_block_takes_jobs_and_its_timeout_limits_the_wait_for_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float | None]()

    def reach(*_: object, timeout: float | None, quiet: bool) -> Any:
        limits.append(timeout)
        return SimpleNamespace(scheduler=SimpleNamespace(workers_per_job=4))

    monkeypatch.setattr(reached_by_ssh, "reach_cluster", reach)
    monkeypatch.setattr(ClusterBySSH, "_let_manage", lambda self: None)
    cluster: Any = ClusterBySSH.__new__(ClusterBySSH)
    cluster.directory, cluster._named, cluster.login, cluster.quiet = "there", "there", None, True
    cluster._closed, cluster._asynchronous, cluster._reached = False, False, None
    with pytest.raises(hpcgpu.OptionError, match="write either n_workers or jobs"):
        cluster.hold()
    assert cluster.hold(jobs=2, timeout="1m").n_workers == 8 and limits == [60.0]


def test_the_loss_of_a_held_worker_names_its_job_the_reason_and_the_log(
    node: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.client.held_set._ENDED", 150.0)  # a busy queue reports the end later
    seat = {"SEAT": 1}
    options = SMALL | {"resources": seat}
    with (
        hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **options) as cluster,
        hpcgpu.connect("login1:demo", quiet=True) as client,
    ):
        for block in (cluster.hold(jobs=1, resources=seat), hpcgpu.hold(client, 1, resources=seat, quiet=True)):
            words = r"of job .* was lost while a program held it: .*cancelled.*\. Log: .*\.log\. The other"
            with pytest.raises(hpcgpu.ClusterError, match=words), block as workers:
                queue_of(node).cancel([workers[0].job_id])
                workers.run(time.sleep, 600)


def test_a_program_that_ends_without_close_leaves_no_job(node: LoginNode) -> None:
    program = (
        "import hpcgpu\n"
        f"cluster = hpcgpu.LocalGPUCluster(host='login1', name='demo', jobs=1, **{SMALL!r})\n"
        "print(cluster.get_client().submit(sum, [1, 2]).result())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (done.stdout, done.returncode, done.stderr) == ("3\n", 0, "")
    assert not live(queue_of(node))


def test_a_program_that_has_left_its_cluster_ends_without_its_jobs(node: LoginNode) -> None:
    program = (
        "import hpcgpu\n"
        f"with hpcgpu.LocalGPUCluster(host='login1', name='demo', jobs=1, **{SMALL!r}) as cluster:\n"
        "    cluster.detach()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with hpcgpu.connect("login1:demo", quiet=True) as client:
        client.wait_for_workers(1, timeout=120)
    run("stop", "demo", "--host", "login1")
    assert not live(queue_of(node))


def test_a_cluster_that_was_left_is_connected_again(node: LoginNode) -> None:
    cluster = hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **SMALL)
    with cluster.get_client() as client:
        client.publish_dataset(numbers=client.submit(list, [1, 2]))
    cluster.detach()
    with pytest.raises(hpcgpu.ClusterError, match="this program has left it"):
        cluster.scale(2)
    close_tunnels()
    with hpcgpu.connect("login1:demo", quiet=True) as client:
        assert client.get_dataset("numbers").result() == [1, 2]
        with pytest.raises(hpcgpu.OptionError, match="on_scheduler_end='end', so that no scheduler follows"):
            hpcgpu.replay(client)
    run("stop", "demo", "--host", "login1")
    with pytest.raises(hpcgpu.ClusterError, match="was closed"):
        hpcgpu.connect("login1:demo", quiet=True)


def test_a_client_goes_on_with_the_next_scheduler(node: LoginNode) -> None:
    options = {**SMALL, "cores": 2, "on_scheduler_end": "restart"}
    with hpcgpu.LocalGPUCluster(host="login1", name="demo", jobs=1, **options) as cluster:
        client = cluster.get_client()
        assert client.submit(sum, [1, 2]).result() == 3
        other = hpcgpu.connect("login1:demo", quiet=True)
        lost = other.submit(Event("never", client=other).wait)
        with cluster.replay(), told("1 future of this program submitted again"):
            kept = client.submit(pow, 2, 10)
            assert kept.result() == 1024
            for pid in (schedulers := node.started(b"hpcgpu.runtime.launch\0scheduler")):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert schedulers
            with pytest.raises(FutureCancelledError, match="the scheduler is gone"):
                lost.result()
            assert kept.result(timeout=150) == 1024
        assert client.submit(sum, [2, 3], pure=False).result(timeout=150) == 5
        client.close()
        other.close()


def test_a_host_that_asks_for_a_code_is_not_tried_again_behind_the_back_of_its_user(login_node: Nodes) -> None:
    node, login = login_node(code=True), Login("login1")
    for asks in (True, False, False):
        with pytest.raises(hpcgpu.HostError, match=r"second factor.*run once"):
            login.connect(asks=asks)
    assert len([call for call in node.calls() if "-fN" in call]) == 1  # more might lock the account
