"""The manager in the scheduler job: when it starts, how its end is reported, and that it learns why it ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from distributed.scheduler import Scheduler

from hpcgpu.dask_scheduler import keep_manager_running
from hpcgpu.dask_scheduler.end_without_manager import ManagerLease
from hpcgpu.dask_scheduler.keep_manager_running import LOG, ManagerProcess
from hpcgpu.dask_scheduler.scheduler_extension import Extension
from hpcgpu.errors import BatchError, BatchUnavailable
from hpcgpu.posix import variables_of_this_process
from hpcgpu.scaling.wanted_state import Wanted
from hpcgpu.store import create_directory


def lease() -> ManagerLease:
    return ManagerLease(cast(Scheduler, None), None, lambda: False)


@pytest.mark.parametrize(("replaced", "heard"), [(True, "another follows"), (False, "the cluster ends")])
async def test_a_manager_that_another_follows_does_not_report_to_the_user_that_the_cluster_ends(
    tmp_path: Path, replaced: bool, heard: str
) -> None:
    manager = ManagerProcess(create_directory.claim(tmp_path / "demo", None), "1", lease())
    code = "trap 'echo another follows; exit' HUP; trap 'echo the cluster ends; exit' TERM; echo up; "
    program = ["bash", "-c", code + "while :; do sleep 0.1; done"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as manager._process:
        output = manager._process.stdout
        assert output is not None and output.readline() == "up\n"
        await manager.stop(replaced=replaced)
        assert output.read() == f"{heard}\n"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ManagerProcess:
    """A manager on a site whose compute nodes can submit jobs."""
    queue = SimpleNamespace(check=lambda: None, poll=lambda job_ids: {})
    monkeypatch.setattr(keep_manager_running, "batch_system", lambda name: queue)
    return ManagerProcess(create_directory.claim(tmp_path / "demo", None, system="slurm"), "1", lease())


@pytest.mark.parametrize("code", [0, 3])
async def test_the_end_of_a_manager_is_a_problem_unless_it_ends_as_intended(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" "$NCCL_SOCKET_IFNAME"\nexit {code}\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    monkeypatch.setattr(variables_of_this_process, "_first", {"PATH": os.environ["PATH"]})
    manager._fail("adaptive scaling stopped: of the manager before")
    assert await manager.start() == ""
    assert manager._watch is not None
    await manager._watch
    log = manager.directory.logs / LOG
    failure = (
        f"nothing is scaled or replaced: the manager in the scheduler job ended with exit code {code}. It is started "
        f"again. Log: {log}"
    )
    assert manager.problem == (failure if code else "")
    assert log.read_text().startswith("-P -m hpcgpu."), "nothing is imported from the working directory"
    assert "ib0" not in log.read_text(), "the jobs of the manager run on nodes with other interfaces"
    await manager._lease.heartbeat(1)
    assert manager.problem == "", "another program manages the cluster now"
    await manager.stop()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BatchError("squeue: command not found"), "compute nodes of this site cannot submit jobs: squeue: command not"),
        (BatchUnavailable("no answer"), "the queue does not answer on the node of the scheduler job: no answer"),
    ],
)
async def test_no_manager_starts_where_compute_nodes_do_not_reach_the_queue(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch, error: BatchError, words: str
) -> None:
    def fails(job_ids: Collection[str]) -> None:
        raise error

    queue = SimpleNamespace(check=lambda: None, poll=fails)
    monkeypatch.setattr(keep_manager_running, "batch_system", lambda name: queue)
    assert (await manager.start()).startswith(words)
    assert not (manager.directory.logs / LOG).exists()


async def test_a_manager_that_cannot_write_its_log_does_not_start(manager: ManagerProcess) -> None:
    (manager.directory.logs / LOG).mkdir(parents=True)
    assert await manager.start() == f"the manager cannot start: {manager.directory.logs / LOG}: Is a directory"


async def test_what_other_tasks_start_while_the_manager_starts_inherits_no_blocked_signals(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = set[int]()

    async def look() -> None:
        while True:
            blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            await asyncio.sleep(0)

    monkeypatch.setattr(sys, "executable", "/bin/true")
    looking = asyncio.create_task(look())
    assert await manager.start() == ""
    looking.cancel()
    await manager.stop()
    assert blocked == set()


@pytest.fixture
def starts(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[int], Awaitable[None]]]:
    """Wait until the manager in the scheduler job has started so many times. It ends when its file is removed."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started\nwhile [ -e {tmp_path}/runs ]; do sleep 0.1; done\n")
    python.chmod(0o700)
    (tmp_path / "runs").touch()
    monkeypatch.setattr(sys, "executable", str(python))
    for name in ("_CHECK", "_PAUSE"):
        monkeypatch.setattr(keep_manager_running, name, 0.01)
    manager.directory.want(Wanted(manager_in_scheduler_job=True, detached=True))

    async def started(times: int) -> None:
        log = manager.directory.logs / LOG
        async with asyncio.timeout(60):
            while not log.exists() or log.read_text() != times * "started\n":
                await asyncio.sleep(0.01)

    yield started
    (tmp_path / "runs").unlink(missing_ok=True)


