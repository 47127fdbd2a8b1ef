"""A user who does not watch receives notices of his cluster, and results are saved before it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hpcgpu import LocalGPUCluster, connect
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.manager.closing import Closing
from hpcgpu.notify import Notice
from hpcgpu.posix.threads import in_thread
from tests.conftest import live, told
from tests.helpers import CPU, ON_CPUS, hpcgpu, in_queue, start_program

Until = Callable[..., None]


class Log:
    """A file to which a command writes the events of a cluster, one word each."""

    def __init__(self, home: Path) -> None:
        self.path = home / "events of 'mine'"
        self.command = (
            f'printf "%s %s\\n" "$HPCGPU_EVENT" "$HPCGPU_CLUSTER" >> "{self.path}"; cat >> "{self.path}.text"'
        )

    @property
    def events(self) -> list[str]:
        return [line.split()[0] for line in self.path.read_text().splitlines()] if self.path.exists() else []

    @property
    def text(self) -> str:
        return Path(f"{self.path}.text").read_text()


@pytest.fixture
def log(home: Path) -> Log:
    return Log(home)


def test_a_command_runs_when_the_cluster_is_ready_has_lost_a_job_and_has_ended(
    queue: LocalQueue, log: Log, until: Until
) -> None:
    with LocalGPUCluster(**CPU, name="told", jobs=1, notify=log.command) as cluster:
        until(lambda: log.events == ["ready"], "its workers are connected")
        (job,) = in_queue(queue, "told-0")
        with told("hpcgpu replaces it"):
            queue.cancel([job])
        until(lambda: log.events == ["ready", "job_lost"], "the job is lost")
        cluster.wait_for_workers()
    assert log.events == ["ready", "job_lost", "ended"], "the end is delivered before close returns; ready is not again"
    assert "cluster told is ready: 1 worker connected" in log.text
    assert f"worker job {job}" in log.text
    assert "cluster told was closed" in log.text


@pytest.mark.parametrize("left", [False, True])
def test_a_restart_of_the_scheduler_is_reported(queue: LocalQueue, log: Log, until: Until, left: bool) -> None:
    """By the program that manages the cluster; by the manager in the scheduler job if the program has left."""
    options: dict[str, Any] = {**CPU, "on_scheduler_end": "restart", "notify": log.command, "poll_interval": 0.5}
    with LocalGPUCluster(**options, name="again", jobs=1) as cluster, connect("again", quiet=True) as client:
        until(lambda: log.events == ["ready"], "its workers are connected")
        if left:
            cluster.detach()
            until(lambda: "in the scheduler job (" in hpcgpu("status", "again").stdout, "its own manager has begun")
        with nullcontext() if left else told("another one is started"):
            os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
            until(lambda: "restarted" in log.events, "the restart is told")
        assert client.submit(pow, 2, 10).result() == 1024
        assert log.events.count("restarted") == 1 and "the scheduler of cluster again " in log.text
        assert hpcgpu("stop", "again").returncode == 0
    assert live(queue) == []


def test_the_end_is_reported_before_the_jobs_have_ended(
    queue: LocalQueue, log: Log, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Closing.wait

    async def slow(self: Closing) -> None:
        await in_thread(until, lambda: log.events[-1:] == ["ended"], "the end is told")
        await wait(self)

    monkeypatch.setattr(Closing, "wait", slow)
    with LocalGPUCluster(**CPU, name="slow", jobs=0, notify=log.command):
        pass
    assert log.events.count("ended") == 1


def test_a_group_that_gets_no_more_jobs_is_reported(queue: LocalQueue, log: Log, until: Until) -> None:
    options: dict[str, Any] = {**CPU, "worker_restarts": 0, "job_script_prologue": ["exit 7"], "notify": log.command}
    with told("exit code 7"), LocalGPUCluster(**options, scheduler="local", name="paused", jobs=1):
        until(lambda: set(log.events) == {"job_lost", "paused"}, "it is paused")
    assert sorted(log.events) == ["ended", "job_lost", "paused"]


def test_a_function_is_called_in_a_thread_where_it_may_use_the_cluster(queue: LocalQueue) -> None:
    notices: list[Notice] = []
    sizes: list[int] = []
    assigned, done = threading.Event(), threading.Event()

    def notify(notice: Notice) -> None:
        notices.append(notice)
        if notice.event == "ready":
            assigned.wait(150)  # the cluster may be ready before the class returns it
            cluster.scale(jobs=2)
            cluster.wait_for_workers(2)
            sizes.append(len(cluster.workers))
            done.set()
            raise KeyError("mine")

    with told("notify for the event 'ready' failed: KeyError"):
        cluster = LocalGPUCluster(**CPU, name="callback", jobs=1, notify=notify)
        assigned.set()
        assert done.wait(150)
    cluster.close()
    assert sizes == [2]
    assert [(notice.event, notice.cluster) for notice in notices] == [("ready", "callback"), ("ended", "callback")]


def test_a_function_may_close_the_cluster(queue: LocalQueue, until: Until) -> None:
    assigned = threading.Event()

    def notify(notice: Notice) -> None:
        assigned.wait(150)
        cluster.close()

    cluster = LocalGPUCluster(**CPU, name="self", jobs=1, notify=notify)
    assigned.set()
    until(lambda: cluster.status.name == "closed", "it has closed itself")
    assert live(queue) == []


def test_a_command_that_hangs_does_not_hold_up_the_cluster(queue: LocalQueue, until: Until) -> None:
    with told("was killed"), LocalGPUCluster(**CPU, name="hangs", jobs=1, notify="sleep 1000") as cluster:
        cluster.wait_for_workers()
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result() == 3
    assert live(queue) == []


def test_who_attaches_reports_what_was_not_reported_before(queue: LocalQueue, log: Log, until: Until) -> None:
    program = start_program(CPU | {"name": "kept", "jobs": 1, "notify": log.command})
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    until(lambda: log.events == ["ready"], "its workers are connected")
    program.send_signal(signal.SIGKILL)
    program.communicate()
    with LocalGPUCluster.from_name("kept") as cluster:
        assert cluster.shutdown_on_close, "nobody detached it: it ends with this program"
        cluster.wait_for_workers()
        cluster.settle()
    assert log.events == ["ready", "ended"], "the command of the start, and no second ready"


def test_the_manager_in_the_scheduler_job_notifies_without_any_program(
    queue: LocalQueue, log: Log, until: Until
) -> None:
    adapt = ("--adapt", "--minimum-jobs", "1", "--maximum-jobs", "1")
    done = hpcgpu("start", "alone", *ON_CPUS, *adapt, "--notify", log.command)
    assert done.returncode == 0, done.stderr
    until(lambda: log.events == ["ready"], "the workers are connected")
    assert hpcgpu("adapt", "alone", "--minimum-jobs", "1", "--maximum-jobs", "2").returncode == 0
    until(lambda: "1 to 2 jobs" in hpcgpu("status", "alone").stdout, "the next manager is there")
    assert log.events == ["ready"], "another manager follows: the cluster has not ended"
    assert hpcgpu("stop", "alone").returncode == 0
    until(lambda: log.events == ["ready", "ended"], "its end is told")


def test_a_start_without_a_manager_reports_that_nobody_notifies(queue: LocalQueue, log: Log) -> None:
    done = hpcgpu("start", "mute", *ON_CPUS, "--notify", log.command)
    assert hpcgpu("stop", "mute").returncode == 0
    assert done.returncode == 0, done.stderr
    assert "nobody manages this cluster" in done.stderr and "--adapt" in done.stderr


def test_results_are_saved_before_the_walltime_ends_and_the_next_cluster_has_them(
    queue: LocalQueue, log: Log, home: Path, until: Until
) -> None:
    saved = home / "checkpoint"

    def save(cluster: LocalGPUCluster) -> None:
        client = cluster.get_client()
        saved.write_text(str(client.get_dataset("total").result()))
        raise OSError("the disk is full")

    options = {**CPU, "ending_notice": "1h", "notify": log.command}
    with (
        told("on_ending failed: OSError"),
        LocalGPUCluster(**options, name="first", jobs=1, scheduler={"walltime": "100s"}, on_ending=save) as cluster,
    ):
        client = cluster.get_client()
        client.publish_dataset(total=client.submit(sum, [1, 2, 3]))
        until(lambda: saved.exists() and saved.read_text() == "6", "it is saved before the end")
        assert cluster.status.name == "running"
        until(lambda: "ending" in log.events, "the command is told too")
        assert client.submit(sum, [1, 2]).result() == 3, "the cluster goes on until the end"
    assert log.events.count("ending") == 1
    with LocalGPUCluster(**CPU, name="second", jobs=1) as cluster:
        client = cluster.get_client()
        assert client.submit(sum, [int(saved.read_text()), 4]).result() == 10


@pytest.mark.parametrize(
    ("scheduler", "words"), [("1h", "the walltime of the scheduler job, 60 min, is shorter"), ("2h", "")]
)
def test_a_scheduler_that_ends_before_the_workers_is_reported_before_anything_is_submitted(
    queue: LocalQueue, scheduler: str, words: str, recwarn: pytest.WarningsRecorder
) -> None:
    options = {**CPU, "walltime": "2h", "quiet": True}
    with LocalGPUCluster(**options, scheduler={"walltime": scheduler}) as cluster:
        said = [str(warning.message) for warning in recwarn]
        cluster.add_worker_group("long", walltime="3h", gpus_per_node=0)
    assert any(words in text for text in said) if words else said == []
    group = [str(w.message) for w in recwarn if "3 h" in str(w.message)]
    assert len(group) == 1, "a group whose jobs would outlive the scheduler is told too"
