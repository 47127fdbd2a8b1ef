"""The scheduler job ends too early, and the cluster goes on with another one: `on_scheduler_end="restart"`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Variable
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from fake_pbs import Site

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster, OptionError, PBSGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.client.hold import Hold
from hpcgpu.cluster.gpucluster import GPUCluster
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.manager import connect_to_scheduler, start_cluster
from hpcgpu.scaling import scheduler_restarts
from tests.conftest import live, told
from tests.helpers import CPU, GPU, messages, travels, waits_for_file
from tests.helpers import hpcgpu as command_line

pytestmark = pytest.mark.shows("A scheduler job that ends too early, and is restarted")

Until = Callable[..., None]

RESTART = CPU | {"on_scheduler_end": "restart"}
GONE = "the scheduler of cluster demo is gone and another one is started"


def held_by(hold: Path) -> dict[str, list[str]]:
    """Options of a scheduler job that waits while this file is there."""
    return {"job_script_prologue": [f"while [ -e {hold} ]; do sleep 0.1; done"]}


def end_scheduler(client: Client, signum: int) -> None:
    """End the process of the scheduler, as its node, its limit of memory or its walltime does."""
    os.kill(client.run_on_scheduler(os.getpid), signum)


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.parametrize(
    ("options", "signum"),
    [
        (CPU | {"jobs": 2}, signal.SIGKILL),
        (CPU | {"jobs": 2, "security": False}, signal.SIGTERM),
        (GPU | {"jobs": 1, "protocol": "ucx", "scheduler": {"gpus_per_node": 1}}, signal.SIGTERM),
        (
            GPU
            | {"jobs": 1, "protocol": "ucx", "worker_start": "spawn", "scheduler": {"gpus_per_node": 1}}
            | {"ucx_env": {"UCXPY_PROGRESS_MODE": "thread", "UCXPY_ENABLE_PYTHON_FUTURE": "1"}},  # not Dask's default
            signal.SIGKILL,
        ),
    ],
    ids=["tls-killed", "insecure-ended", "ucx-ended", "ucx-spawned-killed"],
)
@pytest.mark.filterwarnings("ignore:security=False")
def test_worker_jobs_stay_when_the_scheduler_is_restarted(
    queue: LocalQueue, home: Path, until: Until, options: dict[str, object], signum: int
) -> None:
    with LocalGPUCluster(name="demo", **options, on_scheduler_end="restart") as cluster:
        workers = len(cluster.plan)
        cluster.wait_for_workers(workers)
        before = live(queue)
        with cluster.get_client() as client, hpcgpu.connect("demo", quiet=True, set_as_default=False) as other:
            lost = [one.submit(waits_for_file, str(home)) for one in (client, other)]
            until(lambda: any(client.processing().values()), "it runs")
            with told(GONE):
                end_scheduler(client, signum)
                for future in lost:  # at once, also in a program that does not manage the cluster
                    with pytest.raises(FutureCancelledError, match=GONE):
                        future.result(timeout=150)
            early = client.submit(pow, 2, 5)
            cluster.wait_for_workers(workers)
            assert early.result() == 32, "what is submitted meanwhile waits for the next scheduler"
            assert client.gather(client.map(str, range(4))) == ["0", "1", "2", "3"], "the same client continues"
            assert other.submit(pow, 3, 2).result() == 9, "in other programs, too"
        assert set(before) - set(live(queue)) == {queue_id(cluster, "demo-scheduler")}, "the worker jobs stay"
        running = [job.name for job in cluster.jobs if job.state == "running"]
        assert running[:1] == ["demo-0"] and running[-1] == "demo-scheduler2"
        assert "status=running" in repr(cluster)
        assert cluster.scheduler_address in str(cluster.directory.contact())
        bill = command_line("report", "demo").stdout
        assert "demo-scheduler2" in bill or "5 jobs" in bill, bill
    assert live(queue) == []


def queue_id(cluster: GPUCluster, name: str) -> str:
    """The id of a job, by its name."""
    return next(str(submit.job_id) for submit in cluster.directory.submits() if submit.name == name)


def test_requests_of_a_client_wait_for_the_next_scheduler(queue: LocalQueue, home: Path, until: Until) -> None:
    """Such as `list_datasets`: they tried to reach the last one until Dask's limit, and failed."""
    module, hold = home / "of_the_user.py", home / "hold"
    module.write_text("number = 7")
    with (
        LocalGPUCluster(name="demo", jobs=1, **RESTART, scheduler=held_by(hold)) as cluster,
        cluster.get_client() as client,
        ThreadPoolExecutor() as threads,
    ):
        cluster.wait_for_workers(1)
        closes = Client(cluster, set_as_default=False)
        lost = [one.submit(time.sleep, 1000) for one in (client, closes)]
        with told(GONE):
            hold.touch()
            end_scheduler(client, signal.SIGKILL)
            for future in lost:
                with pytest.raises(FutureCancelledError, match=GONE):
                    future.result(timeout=150)
            with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
                request = threads.submit(closes.list_datasets)
                closes.close()
                with pytest.raises((CommClosedError, CancelledError, RuntimeError)):
                    request.result(timeout=150)
                datasets, pid = threads.submit(client.list_datasets), threads.submit(client.run_on_scheduler, os.getpid)
                runs = threads.submit(client.run, os.getpid)
                with pytest.raises(TimeoutError):
                    client.wait_for_workers(1, timeout=2)
                with pytest.raises(TimeoutError):
                    Variable("result", client).get(timeout=0.2)
            assert "Client" in client._repr_html_(), "a notebook shows it"
            hold.unlink()
            client.upload_file(str(module))
            assert len(runs.result()) == 1, "a call on all workers waits for a worker"
            assert datasets.result() == () and pid.result() == client.run_on_scheduler(os.getpid)
        assert client.submit(lambda: __import__("of_the_user").number).result() == 7


