"""No job is lost, none outlives its purpose, nobody else gets in: whatever the queue, the disk or the program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from distributed.exceptions import WorkerStartTimeoutError

from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import AmbiguousSubmit, BatchError, BatchUnavailable, ClusterWarning
from tests.conftest import live, told
from tests.helpers import CPU, set_grace

Until = Callable[..., None]


class Odd(LocalQueue):
    """The embedded queue with faults that a test switches on."""

    forgets = False
    poll_error: Exception | None = None
    submit_error: Exception | None = None
    gate: threading.Event | None = None

    def submit(self, script: Path, **arguments: Any) -> str:
        if self.gate is not None:
            self.gate.wait()
        job_id = super().submit(script, **arguments)
        if self.submit_error is not None:
            raise self.submit_error
        return job_id

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        if self.poll_error is not None:
            error, self.poll_error = self.poll_error, None
            raise error
        return {} if self.forgets else super().poll(job_ids)

    def find(self, job_name: str) -> list[str]:
        if self.submit_error is not None:
            raise BatchUnavailable("the queue does not answer")
        return super().find(job_name)


@pytest.fixture
def odd(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> Odd:
    batch = Odd(queue.directory, gpus=4)
    monkeypatch.setattr("hpcgpu.cluster.gpucluster.batch_system", lambda system: batch)
    return batch


def test_the_scripts_of_a_closed_cluster_start_nothing(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU, name="closed") as cluster:
        pass
    for script in ("scheduler.sh", "worker.sh"):
        job = queue.submit(cluster.directory.path / script, job_name="by-hand")
        until(lambda job=job: queue.poll([job])[job].state.ended, "it gives up")
        assert queue.poll([job])[job].state is JobState.FAILED
        assert "is closed: this job ends" in (cluster.directory.logs / f"by-hand-{job}.log").read_text()
    assert not (cluster.directory.path / "contact.json").exists()


def test_a_forked_child_that_ends_or_is_terminated_leaves_the_cluster_alone(queue: LocalQueue) -> None:
    code = f"""
import multiprocessing, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from hpcgpu import LocalGPUCluster
with LocalGPUCluster(**{CPU | {"jobs": 1}!r}) as cluster:
    cluster.wait_for_workers()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:  # ends its processes with SIGTERM
        assert pool.map(signal.getsignal, [signal.SIGTERM, signal.SIGHUP]) == [signal.SIG_DFL] * 2, "no handler of ours"
    child = fork.Process(target=int)
    child.start(); child.join()
    cluster.settle()
    print([job.state for job in cluster.jobs], child.exitcode)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout == "['running', 'running'] 0\n", done.stderr


def test_a_job_that_the_queue_forgot_is_cancelled_all_the_same(odd: Odd, queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster:
        cluster.wait_for_workers()
        set_grace(cluster, 0.0)
        odd.forgets = True
        for _ in range(3):
            cluster.settle()
        assert [job.state for job in cluster.jobs if job.kind == "worker"] == ["running"], (
            "a connected worker proves that its job runs"
        )
    odd.forgets = False
    until(lambda: not live(queue), "they end")


def test_a_submit_that_is_under_way_when_the_cluster_closes_is_reported_and_cancels_itself(
    odd: Odd, queue: LocalQueue, until: Until
) -> None:
    cluster = LocalGPUCluster(**CPU)
    odd.gate = threading.Event()
    cluster.scale(jobs=1)
    until(lambda: len(cluster.directory.submits()) == 2, "the submit is under way")
    with told(rf"may still be in the queue: .*{cluster.name}-0.*the submission of {cluster.name}-0 is still under way"):
        cluster.close(timeout=60)
    assert not cluster.directory.closed
    odd.gate.set()
    until(lambda: cluster.directory.submits()[-1].job_id, "the submit is accepted")
    until(lambda: not live(queue), "no job is left")
    job_id = str(cluster.directory.submits()[-1].job_id)
    assert queue.poll([job_id])[job_id].state is JobState.CANCELLED, "it did not only end because it found nothing"


def test_a_submit_of_which_nothing_is_known_is_reported_by_its_name(odd: Odd, queue: LocalQueue) -> None:
    odd.submit_error = AmbiguousSubmit("Slurm did not say whether it accepted job 'lost-scheduler'")
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.raises(ClusterError, match="did not say whether it accepted"),
    ):
        warnings.simplefilter("always")
        LocalGPUCluster(**CPU, name="lost")
    assert any("may still be in the queue: lost-scheduler" in str(warning.message) for warning in caught)
    odd.submit_error = None
    queue.cancel(live(queue))


def test_a_job_whose_submit_got_no_answer_is_found_when_the_queue_answers_again(
    odd: Odd, queue: LocalQueue, until: Until
) -> None:
    with LocalGPUCluster(**CPU) as cluster:
        odd.submit_error = AmbiguousSubmit("the queue did not say whether it accepted the job")
        cluster.scale(jobs=1)
        until(lambda: "did not say whether it accepted the job" in repr(cluster), "the user is told")
        odd.submit_error = None
        until(lambda: cluster.scheduler_info["workers"], "it works")
        until(lambda: all(job.id for job in cluster.jobs), "it is found")
        assert len(live(queue)) == 2 == len(cluster.jobs), "no job is doubled"
        cluster.scale(jobs=0)
        until(lambda: len(live(queue)) == 1, "it ends")


