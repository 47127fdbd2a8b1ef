"""Jobs run an environment that was packed into an archive: each node unpacks it once, and keeps nothing of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from fake_pbs import Site

from hpcgpu import ClusterError, ClusterWarning, LocalGPUCluster, PBSGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU, GPU, PBS_CPU
from tests.packed import Environment

Until = Callable[..., None]


@pytest.fixture
def node(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this node for temporary files."""
    place = home / "node"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def interpreter() -> Callable[[], tuple[str, str]]:
    def look() -> tuple[str, str]:
        return sys.executable, sys.prefix

    return look


def environments(node: Path) -> list[Path]:
    return sorted(node.glob("hpcgpu-environment-*"))


@pytest.mark.parametrize("options", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_process_of_a_cluster_runs_the_packed_environment_which_goes_with_the_last_job(
    queue: LocalQueue, node: Path, environment: Environment, fake_gpus: None, options: dict[str, Any], until: Until
) -> None:
    archive = environment.archive("env.tar.gz")
    with (
        LocalGPUCluster(**options, stage=archive, jobs=2 if options is CPU else 1) as cluster,
        Client(cluster) as client,
    ):
        cluster.wait_for_workers(2)
        (place,) = environments(node)
        assert place.stat().st_mode & 0o777 == 0o700 and (place / "environment").stat().st_mode & 0o777 == 0o700
        staged = (f"{place}/environment/bin/python", f"{place}/environment")
        assert client.run_on_scheduler(interpreter()) == staged
        for nanny in (False, True):
            assert set(client.run(interpreter(), nanny=nanny).values()) == {staged}
        said = [path.read_text() for path in cluster.directory.logs.iterdir()]
        assert sum(text.count("hpcgpu: unpacked") for text in said) == 1
        cluster.scale(jobs=0)
        until(lambda: len(cluster.scheduler_info["workers"]) == 0, "the workers end")
        assert environments(node) == [place]  # the scheduler uses it
    until(lambda: list(node.iterdir()) == [], "the last job removes the environment")


def test_jobs_of_a_changed_archive_fail_and_the_user_is_shown_why(
    queue: LocalQueue, node: Path, environment: Environment
) -> None:
    archive = environment.archive("env.tar")
    with LocalGPUCluster(**CPU, scheduler="local", stage=archive, worker_restarts=0) as cluster:
        archive.write_bytes(archive.read_bytes() + bytes(512))
        with (
            pytest.warns(ClusterWarning),
            pytest.raises(ClusterError, match="has changed since the job script was written"),
        ):
            cluster.scale(jobs=1)
            cluster.wait_for_workers(1)
    assert list(node.iterdir()) == []


def test_a_worker_job_that_is_killed_does_not_take_the_environment_from_the_others(
    queue: LocalQueue, node: Path, environment: Environment, until: Until
) -> None:
    options = {**CPU, "scheduler": "local", "stage": environment.archive("env.tar")}
    with LocalGPUCluster(**options, jobs=2) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        before = set(client.scheduler_info()["workers"])
        job = next(job.id for job in cluster.jobs if job.kind == "worker")
        for process in [one for one in psutil.process_iter(["environ"]) if mark(one) == (str(queue.directory), job)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with its parent
                process.kill()
        until(lambda: len(set(client.scheduler_info()["workers"]) - before) == 1, "another job replaces it")
        assert set(client.scheduler_info()["workers"]) & before
    until(lambda: list(node.iterdir()) == [], "the last job removes the environment")


def mark(process: psutil.Process) -> tuple[str | None, str | None]:
    """The embedded queue that a process belongs to, and its job there."""
    environment = process.info["environ"] or {}
    return environment.get("HPCGPU_QUEUE_DIRECTORY"), environment.get("HPCGPU_JOB_ID")


def test_the_check_in_a_job_tries_the_packed_environment(
    queue: LocalQueue, node: Path, environment: Environment, until: Until
) -> None:
    archive = environment.archive("env.tar")
    command = [sys.executable, "-m", "hpcgpu", "check", "--in-job", "--json", "--system", "local"]
    command += ["--gpus-per-node", "0", "--stage", str(archive)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in json.loads(done.stdout)["lines"] if line["what"] == "python"]
    assert len(lines) == 3 and all(f"{node}/hpcgpu-environment-" in line["found"] for line in lines[1:])
    until(lambda: list(node.iterdir()) == [], "the jobs remove the environment")


def test_each_node_of_a_pbs_job_runs_the_packed_environment(
    pbs: Site, home: Path, environment: Environment, until: Until
) -> None:
    node = home / "disk"
    options = {**PBS_CPU, "stage": environment.archive("env.tar"), "local_directory": str(node)}
    with PBSGPUCluster(**options, jobs=1, nodes_per_job=2) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        (place,) = environments(node)
        staged = (f"{place}/environment/bin/python", f"{place}/environment")
        assert list(client.run(interpreter()).values()) == [staged, staged]
    until(lambda: environments(node) == [], "the last job removes the environment")