def test_a_pbs_job_of_two_nodes_stays_when_the_scheduler_is_restarted(fake_gpus: None, pbs: Site) -> None:
    options = GPU | {"nodes_per_job": 2, "on_scheduler_end": "restart"}
    with PBSGPUCluster(name="demo", jobs=1, **options) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(4)
        before = set(pbs.alive())
        with told(GONE):
            end_scheduler(client, signal.SIGKILL)
        assert client.submit(pow, 2, 5).result() == 32
        cluster.wait_for_workers(4)
        assert len(before & set(pbs.alive())) == 1 and len(pbs.alive()) == 2
    assert pbs.alive() == {}


def test_a_scheduler_that_somebody_cancels_ends_the_cluster(queue: LocalQueue) -> None:
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        outside = client.submit(time.sleep, 1000)
        lost = "the scheduler of cluster demo is gone, and its worker jobs are cancelled: .* It is not restarted"
        with told(lost), cluster.replay():
            inside = client.submit(time.sleep, 2000)
            queue.cancel(queue.find("demo-scheduler"))
            for future in (outside, inside):
                with pytest.raises(FutureCancelledError, match="the scheduler of cluster demo is gone"):
                    future.result(timeout=150)
        with pytest.raises(ClusterError, match="It is not restarted, because it has ended as intended"):
            cluster.wait_for_workers(1)
    assert live(queue) == []


