"""What a task of a job step has of itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from hpcgpu import ClusterError, OptionError, SlurmGPURunner
from hpcgpu.configuration.resolve import resolve
from hpcgpu.runner import Task, _HoldWait, tasks_per_node
from hpcgpu.store import certificates_and_keys, create_directory

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "12",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "6(x2)",
    "CUDA_VISIBLE_DEVICES": "0,1,GPU-3",
}


@pytest.mark.parametrize(("text", "counts"), [("3", [3]), ("2(x3),1", [2, 2, 2, 1]), ("4,5(x2)", [4, 5, 5])])
def test_slurm_s_short_form_of_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_a_task_reads_its_place_from_the_environment() -> None:
    assert Task.of(STEP) == Task(rank=7, tasks=12, node=1, nodes=2, on_node=6, step="4711.0", gpus=3)
    assert Task.of(STEP | {"SLURM_RESTART_COUNT": "2"}).step == "4711.0.2", (
        "a requeued job finds nothing of its earlier run"
    )
    assert Task.of({k: v for k, v in STEP.items() if k != "CUDA_VISIBLE_DEVICES"}).gpus == 0
    assert Task.of(STEP | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}).gpus == 0


def test_outside_of_a_job_step_it_reports_how_to_start_it() -> None:
    with pytest.raises(ClusterError, match="start the program by srun"):
        Task.of({})


def test_options_of_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="walltime is not an option of SlurmGPURunner, which runs in an existing job"):
        SlurmGPURunner(walltime="1h")


def test_too_few_tasks_are_reported_once() -> None:
    code = "import hpcgpu; hpcgpu.SlurmGPURunner()"
    for rank, words in (("0", "hpcgpu: 2 tasks cannot make a cluster"), ("1", "")):
        environment = STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_NODEID": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**_environ(), **environment}
        )
        assert done.returncode == 2 and done.stderr.startswith(words) and bool(done.stderr) == bool(words)


def _environ() -> dict[str, str]:
    import os

    return dict(os.environ)


async def test_workers_without_a_gpu_are_held_by_their_resources_and_that_is_reported() -> None:
    task = Task.of({**STEP, "CUDA_VISIBLE_DEVICES": ""})
    runner: Any = SimpleNamespace(task=task, options=resolve("slurm", {"gpus_per_node": 0}))
    words = r"only 0 workers of this kind, .* its workers do not have a GPU; to hold others, give `resources`"
    with pytest.raises(ClusterError, match=words):
        await _HoldWait(runner, 1, {}).check()


@pytest.mark.parametrize("in_event_loop", [False, True])
def test_the_credentials_of_a_step_end_with_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_event_loop: bool
) -> None:
    terminated = list[SlurmGPURunner]()

    async def terminate(self: SlurmGPURunner) -> None:
        terminated.append(self)

    async def program() -> None:
        runner.close()

    monkeypatch.setattr(SlurmGPURunner, "_terminate", terminate)
    runner = SlurmGPURunner.__new__(SlurmGPURunner)
    runner.directory = create_directory.claim(tmp_path / "runner-4711.0", None, system="slurm")
    certificates_and_keys.create(runner.directory)
    runner.status, runner._closing, runner._alive = Status.running, threading.Event(), threading.Thread(target=int)
    runner._alive.start()
    assert list(runner.directory.tls.iterdir())
    if in_event_loop:
        asyncio.run(program())
    else:
        runner.close()
    assert terminated and not runner.directory.tls.exists() and runner.directory.closed
