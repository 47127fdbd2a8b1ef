"""Scaling through the queue: adaptive, walltime, failures, groups; whole clusters on the embedded queue."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Event, KilledWorker, get_worker

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.store import saved_options
from tests.conftest import live, told
from tests.helpers import ADAPT, CPU, GPU, drain_now, in_queue

pytestmark = pytest.mark.shows("Scaling, failures of jobs, walltime, preemption")

Until = Callable[..., None]


def tasks() -> tuple[Callable[[str], str], Callable[[], None], Callable[[int], int]]:
    """Functions of a function, which travel by value: schedulers and workers cannot import this file."""

    def wait_for(name: str) -> str:
        Event(name).wait()
        return str(get_worker().name)

    def killer() -> None:
        os._exit(1)

    def slow(index: int) -> int:
        time.sleep(0.5)
        return index

    return wait_for, killer, slow


wait_for, killer, slow = tasks()


def test_adaptive_scales_up_for_work_and_down_without_it(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
        assert cluster.adaptive == adaptive and (adaptive.minimum, adaptive.maximum) == (0, 2)
        futures = client.map(slow, range(30))
        assert client.gather(futures) == list(range(30))
        assert len([job for job in cluster.jobs if job.kind == "worker"]) == 2
        del futures
        until(lambda: not cluster.workers and len(live(queue)) == 1, "idle jobs are given up")
        assert adaptive.state.reason.startswith("there is no work")
        log = [text for _, text in adaptive.log]
        assert any(text.startswith("there is work for") and "submitting" in text for text in log)
        assert any("draining" in text for text in log)


def test_few_tasks_after_many_keep_one_job(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU | {"cores": 2}) as cluster, Client(cluster) as client:
        cluster.adapt(minimum_jobs=0, maximum_jobs=2, **ADAPT)
        many = client.map(wait_for, ["many"] * 4, pure=False)
        until(lambda: sum(len(running) for running in client.processing().values()) == 4, "all tasks run")
        until(lambda: len(client.processing()) == 2, "two jobs run them")
        Event("many", client=client).set()
        client.gather(many)
        few = client.map(wait_for, ["few"] * 2, pure=False)
        until(lambda: len(cluster.workers) == 1, "one job has both tasks, and the other one ends")
        Event("few", client=client).set()
        assert len(set(client.gather(few))) == 1


def test_a_fixed_size_ends_adaptive_scaling_and_a_minimum_is_kept(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU) as cluster:
        adaptive = cluster.adapt(minimum_jobs=1, maximum_jobs=2, **ADAPT)
        cluster.wait_for_workers(1)
        until(lambda: adaptive.state.jobs == 1 and adaptive.state.target == 1, "the minimum is there")
        cluster.scale(jobs=0)
        until(lambda: len(live(queue)) == 1, "the job is given up")
        assert cluster.adaptive is None and not adaptive.running


def test_a_running_task_is_let_finish_before_its_job_goes(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU, jobs=2) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        futures = client.map(wait_for, ["go", "go", "go", "go"], pure=False)
        until(lambda: sum(len(t) for t in client.processing().values()) >= 2, "tasks run")
        until(lambda: all(job.work.load.processing for job in cluster.workers.values()), "the load is known")
        cluster.scale(jobs=1)
        until(lambda: len(cluster.workers) == 1, "a job is chosen")
        [stays] = cluster.workers
        Event("go", client=client).set()
        names = client.gather(futures)
        assert any(name != stays for name in names), "the task of the job that goes was cancelled and run elsewhere"
        until(lambda: len(live(queue)) == 2, "the job goes")
        assert len(client.gather(futures)) == 4, "a result was lost with its job"


def test_tasks_that_a_leaving_job_has_not_begun_go_to_others(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU, jobs=2) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        names = sorted(cluster.workers)
        blocked = client.submit(wait_for, "go", workers=[names[1]], allow_other_workers=True)
        until(lambda: any(client.processing().values()), "the first task runs")
        behind = client.map(slow, range(4), workers=[names[1]], allow_other_workers=True)
        drain_now(cluster, names[1])
        assert client.gather(behind) == list(range(4)), "tasks stay behind one that does not end"
        assert not blocked.done()
        Event("go", client=client).set()
        assert blocked.result() == names[1]


def test_jobs_that_are_cancelled_from_outside_do_not_count_against_a_task(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.replace_failed_jobs._BACKOFF", (0.0,) * 5)
    options = CPU | {"worker_restarts": 20}
    with (
        LocalGPUCluster(**options, jobs=1, env=FAILURES) as cluster,
        Client(cluster) as client,
        told("a user or the batch system cancelled it"),
    ):
        future = client.submit(wait_for, "go")
        for _ in range(3):
            until(lambda: any(job.workers for job in cluster.workers.values()), "the job is there, or its replacement")
            until(lambda: any(client.processing().values()), "the task runs")
            [job] = cluster.workers.values()
            queue.cancel([str(job.job_id)])
            until(lambda gone=job: gone.name not in cluster.workers and cluster.workers, "the job is replaced")
        Event("go", client=client).set()
        assert future.result().startswith(cluster.name)


FAILURES = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}


def test_a_task_that_kills_its_workers_fails_all_the_same(queue: LocalQueue) -> None:
    with (
        LocalGPUCluster(**CPU, jobs=1, env=FAILURES) as cluster,
        Client(cluster) as client,
        pytest.raises(KilledWorker, match="those workers died while running it"),
    ):
        client.submit(killer).result(timeout=250)


def test_jobs_that_worked_and_end_by_themselves_are_replaced_and_are_no_failures(
    queue: LocalQueue, until: Until
) -> None:
    with LocalGPUCluster(**CPU, jobs=1, worker_restarts=0) as cluster, Client(cluster) as client:
        for _ in range(2):
            cluster.wait_for_workers(1)
            [job] = cluster.workers.values()
            until(lambda job=job: job.workers, "its worker is known")
            future = client.submit(slow, 1, pure=False)
            until(lambda job=job: job.work.worked, "it is known that it worked")
            future.release()
            with told(f"(?s){job.name}.*completed.*hpcgpu replaces it"):
                until(lambda job=job: not client.has_what()[next(iter(job.workers))], "the data is released")
                client.retire_workers(names=[job.name], close_workers=True, remove=True)
                until(lambda gone=job: gone.name not in cluster.workers and cluster.workers, "the job is replaced")


def test_the_end_of_the_scheduler_s_walltime_is_announced_and_then_a_clear_error(
    queue: LocalQueue, until: Until
) -> None:
    near = "the walltime of the scheduler job 1 ends in less than a minute, and the cluster with it: fetch your results"
    with told(near), LocalGPUCluster(**CPU, scheduler={"walltime": "60s"}) as cluster:
        until(lambda: cluster.status.name == "failed", "the cluster takes note of its end")
        with pytest.raises(
            ClusterError, match=r"the scheduler of cluster .* is gone.*timeout: it reached the end of its walltime"
        ):
            cluster.wait_for_workers(1)


def test_jobs_that_never_connect_pause_adaptive_scaling_until_it_is_resumed(
    queue: LocalQueue, until: Until, home: Path
) -> None:
    broken = home / "broken"
    broken.touch()
    prologue = [
        f"if [ -e {broken} ] && [ \"$HPCGPU_JOB_NAME\" != demo-scheduler ]; then echo 'no such module'; exit 3; fi"
    ]
    options = CPU | {"worker_restarts": 1, "name": "demo"}
    with LocalGPUCluster(**options, job_script_prologue=prologue) as cluster, Client(cluster) as client:
        with told("no such module"):
            adaptive = cluster.adapt(maximum_jobs=1, **ADAPT)
            future = client.submit(slow, 1)
            until(
                lambda: adaptive.state.paused and "2 worker jobs failed in a row" in repr(cluster),
                "it pauses, and says so",
            )
        with pytest.raises(ClusterError, match=r"2 worker jobs failed in a row.*worker_restarts=1") as caught:
            cluster.wait_for_workers(1)
        assert "no such module" in str(caught.value), "the tail of the log is missing"
        count = len(cluster.jobs)
        broken.unlink()
        adaptive.resume()
        assert future.result(timeout=250) == 1
        assert len(cluster.jobs) == count + 1


def test_where_a_person_works_a_job_without_work_stays_for_minutes_and_its_end_is_counted_down(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with LocalGPUCluster(**CPU, jobs=1, name="thinks") as cluster:
        cluster.wait_for_workers(1)
        adaptive = cluster.adapt(maximum_jobs=1)
        shown = re.compile(r"idle; ends in [2-5] min if it stays idle")
        until(lambda: any(shown.fullmatch(job.reason) for job in cluster.jobs), lambda: repr(cluster.jobs))
        assert re.search(r"job thinks-0 ends in \d min if no work comes: .* as you work inter", adaptive.state.reason)
        until(lambda: any("ends in" in group["reason"] for group in hpcgpu.snapshot("thinks").groups), "others see it")
        assert list(cluster.workers) == ["thinks-0"]
        cluster.adapt(maximum_jobs=1, interactive=False)
        until(lambda: len(live(queue)) == 1, "a program's job is released")


def test_tasks_are_steered_to_the_group_that_has_their_resources(queue: LocalQueue, fake_gpus: None) -> None:
    with LocalGPUCluster(**GPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.add_worker_group("highmem", gpus_per_node=0, cores=1, jobs=1, resources={"MEMORY": 100e9})
        cluster.wait_for_workers(3)
        loaded = [dask.delayed(slow)(i) for i in range(4)]
        with dask.annotate(resources={"GPU": 1}):
            processed = [dask.delayed(lambda value: (value, get_worker().name))(value) for value in loaded]
        with dask.annotate(resources={"MEMORY": 70e9}):
            total = dask.delayed(lambda pairs: (pairs, get_worker().name))(processed)
        pairs, where = client.compute(total, optimize_graph=False).result()
        big, gpu = (next(j for j in cluster.jobs if j.name.endswith(suffix)).name for suffix in ("-1", "-0"))
        assert where == big and {name.rsplit("-", 1)[0] for _, name in pairs} == {gpu}
        cluster.scale(jobs=0, worker_group="highmem")
        cluster.delete_worker_group("highmem")
        with pytest.raises(OptionError, match="no worker group named 'highmem': the groups are default"):
            cluster.scale(jobs=1, worker_group="highmem")


def test_adaptive_asks_for_the_group_that_can_run_what_waits(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU) as cluster, Client(cluster) as client:
        cluster.add_worker_group("highmem", gpus_per_node=0, cores=1, resources={"MEMORY": 100e9})
        cluster.adapt(maximum_jobs=2, **ADAPT)
        cluster.adapt(maximum_jobs=2, worker_group="highmem", **ADAPT)
        future = client.submit(wait_for, "go", resources={"MEMORY": 70e9})
        until(
            lambda: [j.group.name for j in cluster.workers.values()] == ["highmem"], "a job of the group is asked for"
        )
        until(lambda: any(client.processing().values()), "the task runs")
        Event("go", client=client).set()
        assert future.result() == f"{cluster.name}-0"
        assert {job.name for job in cluster.jobs if job.kind == "worker"} == {f"{cluster.name}-0"}


def test_tasks_that_fill_a_worker_s_resources_share_the_jobs(queue: LocalQueue, until: Until) -> None:
    options = CPU | {"cores": 4, "resources": {"MEMORY": 100e9}}
    with LocalGPUCluster(**options) as cluster, Client(cluster) as client:
        # Each task is work for a job of its own, however long it is expected to take.
        adaptive = cluster.adapt(maximum_jobs=3, idle_timeout="1s", target_duration="1ms")
        tasks = client.map(wait_for, [f"go-{i}" for i in range(4)], resources={"MEMORY": 70e9})
        until(lambda: len(cluster.workers) == 3, lambda: f"three jobs work: {adaptive.state.reason}")

        def executing(dask_scheduler: Any) -> list[int]:
            return sorted(len(ws.executing) for ws in dask_scheduler.workers.values())

        until(lambda: client.run_on_scheduler(executing) == [1, 1, 1], "each worker runs a task")
        for i in range(4):
            Event(f"go-{i}", client=client).set()
        assert {name.rsplit("-", 1)[0] for name in client.gather(tasks)} == {cluster.name}
        assert {job.name for job in cluster.jobs if job.kind == "worker"} == {f"{cluster.name}-{i}" for i in range(3)}


def test_a_group_inherits_account_walltime_and_environment_and_one_that_cannot_be_is_refused(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, name="over", walltime="1h", account="m1", env={"A": "1"}) as cluster:
        for name, options, message in GROUPS_THAT_CANNOT_BE:
            with pytest.raises(OptionError, match=message):
                cluster.add_worker_group(name, **options)
        assert not saved_options.read(cluster.directory).groups
        cluster.add_worker_group("big", gpus_per_node=0, cores=3, env={"B": "2"})
        options = saved_options.read(cluster.directory).groups["big"]
        assert (options.walltime, options.account, dict(options.env), options.cores) == (
            3600,
            "m1",
            {"A": "1", "B": "2"},
            3,
        )
        assert (cluster.directory.path / "worker-big.sh").exists()
        cluster.directory.begin_close()  # `hpcgpu stop` begins
        with pytest.raises(ClusterError, match="was closed, by its program or by `hpcgpu stop`"):
            cluster.add_worker_group("late", jobs=1)
        with pytest.raises(OptionError, match="no worker group named 'late': the groups are default, big"):
            cluster.scale(jobs=1, worker_group="late")
        assert saved_options.read(cluster.directory).groups.keys() == {"big"}, "what is refused leaves nothing"


GROUPS_THAT_CANNOT_BE: list[tuple[str, dict[str, Any], str]] = [
    ("default", {}, "there is a worker group named 'default' already"),
    ("a/b", {}, "is not a valid name"),
    ("big", {"memori": "1TB"}, "unknown option 'memori': did you mean 'memory'"),
    ("big", {"gpus_per_node": 0, "rmm_pool_size": "1GB"}, "rmm_pool_size is an option of GPU workers"),
]


def test_a_scheduler_that_receives_heartbeats_lives_on(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, lease=6, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers()
        assert client.submit(time.sleep, 15).result() is None
        assert cluster.status.name == "running"


def test_waiting_jobs_are_kept_through_a_lull(queue: LocalQueue, home: Path, fake_gpus: None, until: Until) -> None:
    with LocalGPUCluster(**GPU | {"gpus_per_node": 4}, name="lull") as cluster, Client(cluster) as client:
        block = home / "block.sh"
        block.write_text("#!/bin/bash\n#HPCGPU --gpus=4\n#HPCGPU --output=/dev/null\nexec sleep 600\n")
        blocker = queue.submit(block, job_name="blocker")
        adaptive = cluster.adapt(maximum_jobs=1, idle_timeout="10s")
        future = client.submit(slow, 1)
        until(lambda: adaptive.state.pending == 1 and adaptive.state.waiting, "a job waits")
        future.cancel()
        until(lambda: adaptive.state.target == 0, "there is no work any more")
        assert in_queue(queue, "lull-0"), "a waiting job was cancelled at once"
        until(lambda: not in_queue(queue, "lull-0"), "it is cancelled after a while")
        queue.cancel([blocker])
