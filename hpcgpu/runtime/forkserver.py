"""Workers that are forks of one process of their node: Python's fork server (option `worker_start`).

At its start, a worker mostly imports the same modules as the other workers of its node. The job's first process imports
Dask for itself, then forks the fork server, while it waits for the scheduler. The fork server imports the other
modules, and each worker is a fork of it. So a node imports each module once.

A forked worker must behave like a spawned one. The settings that a process reads once, at its start, must be in the
environment of the job's first process: the seed of hashes, settings of the allocator, thread counts. If they are
missing, this process starts itself again (`prepare`). The settings that a process reads later come from the nanny
(`hpcgpu.dask_worker.nanny_preload`). The fork server must have one thread and no GPU library that talks to a driver. A
first fork checks this, and `NodeForkServer.failure` returns what it reports. If the check fails, workers are spawned,
and the log contains the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from hpcgpu.errors import NotTrusted
from hpcgpu.posix.ownership import check_parent
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime import preemption, scratch

METHOD = "distributed.worker.multiprocessing-method"
NANNY_PRELOAD = "distributed.nanny.preload"
NANNY_PRELOAD_VARIABLE = "DASK_DISTRIBUTED__NANNY__PRELOAD"
NANNY_MODULE = "hpcgpu.dask_worker.nanny_preload"

#: Names of variables that only the job's script has set, to Dask's defaults.
_PRESET = "HPCGPU_PRESET"
#: Set in the environment of a first process that has started again.
_AGAIN = "HPCGPU_STARTED_AGAIN"
#: Modules that every worker imports. Those that are not installed are left out.
_MODULES = (
    "distributed",
    "distributed.http.worker.prometheus",
    "hpcgpu.software.compare_environments",
    "hpcgpu.fabric.ucx_authentication",
    "hpcgpu.fabric.connection_report",
    "hpcgpu.fabric.tls_connections",
    "hpcgpu.runtime.dashboard_access",
    "hpcgpu.runtime.results_in_host_memory",
    "hpcgpu.dask_worker.gpu_metrics",
)
_GPU_MODULES = ("dask_cuda.initialize", "cuda.core", "rmm", "pynvml")
#: Libraries that a fork server must not load: if a parent has talked to the driver, its fork cannot use GPU or UCX.
_HARMFUL_MODULES = ("numba.cuda", "cudf", "cupy", "torch", "ucxx")
_HARMFUL_LIBRARIES = ("libcuda.so", "libnvidia-ml.so", "libucp.so")
#: Directory of the fork server's socket. The path of a socket has at most 107 characters, so this path is short.
_SOCKET_PARENT = Path("/tmp")
#: Bytes of the program that the fork server receives at a time.
_MOST_TEXT = 2**16
#: Seconds that the imports of the fork server may take. Shared filesystems are slow.
_TIMEOUT = 120.0


def pre_spawn_environment(configured: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a nanny sets before it starts a worker. Dask documents the option that names them.

    Parameters
    ----------
    configured : mapping
        The option ``distributed.nanny.pre-spawn-environ`` of Dask.
    environ : mapping
        The environment of the nanny. Its values take precedence.
    """
    found = {name: environ.get(name, str(value)) for name, value in configured.items() if value is not None}
    if found.get("PYTHONHASHSEED") in (None, "0"):  # all workers must hash alike
        found["PYTHONHASHSEED"] = "6640"
    return found


def why_not(command: Sequence[str], configured: str | None) -> str:
    """Return why workers are not forked; empty if they may be.

    Parameters
    ----------
    command : sequence of str
        The worker command.
    configured : str or None
        The user's own ``distributed.worker.multiprocessing-method``.
    """
    if any(argument.partition("=")[0] == "--multiprocessing-method" for argument in command):
        return "worker_extra_args sets --multiprocessing-method"
    if configured is not None:
        return f"your Dask configuration sets {METHOD}: {configured}"
    return ""


def configured_environment() -> dict[str, Any]:
    """Return Dask's option ``distributed.nanny.pre-spawn-environ``, without the long import of distributed."""
    import yaml
    from dask import config

    spec = importlib.util.find_spec("distributed")
    assert spec is not None and spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "distributed.yaml").read_text()
    merged: dict[str, Any] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one computes for 40 ms
    config.update(merged, yaml.load(text, loader)["distributed"]["nanny"]["pre-spawn-environ"])
    config.update(merged, config.get("distributed.nanny.pre-spawn-environ", None) or {})
    return merged


