"""What the GPUs of a cluster do, by the heartbeats of its workers; the GPUs and their driver are pretended."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import CPU, GPU

Until = Callable[..., None]


def devices(cluster: LocalGPUCluster) -> list[dict[str, Any]]:
    """What the scheduler reports of the GPUs."""

    async def ask() -> Any:
        return await cluster.scheduler_comm.hpcgpu_gpus()

    return list(cluster.sync(ask))


def test_the_scheduler_records_what_each_gpu_does_and_since_when_it_is_idle(
    queue: LocalQueue, fake_gpus: None, home: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    says = home / "says"
    says.mkdir()
    monkeypatch.setenv("STUBNVML_READINGS", str(says))
    with LocalGPUCluster(jobs=1, **GPU, name="gpus") as cluster:
        cluster.add_worker_group("cpu", gpus_per_node=0)
        cluster.scale(jobs=1, worker_group="cpu")
        cluster.wait_for_workers(3)
        until(lambda: [gpu["power"] for gpu in devices(cluster)] == [70.0, 70.0], "heartbeats have readings")
        first, second = devices(cluster)
        assert first["worker"].endswith("-0-0") and second["worker"].endswith("-0-1")
        assert (first["model"], first["memory_total"], first["memory_used"]) == ("Fake GPU", 16 << 30, 1 << 30)
        assert first["node"] and first["idle_since"] and second["idle_since"]
        page, token = f"{cluster.dashboard_link.removesuffix('/status')}/hpcgpu", cluster.directory.dashboard_token()
        request = urllib.request.Request(page, headers={"Authorization": f"token {token}"})
        with urllib.request.urlopen(request, timeout=150) as answer:
            assert b"GPUs by job" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(page, timeout=150)
        (says / "1").write_text("80 9000 250500")
        until(lambda: devices(cluster)[1]["utilization"] == 80.0, "the second GPU computes")
        first, second = devices(cluster)
        assert (second["power"], second["memory_used"], second["idle_since"]) == (250.5, 9000, None)
        assert (first["utilization"], first["power"]) == (0.0, 70.0) and first["idle_since"]
        (says / "1").write_text("-1 -1 -1")
        until(lambda: devices(cluster)[1]["utilization"] is None, "the driver says nothing more")
        until(lambda: devices(cluster)[1]["idle_since"], "no task runs, so it is idle")
        assert (devices(cluster)[1]["power"], devices(cluster)[1]["memory_used"]) == (None, None)


def test_workers_without_gpus_have_no_gpu_though_their_node_has(queue: LocalQueue, fake_gpus: None) -> None:
    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        assert devices(cluster) == []