def test_a_cluster_is_not_restarted_for_ever(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        for number in (2, 3, 4):
            with told(GONE):
                end_scheduler(client, signal.SIGKILL)
            assert client.submit(pow, 2, number).result() == 2**number
            assert queue.find(f"demo-scheduler{number}")
        with told("It is not restarted, because it was restarted 3 times within an hour"):
            end_scheduler(client, signal.SIGKILL)
            until(lambda: cluster.status.name == "failed", "it is lost")
        until(lambda: live(queue) == [], "no job is left")


@pytest.mark.parametrize("by", ["close", "stop", "interrupt"])
def test_a_cluster_ends_while_its_next_scheduler_waits(
    queue: LocalQueue, home: Path, tmp_path: Path, until: Until, by: str
) -> None:
    hold = tmp_path / "hold"
    options = RESTART | {"scheduler": held_by(hold)}
    cluster = LocalGPUCluster(name="demo", jobs=1, **options)
    with cluster.get_client() as client:
        cluster.wait_for_workers(1)
        hold.touch()
        with told(GONE):
            end_scheduler(client, signal.SIGKILL)
            until(lambda: len(cluster.jobs) == 3, "another job is submitted")
        [log] = cluster.directory.logs.glob("demo-0-*")
        until(lambda: "waits for another scheduler" in log.read_text(), "its job waits")
        reasons = {job.name: job.reason for job in cluster.jobs}
        assert reasons["demo-0"] == "its workers have ended with the scheduler, and it waits for the next one"
        with pytest.raises(TimeoutError) as waits:
            cluster.wait_for_workers(1, timeout="1s")
        assert "the next scheduler is not there yet: scheduler job " in "".join(waits.value.__notes__)
        if by == "close":
            cluster.scale(jobs=0)
            until(lambda: "demo-0" not in live_names(cluster), "it ends without a scheduler")
        else:
            cluster.scale(jobs=2)
        if by == "stop":
            assert command_line("stop", "demo").returncode == 0
        cluster.close()
    assert live(queue) == []


def test_a_future_of_between_two_schedulers_reports_why_it_fails_if_no_scheduler_follows(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    hold = tmp_path / "hold"
    options = RESTART | {"scheduler": held_by(hold)}
    with LocalGPUCluster(name="demo", jobs=1, **options) as cluster:
        cluster.wait_for_workers(1)
        other = hpcgpu.connect("demo", quiet=True, set_as_default=False)
        with cluster.get_client() as client, other, told(GONE):
            hold.touch()
            lost = [one.submit(time.sleep, 1000, pure=False) for one in (client, other)]
            end_scheduler(client, signal.SIGKILL)
            for future in lost:
                with pytest.raises(FutureCancelledError, match=GONE):
                    future.result(timeout=150)
            early = [one.submit(pow, 2, 5, pure=False) for one in (client, other)]
            assert command_line("stop", "demo").returncode == 0
            for future, why in zip(
                early, ["cluster demo was stopped by another program", "cluster demo "], strict=True
            ):
                with pytest.raises(FutureCancelledError, match=why) as error:
                    future.result(timeout=150)
                assert error.value.reason == "the scheduler is gone"
                assert "another one is started" not in str(error.value)
    assert live(queue) == []


def test_all_report_why_no_scheduler_follows_if_the_next_jobs_fail(
    queue: LocalQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_restarts, "_PAUSE_AFTER_FAILURE", 0.0)
    fails = tmp_path / "fails"
    options = RESTART | {"scheduler": {"job_script_prologue": [f"if [ -e {fails} ]; then exit 3; fi"]}}
    why = (
        r"the scheduler of cluster demo is gone, and its worker jobs are cancelled: scheduler job 1 \(demo-sched.*\) .*"
        r"It is not restarted, because it was restarted 3 times within an hour\. The last failure: .*scheduler job "
        r"\d+ \(demo-scheduler\d\) failed: .*Log: "
    )
    with LocalGPUCluster(name="demo", jobs=1, **options) as cluster, cluster.get_client() as client, told(why):
        cluster.wait_for_workers(1)
        fails.touch()
        lost = client.submit(time.sleep, 1000)
        end_scheduler(client, signal.SIGKILL)
        with pytest.raises(FutureCancelledError, match=GONE):
            lost.result(timeout=150)
        with pytest.raises(FutureCancelledError, match=why):
            client.submit(pow, 2, 5).result(timeout=150)
        with pytest.raises(ClusterError, match=why):
            cluster.wait_for_workers(1)
        says = [command_line(one, "demo").stdout for one in ("status", "top")]
    says.append(command_line("status", "demo").stdout)
    for call in (hpcgpu.connect, LocalGPUCluster.from_name):
        with pytest.raises(ClusterError) as error:
            call("demo", quiet=True)
        says.append(str(error.value))
    assert all(re.search(why, text) for text in says), says
    assert live(queue) == []


@pytest.mark.usefixtures("fake_gpus")
def test_commands_report_what_worker_jobs_wait_for_between_two_schedulers(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    hold = tmp_path / "hold"
    scheduler = {"gpus_per_node": 0, **held_by(hold)}
    options = GPU | {"jobs": 1, "on_scheduler_end": "restart", "restart_wait": "7m", "scheduler": scheduler}
    with LocalGPUCluster(name="demo", **options) as cluster:
        cluster.wait_for_workers(2)
        with cluster.get_client() as client:
            hold.touch()
            with told(GONE):
                end_scheduler(client, signal.SIGKILL)
                until(lambda: len(cluster.jobs) == 3, "another job is submitted")
        until(lambda: "waits for another scheduler" in log_of(cluster, "demo-0"), "its job waits")
        ended, following = queue_id(cluster, "demo-scheduler"), queue_id(cluster, "demo-scheduler2")
        ends = f"scheduler job {ended} has ended "
        waits = "1 worker job keeps its 2 GPUs and waits for it, 7 min at most (restart_wait): 2 GPU hours in an hour, "
        shown = {one: command_line(one, "demo").stdout for one in ("status", "top")}
        shown["repr"], shown["html"] = repr(cluster), cluster._repr_html_()
        for where, text in shown.items():
            assert ends in text and f"the next scheduler job {following} " in text and waits in text, (where, text)
            assert "restarting" in text and "does not answer" not in text and "unreachable" not in text, (where, text)
        assert shown["status"].count("waits for the next one") == 1
        assert f"job {following} is its next scheduler job" in command_line("list").stdout
        with pytest.raises(TimeoutError, match=f"did not answer within 1 s: scheduler job {following} runs on "):
            hpcgpu.connect("demo", quiet=True, set_as_default=False, timeout="1s")
        scaled = command_line("scale", "demo", "--jobs", "2").stderr
        assert "its scheduler has ended, and the next one is not there yet" in scaled, scaled
        report = cluster.report()
        [job] = [job for job in report.jobs if job.name == "demo-0"]
        assert job.waiting and ends in report.text(1000) and waits in report.text(1000), report
        assert " waiting for the next scheduler" in report.text(1000)
        hold.unlink()
        cluster.wait_for_workers(2)
        until(lambda: "restart" not in command_line("status", "demo").stdout, "it is over")
        assert "next scheduler job" not in command_line("list").stdout + repr(cluster)
        [later] = [job for job in cluster.report().jobs if job.name == "demo-0"]
        assert later.waiting is not None and later.waiting >= job.waiting and not cluster.report().restart
    assert live(queue) == []


def test_a_program_that_holds_workers_waits_for_the_next_scheduler(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    hold = tmp_path / "hold"
    scheduler = held_by(hold)
    with LocalGPUCluster(name="demo", jobs=1, **RESTART, resources={"x": 1}, scheduler=scheduler) as cluster:
        cluster.wait_for_workers(1)
        with cluster.get_client() as client, told(GONE), cluster.hold(1, resources={"x": 1}) as workers:
            hold.touch()
            threading.Timer(1, end_scheduler, [client, signal.SIGKILL]).start()
            with pytest.raises(
                ClusterError,
                match=r"the scheduler is broken: the scheduler is gone, or .*: hold workers again",
            ):
                workers.run(time.sleep, 1000)
            until(lambda: len(cluster.jobs) == 3, "another job is submitted")
            for held in (cluster, client):
                waits = (
                    "hold: 1 worker requested; after 1 s 0 free: the next scheduler is not there yet: scheduler job "
                )
                with pytest.raises(TimeoutError, match=waits):
                    hold_by(held, timeout="1s").__enter__()
        threading.Timer(1, hold.unlink).start()
        with hold_by(cluster) as workers:
            assert workers.run(pow, 2, 5) == [32]
        with (
            hpcgpu.connect("demo", quiet=True, set_as_default=False) as other,
            hold_by(other),
            ThreadPoolExecutor(2) as threads,
            told(GONE),
        ):
            waiting = [threads.submit(held_and_let_go, held) for held in (cluster, other)]
            until(lambda: other.run_on_scheduler(requests_that_wait) == 2, "they wait")
            end_scheduler(other, signal.SIGKILL)
            assert [one.result(120) for one in waiting] == [[32], [32]], "they wait while the scheduler ends, too"
    assert live(queue) == []


def hold_by(held: GPUCluster | Client, timeout: str | None = None) -> Hold:
    if isinstance(held, GPUCluster):
        return held.hold(1, resources={"x": 1}, timeout=timeout)
    return hpcgpu.hold(held, 1, resources={"x": 1}, timeout=timeout)


@travels
def requests_that_wait(dask_scheduler: Any) -> int:
    return sum(not hold.members for hold in dask_scheduler.plugins["hpcgpu"].holds._holds)


def held_and_let_go(held: GPUCluster | Client) -> object:
    with hold_by(held) as workers:
        return workers.run(pow, 2, 5)


def log_of(cluster: GPUCluster, name: str) -> str:
    [log] = cluster.directory.logs.glob(f"{name}-*")
    return log.read_text()


def test_a_new_client_waits_for_the_next_scheduler_and_jobs_that_end_meanwhile_are_replaced(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    hold = tmp_path / "hold"
    options = RESTART | {"scheduler": held_by(hold)}
    with LocalGPUCluster(name="demo", jobs=2, **options) as cluster:
        cluster.wait_for_workers(2)
        with Client(cluster, set_as_default=False) as client, told(GONE):
            hold.touch()
            end_scheduler(client, signal.SIGKILL)
            until(lambda: len(cluster.jobs) == 4, "another job is submitted")
        queue.cancel(queue.find("demo-1"))
        until(lambda: {job.name: job.state for job in cluster.jobs}["demo-1"] == "cancelled", "it has ended")
        threading.Timer(1, hold.unlink).start()
        with cluster.get_client() as client:
            assert client.submit(pow, 2, 5).result() == 32
            cluster.wait_for_workers(2)
        assert live_names(cluster) == {"demo-0", "demo-2", "demo-scheduler2"}
        assert "ended while there was no scheduler" in messages(cluster)
    assert live(queue) == []


def test_a_worker_job_that_must_end_does_so_though_its_scheduler_has_just_ended(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    hold = tmp_path / "hold"
    options = RESTART | {"scheduler": held_by(hold)}
    with LocalGPUCluster(name="demo", jobs=1, **options) as cluster:
        cluster.wait_for_workers(1)
        with cluster.get_client() as client, told(GONE):
            [process] = client.run(os.getpid, nanny=True).values()
            [job] = queue.find("demo-0")
            hold.touch()
            end_scheduler(client, signal.SIGKILL)
            os.kill(process, signal.SIGTERM)
            until(lambda: queue.poll([job])[job].state.ended, "it ends")
        assert "waits for another scheduler" not in log_of(cluster, "demo-0")
    assert live(queue) == []


def live_names(cluster: GPUCluster) -> set[str]:
    return {job.name for job in cluster.jobs if job.state in ("pending", "running")}


PROGRAM = """
import sys
from hpcgpu import LocalGPUCluster
cpu = {"gpus_per_node": 0, "cores": 1}
cluster = LocalGPUCluster(name="demo", jobs=1, on_scheduler_end="restart", restart_wait=sys.argv[1], **cpu)
cluster.wait_for_workers(1)
print("ready", flush=True)
sys.stdin.read()
"""


def leave_by_kill(options: str = "", wait: str = "10m") -> Client:
    """Start a cluster with these further options, and kill its program; return a client of the cluster."""
    argv = [sys.executable, "-c", PROGRAM.replace("**cpu)", f"{options}**cpu)"), wait]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        client = hpcgpu.connect("demo", quiet=True)
        program.kill()
    return client


def test_worker_jobs_end_where_no_program_takes_the_cluster_over(queue: LocalQueue, until: Until) -> None:
    """The program that managed the cluster was killed, and the scheduler, too."""
    with leave_by_kill(wait="3s") as client:
        scheduler = client.run_on_scheduler(os.getpid)
    os.kill(scheduler, signal.SIGKILL)
    until(lambda: live(queue) == [], "nobody comes")
    [log] = locate("demo").logs.glob("demo-0-*")
    assert "no scheduler answered within 3 s (restart_wait)" in log.read_text()
    assert command_line("stop", "demo").returncode == 0


def test_worker_jobs_and_clients_wait_for_a_program_that_takes_the_cluster_over(
    queue: LocalQueue, until: Until
) -> None:
    """So does a client of a third program, which neither managed the cluster nor takes it over."""
    with leave_by_kill() as client:
        lost = client.submit(time.sleep, 1000)
        end_scheduler(client, signal.SIGKILL)
        with pytest.raises(FutureCancelledError, match="the scheduler of cluster demo is gone: scheduler job 1 "):
            lost.result(timeout=150)
        until(lambda: len(live(queue)) == 1, "the queue reports the end of the scheduler job")
        before = live(queue)
        with told(GONE), LocalGPUCluster.from_name("demo", shutdown_on_close=True) as cluster:
            assert client.submit(pow, 2, 5).result(timeout=150) == 32
            cluster.wait_for_workers(1)
            with Client(cluster, set_as_default=False) as own:
                assert own.submit(pow, 2, 6).result() == 64
            assert live_names(cluster) == {"demo-0", "demo-scheduler2"}
            assert set(live(queue)) >= {queue_id(cluster, "demo-0")} <= set(before)
    assert live(queue) == []


def test_the_scheduler_ends_while_a_program_takes_the_cluster_over(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone when the program connects to it, and the queue has just reported that it runs."""
    client = leave_by_kill()
    look, looks = connect_to_scheduler.running_scheduler, []

    async def ends_after_the_first_look(*arguments: Any, **named: Any) -> str | None:
        looks.append(address := await look(*arguments, **named))
        if len(looks) == 1:
            end_scheduler(client, signal.SIGKILL)
        return address

    monkeypatch.setattr(connect_to_scheduler, "running_scheduler", ends_after_the_first_look)
    with client, told(GONE), LocalGPUCluster.from_name("demo", shutdown_on_close=True) as cluster:
        assert looks[0] and client.submit(pow, 2, 5).result(timeout=150) == 32
        assert live_names(cluster) == {"demo-0", "demo-scheduler2"}
    assert live(queue) == []


def attach_and_end_scheduler(
    client: Client, queue: LocalQueue, until: Until, fails: Exception | None = None
) -> Callable[..., Awaitable[Any]]:
    """Return what takes a cluster over, after which its scheduler ends, and perhaps the program fails."""
    attach, scheduler = start_cluster.attach, client.run_on_scheduler(os.getpid)

    async def then_ends(*arguments: Any) -> Any:
        following = await attach(*arguments)
        os.kill(scheduler, signal.SIGTERM)
        until(lambda: len(live(queue)) == 1, "the queue reports its end")
        if fails is not None:
            raise fails
        return following

    return then_ends


def test_the_scheduler_ends_when_a_program_has_just_taken_the_cluster_over(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    client = leave_by_kill()
    monkeypatch.setattr(start_cluster, "attach", attach_and_end_scheduler(client, queue, until))
    with client, told(GONE), LocalGPUCluster.from_name("demo", shutdown_on_close=True) as cluster:
        cluster.wait_for_workers(1)
        assert client.submit(pow, 2, 5).result(timeout=150) == 32
        assert live_names(cluster) == {"demo-0", "demo-scheduler2"}
    assert live(queue) == []


def test_a_program_does_not_submit_schedulers_for_ever_while_it_takes_a_cluster_over(
    queue: LocalQueue, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_restarts, "_PAUSE_AFTER_FAILURE", 0.0)
    fails = tmp_path / "fails"
    scheduler = {"job_script_prologue": [f"if [ -e {fails} ]; then exit 3; fi"]}
    with leave_by_kill(f"scheduler={scheduler!r}, ") as client:
        fails.touch()
        end_scheduler(client, signal.SIGKILL)
        until(lambda: len(live(queue)) == 1, "the queue reports its end")
        with (
            told(GONE),
            pytest.raises(
                ClusterError,
                match=r"taken over: .*It is not restarted, because it was restarted 3 times within an hour\. "
                r"The last failure: scheduler job \d \(demo-scheduler4\) failed: ",
            ),
        ):
            LocalGPUCluster.from_name("demo", shutdown_on_close=True)
    assert live(queue) == []


def test_the_scheduler_ends_while_a_program_takes_the_cluster_over_and_that_program_fails(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """The worker jobs wait for another program, as if that one had been killed."""
    client = leave_by_kill()
    fails = attach_and_end_scheduler(client, queue, until, ClusterError("the program fails"))
    [launcher] = client.run(os.getpid, nanny=True).values()
    with client:
        with monkeypatch.context() as patch:
            patch.setattr(start_cluster, "attach", fails)
            os.kill(launcher, signal.SIGSTOP)  # it checks when that program has left the cluster
            with pytest.raises(ClusterError, match="demo cannot be taken over: the program fails"):
                LocalGPUCluster.from_name("demo", shutdown_on_close=True)
            os.kill(launcher, signal.SIGCONT)
        [log] = locate("demo").logs.glob("demo-0-*")
        until(lambda: "begins anew" in log.read_text() or live(queue) == [], "the workers have ended")
        with told(GONE), LocalGPUCluster.from_name("demo", shutdown_on_close=True) as cluster:
            cluster.wait_for_workers(1)
            assert client.submit(pow, 2, 5).result(timeout=150) == 32
            assert live_names(cluster) == {"demo-0", "demo-scheduler2"}
    assert live(queue) == []


def test_programs_that_do_not_manage_the_cluster_follow_again_and_again(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster:
        cluster.wait_for_workers(1)
        argv = [sys.executable, "-c", OTHER]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
            assert other.stdin is not None and other.stdout is not None
            for _ in range(2):
                pid = int(other.stdout.readline())
                with told(GONE):
                    os.kill(pid, signal.SIGKILL)
                    assert other.stdout.readline().startswith("lost: the scheduler of cluster demo is gone and another")
                    assert other.stdout.readline() == f"again: 32 in {cluster.directory.path}\n"
            other.stdin.close()
            assert other.wait(150) == 0
    assert live(queue) == []


OTHER = """
import os, sys, time
import hpcgpu
from hpcgpu.client.connect import directory_of
with hpcgpu.connect("demo", quiet=True) as client:
    for _ in range(2):
        lost = client.submit(time.sleep, 1000, pure=False)
        print(client.run_on_scheduler(os.getpid), flush=True)
        try:
            lost.result()
        except Exception as error:
            print("lost:", str(error).splitlines()[-1].partition("Log:")[0], flush=True)
        print("again:", client.submit(pow, 2, 5, pure=False).result(), "in", directory_of(client), flush=True)
    sys.stdin.read()
"""


TAKES_OVER = """
import sys
from hpcgpu import LocalGPUCluster
with LocalGPUCluster.from_name("demo", shutdown_on_close=True) as cluster:
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_client_follows_though_another_program_has_taken_its_cluster_over(queue: LocalQueue) -> None:
    with LocalGPUCluster(name="demo", jobs=1, **RESTART) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        argv, pipe = [sys.executable, "-c", TAKES_OVER], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(argv, **pipe, text=True) as other, told("was taken over by"):  # type: ignore[call-overload]
            assert other.stdout.readline() == "ready\n"
            lost = client.submit(time.sleep, 1000)
            end_scheduler(client, signal.SIGKILL)
            with pytest.raises(FutureCancelledError, match=GONE):
                lost.result(timeout=150)
            assert client.submit(pow, 2, 5).result() == 32
            cluster.wait_for_workers(1, timeout="150s")
            with Client(cluster, set_as_default=False) as later:
                assert later.submit(pow, 2, 6).result() == 64
            assert cluster.directory.contact().dashboard in cluster.dashboard_link
            other.stdin.close()
            assert other.wait(150) == 0
    assert live(queue) == []


def test_a_scheduler_in_the_program_is_not_restarted(queue: LocalQueue) -> None:
    with pytest.raises(OptionError, match="scheduler='local' does not work with on_scheduler_end='restart'"):
        LocalGPUCluster(name="demo", scheduler="local", **RESTART)