def test_polls_that_go_wrong_do_not_end_the_watch(odd: Odd, queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster:
        cluster.wait_for_workers()
        for error in (
            BatchUnavailable("the controller is down"),
            BatchError("`squeue` was not found on the PATH"),
            OSError(11, "Resource temporarily unavailable"),
        ):
            odd.poll_error = error
            until(lambda: odd.poll_error is None, "a poll goes wrong")
            assert cluster.status.name == "running"
            assert {job.state for job in cluster.jobs} <= {"running", "pending"}
        [job] = cluster.workers.values()
        with told("a user or the batch system cancelled it"):
            queue.cancel([str(job.job_id)])
            until(lambda: job.name not in cluster.workers and cluster.workers, "the job is replaced")


def test_closing_right_after_scaling_is_quick_and_reports_nothing(queue: LocalQueue) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClusterWarning)
        cluster = LocalGPUCluster(**CPU)
        cluster.scale(jobs=6)
        cluster.close()
    assert live(queue) == [] and cluster.directory.closed


def test_waiting_for_workers_ends_in_time_when_the_scheduler_hangs(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster:
        cluster.wait_for_workers()
        pid = _scheduler_pid(cluster)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerStartTimeoutError):
                cluster.wait_for_workers(1, timeout="2s")
        finally:
            os.kill(pid, signal.SIGCONT)


def _scheduler_pid(cluster: LocalGPUCluster) -> int:
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "runtime.launch scheduler" in line and str(cluster.directory.path) in line:
            return int(process.pid)
    raise AssertionError("no scheduler process")


def test_a_journal_that_cannot_be_written_after_the_submit_loses_no_job(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, name: str, job_id: str) -> None:
        raise OSError(28, "No space left on device")

    with LocalGPUCluster(**CPU) as cluster:
        monkeypatch.setattr("hpcgpu.store.directory.ClusterDirectory.submitted", full)
        with told("cannot be written: No space left on device"):
            cluster.scale(jobs=1)
            cluster.wait_for_workers(1)
    assert live(queue) == []


def test_a_full_disk_is_reported_and_nothing_is_submitted(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, name: str, kind: str, group: str, after_end: str) -> None:
        raise OSError(28, "No space left on device")

    with LocalGPUCluster(**CPU) as cluster:
        with monkeypatch.context() as patch:
            patch.setattr("hpcgpu.store.directory.ClusterDirectory.intend", full)
            with told(rf"worker job {cluster.name}-0 was not submitted: .*No space left on device"):
                cluster.scale(jobs=1)
            assert len(live(queue)) == 1
        with pytest.raises(ClusterError, match="No space left on device"):
            cluster.wait_for_workers(1)
        cluster.scale(jobs=1)
        cluster.wait_for_workers(1)


SUSPENDED = """
import time
from hpcgpu import ClusterError, LocalGPUCluster
with LocalGPUCluster(**{options}) as cluster:
    cluster.wait_for_workers()
    print("up", flush=True)
    input()
    try:
        print(cluster.get_client().submit(sum, [1, 2]).result(timeout=120))
        cluster.wait_for_workers(1)
    except (ClusterError, OSError, TimeoutError):
        while cluster.status.name != "failed":
            time.sleep(0.1)
        print(cluster)
"""


@pytest.mark.parametrize(
    ("lease", "said"), [(600, "3\n"), (10, "no heartbeat from the cluster's manager for 10 s (option lease)")]
)
def test_a_client_that_was_suspended_goes_on_or_learns_why_not(
    queue: LocalQueue, until: Until, lease: int, said: str
) -> None:
    code = SUSPENDED.replace("{options}", repr(CPU | {"jobs": 1, "lease": lease}))
    soon = os.environ | {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s"}
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=soon
    )
    assert program.stdout is not None and program.stdout.readline() == "up\n"
    program.send_signal(signal.SIGSTOP)
    if lease == 10:
        until(lambda: not live(queue), "the lease ends")
    program.send_signal(signal.SIGCONT)
    assert said in program.communicate("\n", timeout=250)[0]
    assert live(queue) == []


async def test_scaling_before_the_start_waits_for_the_scheduler_job(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(**CPU, asynchronous=True)
    cluster.scale(jobs=1)
    assert live(queue) == []
    async with cluster:
        await cluster.wait_for_workers(1)
        assert [job.kind for job in cluster.jobs] == ["scheduler", "worker"]


def test_variables_of_the_user_cannot_break_the_script(queue: LocalQueue) -> None:
    prologue = ["python=/nowhere", "directory=/nowhere"]
    with LocalGPUCluster(
        **CPU, jobs=1, env={"directory": "/data", "python": "python3"}, job_script_prologue=prologue
    ) as cluster:
        cluster.wait_for_workers()


def test_a_local_directory_may_name_variables_of_the_job(queue: LocalQueue, home: Path) -> None:
    options = CPU | {"local_directory": "$SCRATCH/here", "env": {"SCRATCH": str(home / "scratch")}}
    with LocalGPUCluster(**options, jobs=1) as cluster:
        cluster.wait_for_workers()
        assert (home / "scratch" / "here").is_dir()


def test_a_warning_that_is_an_error_does_not_stop_the_cluster(queue: LocalQueue, until: Until) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClusterWarning)
        with LocalGPUCluster(**CPU, jobs=1) as cluster:
            cluster.wait_for_workers()
            [job] = cluster.workers.values()
            queue.cancel([str(job.job_id)])
            until(lambda: job.name not in cluster.workers and cluster.workers, "the job is replaced")
            cluster.wait_for_workers(1)
        with pytest.raises(ClusterWarning):
            LocalGPUCluster(**CPU, name="open", security=False)
    with LocalGPUCluster(**CPU, name="open") as cluster:
        assert cluster.status.name == "running", "the name was lost"