async def test_a_queue_that_is_away_when_the_scheduler_starts_delays_its_manager(
    manager: ManagerProcess,
    starts: Callable[[int], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poll(job_ids: Collection[str]) -> None:
        if not manager.problem:
            raise BatchUnavailable("`squeue` did not answer within 60 s")

    monkeypatch.setattr(
        keep_manager_running, "batch_system", lambda name: SimpleNamespace(check=lambda: None, poll=poll)
    )
    manager.begin()
    await starts(1)
    assert manager.problem == ""
    await manager.stop()
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.endswith(
        "no program scales the cluster or replaces its jobs, and hpcgpu tries again: the queue does not answer on the "
        "node of the scheduler job: `squeue` did not answer within 60 s"
    )


async def test_a_queue_that_stays_away_is_queried_less_and_less_often(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now, tried = itertools.count(0, 5), [0], list[int]()

    def later() -> int:
        now[0] = next(clock)
        return now[0]

    def poll(job_ids: Collection[str]) -> None:
        tried.append(now[0])
        raise BatchUnavailable("`squeue` did not answer within 60 s")

    monkeypatch.setattr(
        keep_manager_running, "batch_system", lambda name: SimpleNamespace(check=lambda: None, poll=poll)
    )
    monkeypatch.setattr(keep_manager_running, "time", SimpleNamespace(monotonic=later))
    monkeypatch.setattr(keep_manager_running, "_CHECK", 0.0)
    manager.directory.want(Wanted(manager_in_scheduler_job=True, detached=True))
    manager.begin()
    async with asyncio.timeout(60):
        while len(tried) < 7:
            await asyncio.sleep(0.01)
    await manager.stop()
    pauses = [after - before for before, after in itertools.pairwise(tried)][:6]
    assert [round(pause, -1) for pause in pauses] == [60, 120, 240, 480, 600, 600]


@pytest.mark.parametrize("end", ["leaves", "is silent", "never speaks"])
async def test_the_manager_starts_again_when_the_program_that_took_over_manages_no_longer(
    manager: ManagerProcess,
    starts: Callable[[int], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: str,
) -> None:
    manager.begin()
    await starts(1)
    number = manager.directory.take_over("a notebook").number
    if end != "never speaks":
        await manager._lease.heartbeat(number)
    (tmp_path / "runs").unlink()  # it is superseded
    assert manager._watch is not None
    await manager._watch
    assert not await manager._needed() and (manager.directory.logs / LOG).read_text() == "started\n"
    (tmp_path / "runs").touch()
    if end == "leaves":
        manager.directory.leave(number)
    elif end == "is silent":
        await manager._lease.step(59)
        assert not await manager._needed()
        await manager._lease.step(1)
    else:
        monkeypatch.setattr(keep_manager_running, "_TAKE_OVER", 0.0)
    await starts(2)
    assert manager.problem == ""
    await manager.stop()


@pytest.mark.parametrize("lease", [600.0, None])
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_scheduler_job_manages_a_detached_cluster_whose_program_was_killed(
    manager: ManagerProcess, starts: Callable[[int], Awaitable[None]], wanted: bool, lease: float | None
) -> None:
    """It has not reported that it leaves: `hpcgpu detach` or ``shutdown_on_close=False`` has detached its cluster."""
    directory = manager.directory
    directory.want(Wanted(manager_in_scheduler_job=wanted, detached=True))
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        extension = Extension(scheduler, lease, lambda: directory.detached)
        extension.manager_process, manager._lease = manager, extension.lease
        await extension.lease.heartbeat(directory.take_over("a notebook").number)
        await extension.count_silence(599)
        assert manager._keeper is None, "it may be suspended"
        await extension.count_silence(1)
        assert (manager._keeper is not None) is wanted
        if wanted:
            await starts(1)
        await manager.stop()


ENDS_WHILE_ITS_LOOP_CLOSES = """
import asyncio, os, signal
from types import SimpleNamespace
from typing import cast
from hpcgpu.orders import manager_in_scheduler_job as module

class Manager:
    managing = False
    state = messages = SimpleNamespace(text=lambda: "")
    async def start(self): pass
    async def close(self, release): pass
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

STILL_IMPORTS = """
import asyncio, pathlib, signal, sys, time
from types import SimpleNamespace
import hpcgpu.orders.manager_in_scheduler_job as module

pathlib.Path(sys.argv[1]).touch()
while not (pending := signal.sigpending()):
    time.sleep(0.01)
async def run(manager, end, leave):
    await end.wait()
    print("received", *(number.name for number in pending), flush=True)
module.run = run
module.Manager = SimpleNamespace(of_existing=lambda *arguments, **options: SimpleNamespace(managing=False))
module.batch_system = lambda name: None
asyncio.run(module._manage(SimpleNamespace(system="slurm")))
"""


def test_a_signal_while_the_loop_of_the_manager_closes_leaves_no_error_in_its_log() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_WHILE_ITS_LOOP_CLOSES], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)


@pytest.mark.parametrize(
    ("end", "log"),
    [
        ({"cluster_ends": True}, "received SIGINT\n"),
        ({}, "received SIGTERM\n"),
        ({"replaced": True}, ""),  # it does not take the cluster over: the manager that follows would wait for that
    ],
)
async def test_a_signal_to_a_manager_that_still_imports_leaves_no_error_in_its_log(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: dict[str, bool], log: str
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(STILL_IMPORTS)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -P {slow} {tmp_path}/begun\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert await manager.start() == ""
    async with asyncio.timeout(60):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
    await manager.stop(**end)
    assert (manager.directory.logs / LOG).read_text() == log