class NodeForkServer:
    """The fork server of this process, and the report of its first fork.

    Parameters
    ----------
    fork : _Fork
        The fork that is the fork server.
    environment : dict of str
        The variables that nannies set before they start a worker, with their values in the fork server.
    """

    def __init__(self, fork: _Fork, environment: dict[str, str]) -> None:
        self._fork = fork
        self.environment = environment
        self._found: str | None = None
        self._thread = threading.Thread(target=self._examine, name="examines the fork server", daemon=True)
        self._thread.start()

    def _examine(self) -> None:
        context = multiprocessing.get_context("forkserver")
        try:
            here, there = context.Pipe(duplex=False)
            first = context.Process(target=examine, args=(there,), daemon=True)
            first.start()  # returns when the fork server has imported everything
            there.close()
            self._found = here.recv()
            first.join()
        except (OSError, EOFError) as error:
            self._found = f"the fork server does not run: {str(error) or type(error).__name__}"

    def failure(self) -> str:
        """Wait until the fork server has imported. Return why workers cannot be forks of it; empty if they can."""
        from dask import config

        self._thread.join(_TIMEOUT)
        if self._found is None:
            return f"the fork server did not import its modules within {_TIMEOUT:g} s"
        expected = pre_spawn_environment(config.get("distributed.nanny.pre-spawn-environ"), os.environ)
        if not self._found and expected != self.environment:
            return f"the nannies set {expected}, but the fork server has {self.environment}"
        return self._found

    def stop(self) -> None:
        """End the fork server, which nobody uses. It may still be importing."""
        self._fork.kill()


def _start(*, gpus: bool, at_end: contextlib.ExitStack) -> NodeForkServer:
    check_parent(_SOCKET_PARENT)
    # The directory of the socket. A directory of multiprocessing would stay if this process is killed, or ends without
    # Python's own cleanup (`run_dask`).
    place = at_end.enter_context(scratch.made(_SOCKET_PARENT))
    multiprocessing.current_process()._config["tempdir"] = str(place)  # type: ignore[attr-defined]
    if multiprocessing.connection.arbitrary_address("AF_UNIX").startswith("\0"):  # type: ignore[attr-defined]
        raise NotTrusted(
            "every user of the node could run code as you through the socket that this Python gives a fork server "
            "(CVE-2022-42919): use Python 3.11.1 or later"
        )
    from multiprocessing import forkserver, resource_tracker, util

    forkserver.set_forkserver_preload([*_MODULES, *(_GPU_MODULES if gpus else ()), "hpcgpu.runtime.forkserver_imports"])
    fork = _Fork()
    try:
        resource_tracker.ensure_running()  # a separate program, not a fork
        start_program = util.spawnv_passfds
        util.spawnv_passfds = fork.run  # type: ignore[assignment]
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = start_program
    except BaseException:
        fork.kill()
        raise
    return NodeForkServer(fork, pre_spawn_environment(configured_environment(), os.environ))


