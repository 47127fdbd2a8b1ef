"""A full disk: what fails because of it reports it, and which disk it is."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from distributed.exceptions import WorkerStartTimeoutError

import hpcgpu
from hpcgpu import ClusterError, LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, told
from tests.helpers import CPU
from tests.helpers import hpcgpu as command_line
from tests.local.test_detached_restarts import DETACHED, lose_scheduler
from tests.local.test_restarted_scheduler import end_scheduler

Until = Callable[..., None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory that is a small disk."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "hpcgpu-full", str(directory)])
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield directory
    finally:
        # lazily: the last process that writes there may be about to end
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk; return the file that takes the room."""
    with pytest.raises(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return disk / "filler"


def fill_last_page(file: Path) -> None:
    """Fill what a file has on a full disk, so that nothing more can be written to it."""
    with suppress(OSError), open(file, "ab", buffering=0) as log:
        log.write(b"\n" * (-file.stat().st_size % 4096))


def test_the_message_names_the_full_disk(queue: LocalQueue, disk: Path) -> None:
    fill(disk)
    with pytest.raises(ClusterError) as failed:
        LocalGPUCluster(**CPU, log_directory=str(disk), scheduler={"job_script_prologue": ["exit 3"]})
    said = str(failed.value)
    assert f"the disk of {disk} is full, so its log may lack the reason. Log: {disk}/" in said


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of 3 MB."""
    (tmp_path / "own_large").mkdir()
    (tmp_path / "own_large" / "__init__.py").write_text("def one(): return 1")
    (tmp_path / "own_large" / "data").write_bytes(os.urandom(3 << 20))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("own_large")


def test_an_upload_that_a_worker_cannot_unpack_raises_and_the_other_workers_have_the_package(
    queue: LocalQueue, disk: Path, large: Any
) -> None:
    with LocalGPUCluster(**CPU, jobs=1) as cluster, Client(cluster) as client:
        place = {"local_directory": str(disk), "resources": {"full": 1}}
        cluster.add_worker_group("full", jobs=1, gpus_per_node=0, **place)
        cluster.wait_for_workers()
        with pytest.raises(OSError, match=rf"cannot unpack the uploaded package own-large: {disk}/.*No space left"):
            cluster.upload_package(Path(large.__file__).parent)
        one_of_all = client.map(lambda _: 1, range(2), workers=[*cluster.scheduler_info["workers"]], pure=False)
        assert client.gather(one_of_all) == [1, 1] and len(cluster.scheduler_info["workers"]) == 2
        other = [w for w, about in cluster.scheduler_info["workers"].items() if "full" not in about["resources"]]
        assert client.submit(large.one, workers=other).result() == 1


@pytest.mark.filterwarnings("ignore::hpcgpu.errors.ClusterWarning")
def test_a_later_worker_that_cannot_unpack_an_uploaded_package_takes_no_task_and_the_user_gets_the_reason(
    queue: LocalQueue, disk: Path, large: Any
) -> None:
    with LocalGPUCluster(**CPU, jobs=1, worker_restarts=0) as cluster, Client(cluster) as client:
        cluster.upload_package(Path(large.__file__).parent)
        place = {"local_directory": str(disk), "resources": {"later": 1}}
        reason = rf"cannot unpack the uploaded package own-large: {disk}/.* cannot be written: No space left on device"
        with told(
            rf"worker job \d+ \({cluster.name}-1\) failed: .*; worker {cluster.name}-1 {reason}. Make room there"
        ):
            cluster.add_worker_group("later", jobs=1, gpus_per_node=0, **place)
            wanted = client.submit(large.one, resources={"later": 1}, pure=False)
        assert not wanted.done()
        with pytest.raises(ClusterError, match=reason):
            cluster.wait_for_workers()
        assert client.submit(large.one).result() == 1


@pytest.mark.filterwarnings("ignore::hpcgpu.errors.ClusterWarning")
def test_a_wait_for_a_worker_that_cannot_unpack_an_uploaded_package_when_it_starts_again_reports_it(
    queue: LocalQueue, disk: Path, large: Any, until: Until
) -> None:
    """A restart or a wait may succeed: the scheduler has seen the new worker, for a moment."""
    with LocalGPUCluster(**CPU, jobs=1, local_directory=str(disk)) as cluster, Client(cluster) as client:
        cluster.wait_for_workers()
        with pytest.raises(OSError, match="No space left"):
            cluster.upload_package(Path(large.__file__).parent)
        reason = rf"cannot unpack the uploaded package own-large: {disk}/.* cannot be written: No space left on device"
        with told(reason), suppress(TimeoutError):
            client.restart_workers([*cluster.scheduler_info["workers"]], timeout=1)
        late: list[WorkerStartTimeoutError] = []

        def waits_in_vain() -> bool:
            try:
                cluster.wait_for_workers(timeout=2)
            except WorkerStartTimeoutError as error:
                late.append(error)
            return bool(late)

        until(waits_in_vain, "a wait ends without the worker")
        assert re.search(rf"; the last failure: worker job .* {reason}. Make room there", late[0].__notes__[0])


def test_a_take_over_names_the_full_disk_and_does_not_blame_the_scheduler(queue: LocalQueue, disk: Path) -> None:
    LocalGPUCluster(name="demo", cluster_directory=str(disk), **CPU).detach()
    filler = fill(disk)
    try:
        with pytest.raises(ClusterError) as failed:
            LocalGPUCluster.from_name(disk / "demo")
        words = f"{disk}/demo cannot be written: No space left on device. Make room there"
        assert str(failed.value) == f"Cluster demo cannot be taken over: {words}"
        command = [sys.executable, "-P", "-m", "hpcgpu", "adapt", str(disk / "demo"), "--maximum-jobs", "1"]
        adapted = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert (adapted.returncode, adapted.stderr) == (1, f"Error: {words}\n")
    finally:
        filler.unlink()
        LocalGPUCluster.from_name(disk / "demo").close()
    assert live(queue) == []


def test_a_cluster_that_loses_its_scheduler_while_the_disk_is_full_goes_on_when_there_is_room(
    queue: LocalQueue, disk: Path, until: Until
) -> None:
    LocalGPUCluster(name="demo", jobs=1, cluster_directory=str(disk), **DETACHED).detach()
    place = str(disk / "demo")
    with hpcgpu.connect(place, quiet=True) as client:
        client.wait_for_workers(1)
        until(lambda: queue.find("demo-scheduler2"), "the next one is in the queue")
        worker, following = queue.find("demo-0"), queue.find("demo-scheduler2")
        filler = fill(disk)
        for log in (disk / "demo" / "logs").iterdir():
            fill_last_page(log)
        lose_scheduler(client, lambda: end_scheduler(client, signal.SIGKILL))
        full = f"its address cannot be written: the disk of {place} is full. Make room there"
        until(lambda: full in command_line("status", place).stdout, lambda: command_line("status", place).stdout)
        filler.unlink()
        assert client.submit(pow, 2, 5).result() == 32
        client.wait_for_workers(1)
    assert (queue.find("demo-0"), queue.find("demo-scheduler2")) == (worker, following), "both jobs have gone on"
    assert command_line("stop", place).returncode == 0
    assert live(queue) == []


def test_a_manager_that_cannot_write_on_a_full_disk_reports_it(queue: LocalQueue, disk: Path) -> None:
    LocalGPUCluster(name="demo", cluster_directory=str(disk), shutdown_on_close=False, **CPU).close()
    place = str(disk / "demo")
    filler = fill(disk)
    try:
        done = command_line("manage", place)
        assert done.returncode == 1, done.stdout
        log = f"{place}/logs/manager.log"
        assert f"cluster demo: {log} cannot be written: No space left on device. Make room there" in done.stderr
    finally:
        filler.unlink()
        command_line("stop", place)
    assert live(queue) == []
