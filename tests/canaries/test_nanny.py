"""What `hpcgpu.runtime.forkserver` relies on in distributed's nannies, which start the workers."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.util
import os
import subprocess
import sys
from importlib import metadata
from multiprocessing import resource_tracker
from pathlib import Path

import dask
import pytest
from canary import canary
from distributed import Client, Nanny, Scheduler, Worker, WorkerPlugin, utils
from packaging.version import Version

from hpcgpu.runtime import forkserver


@canary
def test_distributed_leaves_what_the_fork_server_imports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[object] = []
    monkeypatch.setattr(multiprocessing.forkserver, "set_forkserver_preload", replaced.append)
    with dask.config.set({forkserver.METHOD: "forkserver"}):
        monkeypatch.setattr(utils, "_forkserver_preload_set", True)
        utils.get_mp_context()
        assert not replaced, (
            f"_forkserver_preload_set is True, and distributed sets what the fork server imports: {replaced}"
        )
        monkeypatch.setattr(utils, "_forkserver_preload_set", False)
        utils.get_mp_context()
        assert replaced, (
            "distributed does not set what the fork server imports: hpcgpu need not set _forkserver_preload_set"
        )


@canary
def test_multiprocessing_puts_its_sockets_where_hpcgpu_sets_them(tmp_path: Path) -> None:
    program = f"""
import multiprocessing.util
multiprocessing.current_process()._config["tempdir"] = {str(tmp_path)!r}
assert multiprocessing.util.get_temp_dir() == {str(tmp_path)!r}, "it does not read _config"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


#: A program of Dask that starts no worker. `waits` stands for the function that waits for signals.
PROGRAM = """
import importlib
from hpcgpu.runtime import dask_signals
def add(wait):
    async def waits():
        print("asked", flush=True)
        return 15
    return waits
dask_signals.replace()
dask_signals.add(add)
program = importlib.import_module("{module}")
class Server:
    def __init__(self, *arguments, **options): pass
    def __await__(self):
        import asyncio
        return asyncio.sleep(600).__await__()
    async def close(self, **options): print("closes", flush=True)
    finished = close
program.{server} = Server
program.{command}(["tls://127.0.0.1:1", "--nthreads", "1"])
"""


NOTICES = """
import asyncio, importlib, os, signal
from hpcgpu.runtime import dask_signals, next_scheduler
dask_signals.replace()
dask_signals.add(next_scheduler.notice_signals)
program = importlib.import_module("{module}")
async def main():
    waiting = asyncio.ensure_future(program.wait_for_signals())
    while getattr(signal.getsignal(signal.SIGTERM), "__name__", "") != "notice":
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    print(await waiting, next_scheduler._terminated, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
asyncio.run(main())
"""
IN_ANOTHER_WAY = Version(metadata.version("dask-cuda")) < Version("26.8")


@pytest.mark.parametrize(
    ("module", "server", "command"),
    [
        ("distributed.cli.dask_worker", "Nanny", "main"),
        pytest.param(
            *("dask_cuda.cli", "CUDAWorker", "worker"),
            marks=pytest.mark.skipif(IN_ANOTHER_WAY, reason="dask-cuda before 26.8 waits in another way"),
        ),
    ],
    ids=["distributed", "dask-cuda"],
)
@canary
def test_dask_waits_for_signals_by_the_function_that_hpcgpu_replaces(module: str, server: str, command: str) -> None:
    program = PROGRAM.format(module=module, server=server, command=command)
    for text, prints in ((program, "asked\ncloses\n"), (NOTICES.format(module=module), "15 [15] True\n")):
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
        assert ended.stdout == prints, ended.stderr


@canary
async def test_a_nanny_sets_before_it_starts_a_worker_what_hpcgpu_gives_the_fork_server() -> None:
    configured = dask.config.get("distributed.nanny.pre-spawn-environ")
    assert forkserver.configured_environment() == configured, (
        "distributed.yaml has other defaults than the configuration"
    )
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        nanny = Nanny(scheduler.address, dashboard=False, nthreads=1, memory_limit=0)
        assert nanny.pre_spawn_env == forkserver.pre_spawn_environment(configured, os.environ)
        nanny.env = {**nanny.env, "HPCGPU_CANARY": "sings"}
        async with nanny, Client(scheduler.address, asynchronous=True) as client:
            found = await client.run(lambda: dict(os.environ))
    (environment,) = found.values()
    assert environment.get("HPCGPU_CANARY") == "sings", "a worker does not get what is in Nanny.env when it starts"
    assert environment.items() >= nanny.pre_spawn_env.items(), "a worker does not get the pre-spawn-environ"


