"""Workers that start from one warm process of their node: Python's fork server (option `worker_start`).

Most of what a worker does at its start is to import the same modules as the workers beside it. The job's first process
starts the fork server while it waits for the scheduler. The fork server imports these modules once, and each worker is
a fork of it.

A forked worker must be what a spawned one is. What a process reads once, at its own start, is in the environment of the
fork server: the seed of hashes, settings of the allocator, thread counts. What a process reads later comes from the
nanny (`hpcgpu.runtime.nanny`). The fork server has one thread and no GPU library that talks to a driver. `Warm.trouble`
asks a first fork whether that is so. If it is not, workers are spawned, and the log says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from hpcgpu.errors import NotTrusted
from hpcgpu.posix.ownership import check_place
from hpcgpu.runtime import scratch

__all__ = [
    "METHOD",
    "NANNY_PRELOAD_VARIABLE",
    "begin",
    "configured_environment",
    "finish",
    "pre_spawn_environment",
    "why_not",
]

METHOD = "distributed.worker.multiprocessing-method"
_NANNY_PRELOAD = "distributed.nanny.preload"
NANNY_PRELOAD_VARIABLE = "DASK_DISTRIBUTED__NANNY__PRELOAD"
_NANNY_MODULE = "hpcgpu.runtime.nanny"

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
            self._found = f"the fork server does not run: {error or type(error).__name__}"

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
        """End the fork server, which nobody uses. It may still be importing, so that no fork can tell which it is."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                    child.terminate()


def _start(*, gpus: bool, at_end: contextlib.ExitStack) -> Warm:
    """Start the fork server.

    Parameters
    ----------
    gpus : bool
        Whether the workers have GPUs.
    at_end : contextlib.ExitStack
        Gets what the job must do at its end.

    Raises
    ------
    OSError, NotTrusted
        It cannot be started here.
    """
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
    environment = pre_spawn_environment(configured_environment(), os.environ)
    os.environ.update(environment)  # as nannies do in this process when they start a worker
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload([*_MODULES, *(_GPU_MODULES if gpus else ()), "hpcgpu.runtime.warm"])
    forkserver.ensure_running()
    return Warm(environment)


def _use(command: Sequence[str], *, gpus: bool) -> list[str]:
    """Let the nannies of this process fork their workers. Return the worker command for that."""
    from dask import config
    from distributed import utils

    utils._forkserver_preload_set = True  # else distributed imports all that workers may need here, and sets its own
    if not gpus:  # `dask worker` has an argument, and does not look at the configuration
        return [*command[:-1], "--preload-nanny", _NANNY_MODULE, command[-1]]
    preloads = config.get(_NANNY_PRELOAD)
    preloads = [preloads] if isinstance(preloads, str) else list(preloads)
    os.environ[NANNY_PRELOAD_VARIABLE] = repr([*preloads, _NANNY_MODULE])
    return list(command)


def examine(answer: Connection) -> None:
    """Run in a fork of the fork server: report why workers cannot be forks of it."""
    answer.send(_harm(os.getppid()))
    answer.close()


def _harm(server: int) -> str:
    if "hpcgpu.runtime.warm" not in sys.modules:
        return "the fork server did not import the modules that workers need"
    if loaded := [name for name in _HARMFUL_MODULES if name in sys.modules]:
        return f"{loaded[0]} is imported by the modules that workers need, and must not be imported before a fork"
    maps = Path("/proc/self/maps").read_text()
    if loaded := [name for name in _HARMFUL_LIBRARIES if f"/{name}" in maps]:
        return f"{loaded[0]} is loaded by the modules that workers need, and must not be loaded before a fork"
    threads = len(os.listdir(f"/proc/{server}/task"))  # noqa: PTH208
    if threads != 1:
        return f"the fork server has {threads} threads, started by the modules that it imports, but may have only one"
    return ""


def begin(arguments: argparse.Namespace, at_end: contextlib.ExitStack) -> Warm | None:
    """Start the fork server of a worker job if its user wants one. Say why if its workers cannot be forks.

    Parameters
    ----------
    arguments : argparse.Namespace
        Of `hpcgpu.runtime.launch`.
    at_end : contextlib.ExitStack
        Gets what the job must do at its end.
    """
    from dask import config

    if arguments.worker_start != "forkserver":
        return None
    why = why_not(arguments.command, config.get(METHOD, None))
    if not why:
        try:
            return _start(gpus=bool(arguments.gpus), at_end=at_end)
        except (OSError, NotTrusted) as error:
            why = str(error)
    _say(why)
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
