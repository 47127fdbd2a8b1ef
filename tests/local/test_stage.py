"""Jobs run an environment that was packed into an archive: each node unpacks it once, and keeps nothing of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU, GPU
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