@canary
async def test_a_nanny_starts_and_restarts_its_worker_by_the_method_that_hpcgpu_replaces() -> None:
    calls = []
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        nanny = Nanny(scheduler.address, dashboard=False, nthreads=1, memory_limit=0)
        instantiate, nanny.env = nanny.instantiate, dict(nanny.env)

        async def replaced() -> object:
            calls.append(nanny.status)
            nanny.env["HPCGPU_CANARY"] = str(len(calls))
            return await instantiate()

        nanny.instantiate = replaced
        async with nanny, Client(scheduler.address, asynchronous=True) as client:
            assert len(calls) == 1, "a nanny does not start its worker by Nanny.instantiate"
            await nanny.restart()
            assert len(calls) > 1, "a nanny does not restart its worker by Nanny.instantiate"
            await client.wait_for_workers(1)
            found = await client.run(lambda: os.environ.get("HPCGPU_CANARY"))
    assert [int(number) > 1 for number in found.values()] == [True], "a worker that starts again does not get Nanny.env"


class Broken(WorkerPlugin):  # type: ignore[misc]
    """A plugin that cannot be set up on a second worker."""

    def setup(self, worker: Worker) -> None:
        if worker.name == "second":
            raise ZeroDivisionError


@canary
async def test_a_worker_that_starts_adds_its_plugins_by_the_method_that_hpcgpu_replaces() -> None:
    added: list[str] = []

    def watched(scheduler: Scheduler, name: str) -> Worker:
        worker = Worker(scheduler.address, name=name, nthreads=1, dashboard=False)
        add = worker.plugin_add

        async def replaced(*, plugin: object, name: str) -> object:
            added.append(name)
            return await add(plugin=plugin, name=name, catch_errors=not name.startswith("canary"))

        worker.plugin_add = replaced
        return worker

    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        watched(scheduler, "first"),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        added.clear()
        await client.register_plugin(Broken(), name="canary")
        assert not added, "a worker that runs adds a new plugin by Worker.plugin_add too: the replacement would end it"
        with pytest.raises(RuntimeError) as failed:
            await watched(scheduler, "second")
        assert "canary" in added, "a worker that starts does not add its plugins by Worker.plugin_add"
        assert isinstance(failed.value.__cause__, ZeroDivisionError), "Worker.plugin_add does not raise what it caught"


@canary
def test_a_forked_process_runs_once_what_was_registered_for_its_end(tmp_path: Path) -> None:
    """Python 3.13.5 runs it itself, 3.11 does not."""
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(f"""
import atexit, multiprocessing
from multiprocessing import util

def tell():
    with open({str(told)!r}, "a") as file:
        file.write("told ")

def end(done):
    if not done:
        atexit._run_exitfuncs()

def register():
    done = []
    atexit.register(done.append, True)
    util.Finalize(None, end, args=(done,), exitpriority=-100)
    atexit.register(tell)

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=register)
    process.start()
    process.join()
""")
    subprocess.run([sys.executable, str(program)], check=True)
    assert told.exists(), "atexit._run_exitfuncs, called at the end of a forked process, runs nothing"
    assert told.read_text() == "told ", "what is registered for the end of a forked process runs twice"


@canary
def test_python_starts_the_fork_server_by_the_function_that_hpcgpu_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, list[str], list[int]]] = []
    kept: list[int] = []

    def start(path: object, arguments: list[str], passed: list[int]) -> int:
        started.append((path, arguments, passed))
        kept.extend(map(os.dup, passed))  # else Python, which writes a key for the server, finds nobody who reads
        return os.getpid()

    server = multiprocessing.forkserver.ForkServer()
    resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", start)
    server.ensure_running()
    assert len(started) == 1, "Python does not start the fork server by multiprocessing.util.spawnv_passfds"
    code = started[0][1][started[0][1].index("-c") + 1]
    assert "from multiprocessing.forkserver import main; main(" in code, f"the fork server's program is {code}"
    assert str(started[0][2][0]) in code, "the fork server is not told its file descriptors in its program"
    for file in (*kept, server._forkserver_alive_fd):
        os.close(file)