class _Fork:
    """A fork of this process. It waits for the program of the fork server, and then runs this program.

    The fork is made before multiprocessing starts anything in this process, so it inherits nothing that
    multiprocessing has started.
    """

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            self._socket.close()
            _run_received(there)
        there.close()
        # Libraries that support fork although they have threads, such as OpenBLAS, have ended their threads for the
        # fork.
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if threads > 1:
            self.kill()
            raise OSError(f"the first process of the job has {threads} threads, but may have only one before a fork")

    def run(self, path: object, arguments: Sequence[str], passed: Sequence[int]) -> int:
        """Let the fork do the work of a new Python, with these open files. Return the process id of the fork."""
        text = arguments.index("-c") + 1
        program = arguments[text:]  # with its arguments (python/cpython#144503)
        with self._socket:
            socket.send_fds(self._socket, [json.dumps([program, list(passed)]).encode()], passed)
        return self.process

    def kill(self) -> None:
        """End the fork."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # multiprocessing has already waited for the fork
            os.waitpid(self.process, 0)


def _run_received(there: socket.socket) -> NoReturn:
    """Run a program and end, in a fork. Without a program, end at once."""
    try:
        text, files, *_ = socket.recv_fds(there, _MOST_TEXT, 16)
        while more := there.recv(_MOST_TEXT):
            text += more
        if text:
            (code, *arguments), passed = json.loads(text)
            _become_a_new_program(files, passed)
            sys.argv = ["-c", *arguments]
            exec(code, {})  # workers are forks of this process: no name of it in their __main__
    except SystemExit:
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _become_a_new_program(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Drop what a fork inherits but a new program would not have. Give the open files these numbers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    preemption.ignore_warning()
    kept = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if file > 2 and file not in kept:
            with contextlib.suppress(OSError):
                os.close(file)
    for file, number in zip(kept, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.modules["__main__"] = types.ModuleType("__main__")


def _use(command: Sequence[str], *, gpus: bool) -> list[str]:
    """Let the nannies of this process fork their workers. Return the worker command for that."""
    from dask import config
    from distributed import utils

    utils._forkserver_preload_set = True  # else distributed imports its own list of modules here
    if not gpus:  # `dask worker` has an argument, and does not read the configuration
        return [*command[:-1], "--preload-nanny", NANNY_MODULE, command[-1]]
    preloads = config.get(NANNY_PRELOAD)
    preloads = [preloads] if isinstance(preloads, str) else list(preloads)
    os.environ[NANNY_PRELOAD_VARIABLE] = repr([*preloads, NANNY_MODULE])
    return list(command)


def examine(answer: Connection) -> None:
    """Run in a fork of the fork server: report why workers cannot be forks of it."""
    answer.send(_harm(os.getppid()))
    answer.close()


def _harmful_libraries() -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    return [name for name in _HARMFUL_LIBRARIES if f"/{name}" in maps]


def _harm(server: int) -> str:
    if "hpcgpu.runtime.forkserver_imports" not in sys.modules:
        return "the fork server did not import the modules that workers need"
    if loaded := [name for name in _HARMFUL_MODULES if name in sys.modules]:
        return f"{loaded[0]} is imported by the modules that workers need, and must not be imported before a fork"
    if loaded := _harmful_libraries():
        return f"{loaded[0]} is loaded by the modules that workers need, and must not be loaded before a fork"
    threads = len(os.listdir(f"/proc/{server}/task"))  # noqa: PTH208
    if threads != 1:
        return f"the fork server has {threads} threads, started by the modules that it imports, but may have only one"
    return ""


def prepare(arguments: argparse.Namespace) -> bool:
    """Return whether this job's workers are to be forks. If they are not although the user wants it, print why.

    Some variables are read only at the start of a process. So this process starts again if it started without the
    variables that nannies set before they start a worker. That is rare, because the job's script sets the defaults of
    Dask. The new start also drops a library that has talked to the driver to count GPUs. The process starts again once
    at most: with ``LD_PRELOAD`` a library is loaded each time. Then `NodeForkServer.failure` reports it.

    Parameters
    ----------
    arguments : argparse.Namespace
        Arguments of `hpcgpu.runtime.launch`.
    """
    if arguments.worker_start != "forkserver":
        return False
    from dask import config

    started, preset = dict(os.environ), os.environ.pop(_PRESET, "").split()
    for name in preset:  # the script cannot know Dask's configuration in the job
        os.environ.pop(name, None)
    if why := why_not(arguments.command, config.get(METHOD, None)):
        _log(why)
        return False
    environment = pre_spawn_environment(configured_environment(), os.environ)
    os.environ.update(environment)  # as nannies do in this process when they start a worker
    right = environment.items() <= started.items() and environment.keys() >= set(preset) & started.keys()
    if os.environ.pop(_AGAIN, "") or (right and not _harmful_libraries()):
        return True
    os.environ[_AGAIN] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        del os.environ[_AGAIN]
        _log(f"{sys.executable} cannot be started again: {error.strerror}")
        return False


def begin(*, gpus: bool, at_end: contextlib.ExitStack) -> NodeForkServer | None:
    """Fork the fork server of a worker job. If its workers cannot be forks, print why.

    Parameters
    ----------
    gpus : bool
        Whether the workers have GPUs.
    at_end : contextlib.ExitStack
        Collects what the job must do at its end.
    """
    try:
        return _start(gpus=gpus, at_end=at_end)
    except (OSError, NotTrusted) as error:
        _log(str(error))
        return None


def finish(fork_server: NodeForkServer | None, command: Sequence[str], *, gpus: bool) -> list[str]:
    """Wait for the fork server, and let nannies use it. If they cannot, print why.

    Parameters
    ----------
    fork_server : NodeForkServer or None
        From `begin`.
    command : sequence of str
        The worker command. Its last word is the address of the scheduler.
    gpus : bool
        Whether the workers have GPUs.

    Returns
    -------
    list of str
        The worker command.
    """
    if fork_server is None:
        return list(command)
    if why := fork_server.failure():
        fork_server.stop()
        _log(why)
        return list(command)
    return _use(command, gpus=gpus)


def _log(why: str) -> None:
    write_stderr(f"workers are spawned, and each imports its modules itself: {why}")
