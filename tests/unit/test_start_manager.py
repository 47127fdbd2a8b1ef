"""The manager in the scheduler job: when it starts, how its end is reported, and that it learns why it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcgpu.dask_scheduler import start_manager
from hpcgpu.dask_scheduler.start_manager import LOG, ManagerProcess
from hpcgpu.errors import BatchUnavailable
from hpcgpu.store import create_directory


@pytest.mark.parametrize(("replaced", "heard"), [(True, "another follows"), (False, "the cluster ends")])
async def test_a_manager_that_another_follows_does_not_tell_the_user_that_the_cluster_ends(
    tmp_path: Path, replaced: bool, heard: str
) -> None:
    manager = ManagerProcess(create_directory.claim(tmp_path / "demo", None), "1")
    code = "trap 'echo another follows; exit' HUP; trap 'echo the cluster ends; exit' TERM; echo up; "
    manager._process = process = await asyncio.create_subprocess_exec(
        "bash", "-c", code + "while :; do sleep 0.1; done", stdout=subprocess.PIPE
    )
    assert process.stdout is not None and await process.stdout.readline() == b"up\n"
    await manager.stop(replaced=replaced)
    assert (await process.stdout.read()).decode() == f"{heard}\n"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ManagerProcess:
    """A manager on a site whose compute nodes can submit jobs."""
    queue = SimpleNamespace(check=lambda: None, poll=lambda job_ids: {})
    monkeypatch.setattr(start_manager, "batch_system", lambda name: queue)
    return ManagerProcess(create_directory.claim(tmp_path / "demo", None, system="slurm"), "1")


@pytest.mark.parametrize("code", [0, 3])
async def test_the_end_of_a_manager_is_a_problem_unless_it_ends_as_intended(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" "$NCCL_SOCKET_IFNAME"\nexit {code}\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    monkeypatch.setenv("HPCGPU_OWN_VARIABLES", "NCCL_SOCKET_IFNAME")
    manager.problem = "adaptive scaling stopped: of the manager before"
    assert await manager.start() == ""
    assert manager._watch is not None
    await manager._watch
    log = manager.directory.logs / LOG
    failure = f"adaptive scaling stopped: the manager in the scheduler job ended with exit code {code}. Log: {log}"
    assert manager.problem == (failure if code else "")
    assert log.read_text().startswith("-P -m hpcgpu."), "nothing is imported from the working directory"
    assert "ib0" not in log.read_text(), "the jobs of the manager run on nodes with other interfaces"


async def test_no_manager_starts_where_compute_nodes_do_not_reach_the_queue(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(job_ids: Collection[str]) -> None:
        raise BatchUnavailable("squeue: command not found")

    queue = SimpleNamespace(check=lambda: None, poll=fails)
    monkeypatch.setattr(start_manager, "batch_system", lambda name: queue)
    assert await manager.start() == "compute nodes of this site cannot submit jobs: squeue: command not found"
    assert not (manager.directory.logs / LOG).exists()


ENDS_WHILE_ITS_LOOP_CLOSES = """
import asyncio, os, signal
from types import SimpleNamespace
from hpcgpu.orders import manager_in_scheduler_job as module

class Manager:
    managing = False
    state = messages = SimpleNamespace(text=lambda: "")
    async def start(self): pass
    async def close(self): pass
    @classmethod
    def of_existing(cls, *arguments, **options): return cls()

class Loop(asyncio.SelectorEventLoop):
    def _close_self_pipe(self):
        super()._close_self_pipe()
        os.kill(os.getpid(), signal.SIGTERM)

module.Manager = Manager
module.batch_system = lambda name: None
with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(module._manage(SimpleNamespace(system="slurm")))
print("ended")
"""


def test_a_signal_while_the_loop_of_the_manager_closes_leaves_no_error_in_its_log() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_WHILE_ITS_LOOP_CLOSES], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)
