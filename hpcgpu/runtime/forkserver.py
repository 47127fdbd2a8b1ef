"""Workers that start from one warm process of their node: Python's fork server (option `worker_start`).

Most of what a worker does at its start is to import the same modules as the workers beside it. The job's first process
imports Dask for itself, then forks the fork server, while it waits for the scheduler. The fork server imports what is
missing, and each worker is a fork of it. So a node imports each module once.

A forked worker must be what a spawned one is. What a process reads once, at its own start, is in the environment of the
job's first process: the seed of hashes, settings of the allocator, thread counts. If they are not there, this process
starts itself again (`prepare`). What a process reads later comes from the nanny
(`hpcgpu.runtime.nanny`). The fork server has one thread and no GPU library that talks to a driver. `Warm.trouble` asks
a first fork whether that is so. If it is not, workers are spawned, and the log says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpcgpu.errors import NotTrusted
from hpcgpu.posix.ownership import check_place
from hpcgpu.runtime import scratch, warned

__all__ = [
    "METHOD",
    "NANNY_MODULE",
    "NANNY_PRELOAD",
    "NANNY_PRELOAD_VARIABLE",
    "begin",
    "configured_environment",
    "finish",
    "pre_spawn_environment",
    "prepare",
    "why_not",
]

METHOD = "distributed.worker.multiprocessing-method"
NANNY_PRELOAD = "distributed.nanny.preload"
NANNY_PRELOAD_VARIABLE = "DASK_DISTRIBUTED__NANNY__PRELOAD"
NANNY_MODULE = "hpcgpu.runtime.nanny"

#: Names of variables that the job's script has set as Dask's defaults have them, and that nobody else has set.
_PRESET = "HPCGPU_PRESET"
#: Is in the environment of a first process that has started again.
_AGAIN = "HPCGPU_STARTED_AGAIN"
#: What every worker imports. Those that are not installed are left out.
_MODULES = (
    "distributed",
    "distributed.dashboard.worker",
    "hpcgpu.software.versions",
    "hpcgpu.fabric.authentication",
    "hpcgpu.fabric.report",
    "hpcgpu.fabric.tls",
    "hpcgpu.runtime.dashboard",
    "hpcgpu.runtime.hostcopy",
    "hpcgpu.runtime.recipients",
)
_GPU_MODULES = ("dask_cuda.initialize", "cuda.core", "rmm", "pynvml")
#: What a fork server must not have: a fork cannot use the GPU if its parent has talked to the driver, nor UCX.
_HARMFUL_MODULES = ("numba.cuda", "cudf", "cupy", "torch", "ucxx")
_HARMFUL_LIBRARIES = ("libcuda.so", "libnvidia-ml.so", "libucp.so")
#: Where the socket of the fork server is. The path of a socket has at most 107 characters, so this one is short.
_PLACE = Path("/tmp")
#: Seconds that the fork server may take to import what it imports. Shared filesystems are slow.
_TIMEOUT = 120.0


def pre_spawn_environment(configured: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a nanny sets before it starts a worker: its `pre_spawn_env`.

    Parameters
    ----------
    configured : mapping
        The option ``distributed.nanny.pre-spawn-environ`` of Dask.
    environ : mapping
        The environment of the nanny. What is set there counts more.
    """
    found = {name: environ.get(name, str(value)) for name, value in configured.items() if value is not None}
    if found.get("PYTHONHASHSEED") in (None, "0"):  # as Nanny.__init__: all workers must hash alike
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
    config.update(merged, yaml.safe_load(text)["distributed"]["nanny"]["pre-spawn-environ"])
    config.update(merged, config.get("distributed.nanny.pre-spawn-environ", None) or {})
    return merged


class Warm:
    """The fork server of this process, which imports, and what a first fork of it reports.

    Parameters
    ----------
    environment : dict of str
        What the fork server was started with, of what nannies set before they start a worker.
    """

    def __init__(self, environment: dict[str, str]) -> None:
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

    def trouble(self) -> str:
        """Wait until the fork server is warm. Return why workers cannot be forks of it; empty if they can."""
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
        from multiprocessing import forkserver

        with contextlib.suppress(ProcessLookupError):
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]


