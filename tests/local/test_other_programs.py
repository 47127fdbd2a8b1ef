"""What every display shows of a cluster, and requests of other programs to the program that manages it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster, OptionError, Snapshot
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cluster.notebook import _Control
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.existing_clusters.snapshot import Observer
from hpcgpu.existing_clusters.stop import stop
from hpcgpu.orders import change_size
from tests.conftest import live, told
from tests.helpers import CPU, FOR_EVER, GPU, command, kill_program, printed, start_program
from tests.helpers import hpcgpu as hpcgpu_command

Until = Callable[..., None]


def test_a_snapshot_is_the_same_for_the_program_that_manages_the_cluster_and_for_any_other(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(**GPU | {"walltime": "1h", "scheduler": {"walltime": "2h"}}, name="seen", jobs=2) as cluster:
        cluster.wait_for_workers(2)
        until(lambda: hpcgpu.snapshot("seen").groups, "the manager reports its groups")
        own, other = cluster.snapshot(), hpcgpu.snapshot("seen")
        for picture in (own, other):
            assert (picture.name, picture.state, picture.system) == ("seen", "running", "local")
            assert picture.workers == picture.gpus == 2, "four GPUs of the queue: the scheduler job has two of them"
            assert 0 < picture.gpu_hours < 1
            assert [job.kind for job in picture.jobs] == ["scheduler", "worker", "worker"]
            assert sorted(job.state for job in picture.jobs) == ["pending", "running", "running"]
            [waits] = [job for job in picture.jobs if job.state == "pending"]
            assert waits.reason and waits.time_left is None and waits.started is None
            [works] = [job for job in picture.jobs if job.workers]
            assert works.gpus == 2 and works.started and 3000 < (works.time_left or 0) <= 3600
            assert 6000 < (picture.time_left or 0) <= 7200, "the scheduler job's"
            [group] = picture.groups
            assert (group["name"], group["target"], group["minimum"], group["paused"]) == ("default", 2, None, "")
        assert hpcgpu.snapshot(cluster).name == "seen"
        assert own.as_json().keys() == other.as_json().keys()
    closed = cluster.snapshot()
    assert (closed.state, closed.gpus) == ("closed", 0) and closed.gpu_hours > 0
    assert hpcgpu.snapshot("seen").state == "closed"


def order(config: Path, cluster: str, command: str, **given: Any) -> str:
    """Order as a program on a laptop does; return what is wrong."""
    config.write_text(json.dumps({"command": command, **given}))
    return hpcgpu_command("order", "--config", str(config), "--", cluster).stderr


def test_worker_groups_that_another_program_changes_are_changed_by_the_program_that_manages_the_cluster(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    config, big = tmp_path / "order", {"name": "big", "jobs": 1, "gpus_per_node": 0, "cores": 1}
    with LocalGPUCluster(**CPU, name="seen", jobs=1) as cluster:
        cluster.wait_for_workers(1)
        assert order(config, "seen", "add_worker_group", **big) == ""
        assert cluster.managing and not cluster.directory.detached, "it was taken over"
        cluster.wait_for_workers(2)
        assert {group.name: group.options.cores for group in cluster._state.registry.groups.values()}["big"] == 1
        assert "a worker group named 'big' already" in order(config, "seen", "add_worker_group", **big)
        assert "the default group cannot be" in order(config, "seen", "delete_worker_group", name="default")
        assert order(config, "seen", "delete_worker_group", name="big") == ""
        assert "no worker group named 'big'" in order(config, "seen", "delete_worker_group", name="big")
        until(lambda: len(live(queue)) == 2, "the job of the group has ended")
        assert cluster.managing and not cluster.directory.detached
    assert live(queue) == []


def test_worker_groups_of_a_cluster_without_a_manager_are_changed_by_the_program_that_wants_it(
    queue: LocalQueue, tmp_path: Path
) -> None:
    LocalGPUCluster(**CPU, name="left").detach()
    big = {"name": "big", "jobs": 1, "gpus_per_node": 0, "cores": 1}
    assert order(tmp_path / "order", "left", "add_worker_group", **big) == ""
    assert len(live(queue)) == 2
    with LocalGPUCluster.from_name("left") as cluster:
        cluster.wait_for_workers(1)
        assert list(cluster._state.registry.groups) == ["default", "big"]
        cluster.detach()
    assert order(tmp_path / "order", "left", "delete_worker_group", name="big") == ""
    assert list(locate("left").wanted().groups) == ["default"]
    assert stop(locate("left"), queue) is not None
    assert live(queue) == []


def test_a_job_that_has_ended_is_not_shown_as_running_long_after_however_seldom_the_queue_is_polled(
    queue: LocalQueue, until: Until
) -> None:
    with LocalGPUCluster(**CPU | {"poll_interval": "5m"}, name="rare", jobs=1) as cluster:
        cluster.wait_for_workers(1)
        observer = Observer(cluster.directory)

        def states() -> list[str]:
            return [job.state for job in observer.snapshot().jobs if job.name == "rare-0"]

        until(lambda: states() == ["running"], lambda: f"it is seen from outside: {states()}")
        [job] = [job for job in cluster.snapshot().jobs if job.name == "rare-0"]
        queue.cancel([job.id])
        until(lambda: "running" not in states(), lambda: f"the page and other programs see its end: {states()}")
        own = lambda: [job.state for job in cluster.snapshot().jobs if job.name == "rare-0"]  # noqa: E731
        until(lambda: "running" not in own(), lambda: f"the program itself sees its end: {own()}")


def test_another_program_scales_a_cluster_while_its_own_program_computes_and_keeps_it(
    queue: LocalQueue, until: Until
) -> None:
    with LocalGPUCluster(**CPU, name="served", jobs=0) as cluster:
        program = subprocess.Popen([sys.executable, "-c", _SCALE, "served"], stdout=subprocess.PIPE, text=True)
        out, _ = program.communicate(timeout=150)  # this thread is as busy as a cell that runs
        assert out.split() == ["done"]
        assert cluster.managing, "the other program did not take it over"
        cluster.wait_for_workers(1)
        change_size.adapt(locate("served"), minimum_jobs=1, maximum_jobs=3)
        assert cluster.adaptive is not None and (cluster.adaptive.minimum, cluster.adaptive.maximum) == (1, 3)
        with pytest.raises(OptionError, match="minimum"):
            change_size.adapt(locate("served"), minimum_jobs=5, maximum_jobs=3)
        with pytest.raises(OptionError, match="no worker group named 'other'"):
            change_size.scale(locate("served"), jobs=1, worker_group="other")
        assert "another program requests scale" in cluster.get_logs()["Cluster"]

        # by the command
        done = hpcgpu_command("adapt", "served", "--minimum-jobs", "1", "--maximum-jobs", "4", "--idle-timeout", "5m")
        assert done.returncode == 0, done.stderr
        assert f"process {os.getpid()}" in done.stdout and "scales it by its work from now on" in done.stdout
        assert cluster.managing and not cluster.directory.detached
        assert cluster.adaptive is not None and (cluster.adaptive.minimum, cluster.adaptive.maximum) == (1, 4)
        done = hpcgpu_command("adapt", "served", "--minimum-jobs", "3", "--maximum-jobs", "2")
        assert done.returncode == 2 and "minimum" in done.stderr
        terminal, program = pty.openpty()
        asks = command("adapt", "served", "--maximum-jobs", "1")
        said = subprocess.run(asks, stdin=program, capture_output=True, timeout=250)
        os.close(terminal)
        os.close(program)
        assert said.returncode == 0, said.stderr
        until(lambda: "as you work interactively" in cluster.adaptive.state.reason, "at a terminal sits a person")
        assert cluster.managing


_SCALE = """
import sys
from hpcgpu.orders.change_size import scale
from hpcgpu.existing_clusters.lookup import locate
scale(locate(sys.argv[1]), jobs=1)
print("done")
"""


def test_no_request_takes_a_cluster_that_waits_away_from_its_program(
    queue: LocalQueue, fake_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalGPUCluster(**GPU, name="first", jobs=2) as first:
        first.wait_for_workers(4)  # all GPUs of the queue
        with LocalGPUCluster(**GPU | {"wait": False, "scheduler": {"gpus_per_node": 1}}, name="behind") as cluster:
            with pytest.raises(ClusterError, match=r"manages cluster behind.*takes no requests now"):
                change_size.scale(locate("behind"), jobs=2)
            with monkeypatch.context() as patch:  # this program is on another login node, and cannot see that one
                patch.setattr("socket.gethostname", lambda: "login2")
                with pytest.raises(ClusterError, match=r"manages cluster behind.*takes no requests now"):
                    change_size.scale(locate("behind"), jobs=2)
            assert cluster.managing and not cluster.directory.detached


def test_a_cluster_without_a_manager_is_scaled_and_left_to_itself(queue: LocalQueue, until: Until) -> None:
    cluster = LocalGPUCluster(**CPU, name="alone", jobs=0)
    cluster.detach()
    assert cluster.snapshot().state == "running", "it continues, though this program has left it"

    async def cell() -> list[str]:  # of a notebook, whose event loop runs
        return [_of("alone").state, cluster.snapshot().state, cluster.report().name]

    assert asyncio.run(cell()) == ["running", "running", "alone"]
    assert not _of("alone").groups, "what its manager said of them is not true any more"
    _Control(cluster).scale(jobs=1, worker_group="default")  # as a click in the notebook that detached it
    until(lambda: _of("alone").workers == 1, "its worker connects")
    with pytest.raises(OptionError, match="no worker group named 'other'"):
        change_size.adapt(locate("alone"), maximum_jobs=2, worker_group="other")
    change_size.adapt(locate("alone"), minimum_gpus=None, maximum_jobs=2)
    until(lambda: [group["maximum"] for group in _of("alone").groups] == [2], "its scheduler job scales it")
    for wrong in ({"jobs": "many"}, {"jobs": 1, "worker_group": "other"}):
        with pytest.raises(OptionError):
            change_size.scale(locate("alone"), **wrong)  # type: ignore[arg-type]
    assert _of("alone").groups[0]["maximum"] == 2, "what is refused does not end that"
    change_size.scale(locate("alone"), jobs=0)
    until(lambda: _of("alone").workers == 0, "the scheduler job no longer scales it")
    LocalGPUCluster.from_name("alone").close()


def test_a_cluster_whose_program_died_has_no_lease_any_more_once_another_program_has_scaled_it(
    queue: LocalQueue,
) -> None:
    kill_program(CPU | {"name": "orphan", "jobs": 1})
    assert not _of("orphan").detached
    done = hpcgpu_command("scale", "orphan", "--jobs", "0")
    assert done.returncode == 0, done.stderr
    assert _of("orphan").detached, "else its scheduler ends ten minutes later, with all results"
    stop(locate("orphan"), queue)


def _of(name: str) -> Snapshot:
    return hpcgpu.snapshot(name)


#: What a program that takes the cluster over does; it lives until its input ends.
_TAKES_OVER = """
import sys
from hpcgpu import LocalGPUCluster
cluster = LocalGPUCluster.from_name(sys.argv[1], shutdown_on_close=False)
cluster.scale(jobs=int(sys.argv[2]))
cluster.settle()
cluster.wait_for_workers(int(sys.argv[2]))
print("scaled", flush=True)
sys.stdin.read()
"""


def _about(snapshot: Snapshot) -> dict[str, object]:
    """What must not differ between two snapshots of the same moment."""
    jobs = sorted((job.name, job.state, job.workers) for job in snapshot.jobs)
    sizes = [(group["name"], group["target"], group["maximum"]) for group in snapshot.groups]
    return {"state": snapshot.state, "workers": snapshot.workers, "jobs": jobs, "groups": sizes} | {
        "manager": snapshot.manager,
        "scheduler": snapshot.scheduler,
        "warnings": snapshot.warnings,
        "detached": snapshot.detached,
    }


def test_a_program_whose_cluster_was_taken_over_goes_on_reading(queue: LocalQueue, until: Until) -> None:
    first = LocalGPUCluster(**CPU, name="over", jobs=1)
    first.wait_for_workers(1)
    kept = first.adapt(minimum_jobs=1, maximum_jobs=2)
    control = _Control(first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = subprocess.Popen(
            [sys.executable, "-c", _TAKES_OVER, "over", "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert program.stdout is not None and program.stdin is not None
            assert program.stdout.readline() == "scaled\n"
            until(lambda: not first.managing, "it notices")
            until(lambda: [group["target"] for group in _of("over").groups] == [3], "the other one reports")
            assert first.wait_for_workers(3) is None and len(first.scheduler_info["workers"]) == 3
            until(lambda: _about(first.snapshot()) == _about(_of("over")), "both show the same")
            own = first.snapshot()
            assert own.workers == 3 and [job.workers for job in first.jobs if job.kind == "worker"] == [1, 1, 1]
            assert f"(process {program.pid} on " in own.manager
            assert f"process {program.pid}" in repr(first) and "workers=" not in repr(first)
            for adaptive in (kept, first.adaptive):
                assert adaptive is not None and not adaptive.running
                with pytest.raises(ClusterError, match=f"taken over by .*process {program.pid} "):
                    _ = adaptive.state
            with pytest.raises(ClusterError, match="taken over by"):
                first.wait_for_workers()
            change_size.scale(locate("over"), jobs=2)  # as a click does, by the Jupyter server
            until(lambda: first.snapshot().workers == 2, "what it shows follows")
            # not always in one moment: between two polls the job may pass from completing to cancelled
            until(lambda: _about(first.snapshot()) == _about(_of("over")), "both show the same")
            control.scale(jobs=1, worker_group="default")  # as a click does, without that server
            until(lambda: first.snapshot().workers == 1, "the other program has done it")
            assert not first.managing and f"(process {program.pid} on " in first.snapshot().manager
        finally:
            program.communicate("")
        control.stop()
        until(lambda: _about(first.snapshot()) == _about(_of("over")), "both show the same")
        assert first.snapshot().state == "closed"
        states = {job.kind: job.state for job in first.snapshot().jobs}
        assert "running" not in states.values() and len(first.snapshot().jobs) == 4, "no job is shown as running"
        assert "status=closed): it has ended" in repr(first) and not first.snapshot().problem
    told = [str(one.message) for one in caught if "taken over" in str(one.message)]
    assert len(told) == 1 and f"process {program.pid} " in told[0], "the notice comes once, and names the program"


def test_a_cluster_that_hpcgpu_stop_ended_is_shown_to_its_program_as_to_all_others(queue: LocalQueue) -> None:
    cluster = LocalGPUCluster(**CPU, name="stopped", jobs=1)
    cluster.wait_for_workers(1)
    with told("cluster stopped was stopped by another program, such as `hpcgpu stop`$"):
        done = hpcgpu_command("stop", "stopped")
        assert done.returncode == 0, done.stderr
    own = cluster.snapshot()
    assert _about(own) == _about(_of("stopped")) and (own.state, own.groups) == ("closed", [])
    for jobs in (own.jobs, cluster.jobs):
        assert [(job.state, job.reason) for job in jobs] == [("cancelled", "hpcgpu cancelled it")] * 2
    cluster.close()


def test_the_command_scales_a_cluster_and_leaves_it_to_its_program(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU, name="stays", jobs=1, worker_restarts=0) as cluster:
        cluster.wait_for_workers(1)
        with told("a worker job failed; it is not replaced until you scale or adapt the group again"):
            queue.cancel([str(job.job_id) for job in cluster.workers.values()])
            until(lambda: [group["paused"] for group in _of("stays").groups if group["paused"]], "others see the pause")
        done = hpcgpu_command("scale", "stays", "--jobs", "1", "--json")  # the present size; this ends the pause
        assert done.returncode == 0 and "stays-1" in [job["name"] for job in printed("scale", done.stdout)], done.stderr
        assert cluster.managing and not cluster.directory.detached
        cluster.wait_for_workers(1)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_that_another_program_detaches_continues_after_the_end_of_its_own(
    queue: LocalQueue, end: signal.Signals
) -> None:
    block = f"with cluster:\n    cluster.wait_for_workers(1)\n    print('there', flush=True)\n    {FOR_EVER}"
    program = start_program(CPU | {"name": "kept", "jobs": 1}, block)
    try:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)] == ["up\n", "there\n"]
        done = hpcgpu_command("detach", "kept")
        assert done.returncode == 0, done.stderr
        assert f"process {program.pid}" in done.stdout and "kept: continues after" in done.stdout
        assert _of("kept").detached and f"process {program.pid}" in _of("kept").manager, "it stays the manager"
    finally:
        program.send_signal(end)  # SIGINT: the block ends, and closes the cluster. SIGTERM: the program ends in it
        program.communicate(timeout=250)
    assert len(live(queue)) == 2
    client = hpcgpu.connect("kept", quiet=True)
    assert client.submit(sum, [1, 2, 3]).result(timeout=150) == 6
    client.close()
    stop(locate("kept"), queue)


def test_a_cluster_whose_program_died_has_no_lease_any_more_once_another_program_has_detached_it(
    queue: LocalQueue,
) -> None:
    kill_program(CPU | {"name": "orphan", "jobs": 1})
    done = hpcgpu_command("detach", "orphan")
    assert done.returncode == 0, done.stderr
    assert "orphan: continues without a program" in done.stdout and _of("orphan").detached
    assert len(live(queue)) == 2
    stop(locate("orphan"), queue)


def test_a_cluster_cannot_be_detached_from_its_own_scheduler(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, name="inside", jobs=0, scheduler="local") as cluster:
        done = hpcgpu_command("detach", "inside")
        assert done.returncode == 1 and "the scheduler runs in the program that made the cluster" in done.stderr
        with pytest.raises(ClusterError, match="the scheduler runs in the program that made the cluster"):
            cluster.detach()
        assert cluster.managing and not cluster.directory.detached


@pytest.mark.parametrize("adapts", [True, False])
def test_another_program_ends_a_pause_and_changes_nothing_else(queue: LocalQueue, until: Until, adapts: bool) -> None:
    with LocalGPUCluster(**CPU, name="stays", jobs=1, worker_restarts=0) as cluster:
        if adapts:
            cluster.adapt(minimum_jobs=1, maximum_jobs=3, idle_timeout="7m")
        cluster.wait_for_workers(1)
        before = cluster._state.wanted.groups["default"]
        with told("is paused until|is not replaced until"):
            queue.cancel([str(job.job_id) for job in cluster.workers.values()])
            until(lambda: [group["paused"] for group in _of("stays").groups if group["paused"]], "others see the pause")
        done = hpcgpu_command("resume", "stays")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        cluster.wait_for_workers(1)
        done = hpcgpu_command("resume", "stays")
        assert (done.returncode, done.stdout) == (0, "stays: worker group default was not paused\n"), done.stderr
        after = cluster._state.wanted.groups["default"]
        assert (after.limits, after.target_duration) == (before.limits, before.target_duration)
        assert cluster.managing and not cluster.directory.detached
        refused = hpcgpu_command("resume", "stays", "--worker-group", "other")
        assert refused.returncode == 2 and "no worker group named 'other'" in refused.stderr
