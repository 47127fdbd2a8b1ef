"""What the scheduler knows of the GPUs of its workers, from their heartbeats."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.fabric.report import NODE
from hpcgpu.runtime.readings import METRIC, Device, Reading
from hpcgpu.runtime.recipients import GPUS
from hpcgpu.runtime.usage import Usage, computes, period
from hpcgpu.runtime.wire import GPUState


class Worker:
    """What the scheduler has of a worker."""

    def __init__(self, name: str, *, gpus: int = 1) -> None:
        self.name, self.host = name, "10.0.0.1"
        self.processing: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}
        self.extra: dict[str, Any] = {GPUS: gpus, NODE: "n1"}
        if gpus:
            self.extra[METRIC] = {"model": "A100", "memory_total": 40}

    def says(self, utilization: float | None, tasks: int = 0) -> None:
        self.metrics = {METRIC: Reading(utilization=utilization, memory_used=9, power=60.5)}
        self.processing = {str(i): 1.0 for i in range(tasks)}


def gpus(usage: Usage) -> list[GPUState]:
    return asyncio.run(usage.gpus())


def usage_of(*workers: Worker) -> Usage:
    async def make() -> Usage:
        return Usage(SimpleNamespace(workers={w.name: w for w in workers}))  # type: ignore[arg-type]

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("utilization", "tasks", "expected"), [(0, 3, False), (1, 0, True), (None, 3, True), (None, 0, False)]
)
def test_a_gpu_computes_if_the_driver_says_so_and_else_if_its_worker_has_tasks(
    utilization: float | None, tasks: int, expected: bool
) -> None:
    assert computes(Reading(utilization=utilization, memory_used=None, power=None), tasks) is expected


def test_a_gpu_is_idle_since_the_first_sample_in_which_it_computes_nothing() -> None:
    worker = Worker("demo-0")
    usage = usage_of(worker)
    for now, utilization, idle_since in ((1.0, 0, 1.0), (2.0, 0, 1.0), (3.0, 50, None), (4.0, 0, 4.0), (5.0, 0, 4.0)):
        worker.says(utilization)
        usage.sample(now)
        assert [gpu["idle_since"] for gpu in gpus(usage)] == [idle_since]


def test_each_worker_with_a_gpu_has_an_entry_also_if_its_driver_says_nothing_and_others_have_none() -> None:
    silent, talks, cpu = Worker("b-0"), Worker("a-0"), Worker("cpu-0", gpus=0)
    del silent.extra[METRIC], silent.extra[NODE]
    talks.says(None, tasks=1)
    entries = gpus(usage_of(silent, talks, cpu))
    assert entries[0] == {
        "worker": "a-0",
        "node": "n1",
        "model": "A100",
        "utilization": None,
        "memory_used": 9,
        "memory_total": 40,
        "power": 60.5,
        "idle_since": None,
    }
    assert entries[1].pop("idle_since") is not None  # type: ignore[misc]
    assert entries[1] == {
        "worker": "b-0",
        "node": "10.0.0.1",
        "model": "",
        "utilization": None,
        "memory_used": None,
        "memory_total": None,
        "power": None,
    }
    assert len(entries) == 2


def test_samples_of_many_workers_are_as_seldom_as_their_heartbeats() -> None:
    assert period(0) == period(200) == 1
    assert period(1000) == 5


def test_a_process_without_a_driver_reads_nothing_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    device = Device()
    assert device.model() == {"model": "", "memory_total": None}
    assert device.read() == {"utilization": None, "memory_used": None, "power": None}


_SHOW = "from hpcgpu.runtime.readings import Device; d = Device(); print(*d.model().values(), *d.read().values())"


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("2,3,0,1", "Fake GPU 17179869184 37.0 5000 61.5"),
        ("GPU-00000000-0000-0000-0000-000000000002", "Fake GPU 17179869184 37.0 5000 61.5"),
        ("MIG-00000000-0000-0000-0000-000000000003", "Fake GPU 17179869184 None 7000 None"),
        ("7", " None None None None"),
        ("GPU-00000000-0000-0000-0000-0000000000ff", " None None None None"),
        ("", " None None None None"),
        (None, "Fake GPU 17179869184 0.0 1073741824 70.0"),
    ],
)
def test_the_first_visible_gpu_is_read_and_what_it_does_not_say_is_none(
    visible: str | None, shown: str, fake_gpus: None, tmp_path: Path
) -> None:
    pytest.importorskip("pynvml")
    (tmp_path / "2").write_text("37 5000 61500")
    (tmp_path / "3").write_text("-1 7000 -1")  # as a MIG device
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {
        "STUBNVML_READINGS": str(tmp_path)
    }
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run([sys.executable, "-c", _SHOW], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == shown, done.stderr


def test_a_user_who_switches_nvml_off_in_dask_gets_no_readings(fake_gpus: None) -> None:
    environ = os.environ | {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "false"}
    done = subprocess.run([sys.executable, "-c", _SHOW], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None None None None"