def _start(*, gpus: bool, at_end: contextlib.ExitStack) -> Warm:
    check_place(_PLACE)
    # The directory of the socket. One that multiprocessing makes would be left by a process that ends without Python's
    # own tidying up (`become`), or is killed.
    place = at_end.enter_context(scratch.made(_PLACE))
    multiprocessing.current_process()._config["tempdir"] = str(place)  # type: ignore[attr-defined]
    if multiprocessing.connection.arbitrary_address("AF_UNIX").startswith("\0"):  # type: ignore[attr-defined]
        raise NotTrusted(
            "every user of the node could run code as you through the socket that this Python gives a fork server "
            "(CVE-2022-42919): use Python 3.11.1 or later"
        )
    from multiprocessing import forkserver, resource_tracker, util

    forkserver.set_forkserver_preload([*_MODULES, *(_GPU_MODULES if gpus else ()), "hpcgpu.runtime.warm"])
    resource_tracker.ensure_running()  # a program of its own: not a fork
    start_program = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start_program
    return Warm(pre_spawn_environment(configured_environment(), os.environ))


def _fork(path: object, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Do in a fork of this process what a new Python would do. Return the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        # Libraries that can be forked with threads, such as OpenBLAS, have ended their own for the fork.
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if threads > 1:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise OSError(f"the first process of the job has {threads} threads, but may have only one before a fork")
        return process
    try:
        _become_a_new_program(passed)
        exec(arguments[-1], vars(sys.modules["__main__"]))
    except SystemExit:
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _become_a_new_program(passed: Sequence[int]) -> None:
    """Leave behind what a fork has of its parent, and a new program has not."""
    from multiprocessing import forkserver, resource_tracker

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warned.stay()
    for file in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if file > 2 and file not in passed:
            with contextlib.suppress(OSError):
                os.close(file)
    forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # its pipe is closed
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]


def _use(command: Sequence[str], *, gpus: bool) -> list[str]:
    """Let the nannies of this process fork their workers. Return the worker command for that."""
    from dask import config
    from distributed import utils

    utils._forkserver_preload_set = True  # else distributed imports all that workers may need here, and sets its own
    if not gpus:  # `dask worker` has an argument, and does not look at the configuration
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
    if "hpcgpu.runtime.warm" not in sys.modules:
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
    """Return whether the workers of this job are to be forks. Say why not if their user wants them to be.

    This process starts again if it has not started with what nannies set before they start a worker: its workers are to
    be forks of it, and some variables are read at the start of a process only. The job's script has set the defaults of
    Dask, so that this is rare. A library that has talked to the driver, to count GPUs, is not there when this process
    has started again either. It starts again once at most: a library may be there each time, by ``LD_PRELOAD``. Then
    `Warm.trouble` finds it.

    Parameters
    ----------
    arguments : argparse.Namespace
        Of `hpcgpu.runtime.launch`.
    """
    if arguments.worker_start != "forkserver":
        return False
    from dask import config

    started, preset = dict(os.environ), os.environ.pop(_PRESET, "").split()
    for name in preset:  # the script does not know the configuration of Dask in the job
        os.environ.pop(name, None)
    if why := why_not(arguments.command, config.get(METHOD, None)):
        _say(why)
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
        _say(f"{sys.executable} cannot be started again: {error.strerror}")
        return False


def begin(*, gpus: bool, at_end: contextlib.ExitStack) -> Warm | None:
    """Fork the fork server of a worker job. Say why if its workers cannot be forks.

    Parameters
    ----------
    gpus : bool
        Whether the workers have GPUs.
    at_end : contextlib.ExitStack
        Gets what the job must do at its end.
    """
    try:
        return _start(gpus=gpus, at_end=at_end)
    except (OSError, NotTrusted) as error:
        _say(str(error))
        return None


def finish(warm: Warm | None, command: Sequence[str], *, gpus: bool) -> list[str]:
    """Wait for the fork server, and let nannies use it. Say why if they cannot.

    Parameters
    ----------
    warm : Warm or None
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
    if warm is None:
        return list(command)
    if why := warm.trouble():
        warm.stop()
        _say(why)
        return list(command)
    return _use(command, gpus=gpus)


def _say(why: str) -> None:
    print(f"hpcgpu: workers are spawned, and each imports its modules itself: {why}", file=sys.stderr, flush=True)
