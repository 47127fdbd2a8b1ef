"""Turns a job's first step into Dask's own program, in the same process, and ends that process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from hpcgpu.runtime import scratch, stage

#: The least exit code of a process that a signal has ended.
_SIGNALLED = 128
#: The commands of ``python -m dask`` that jobs run, and what their distributions declare for them as entry points.
_COMMANDS = {"cuda": ("dask_cuda.cli", "cuda"), "worker": ("distributed.cli.dask_worker", "main")}


def run_dask(
    command: Sequence[str], place: Path, at_end: contextlib.ExitStack, afterwards: Callable[[], int] = lambda: 0
) -> None:
    """Run ``python -m MODULE ARGUMENTS`` in this process, then the functions in `at_end`, and then `afterwards`.

    `afterwards` returns the exit code if Dask has not failed. It is not called if a second signal has ended Dask.

    The process gets a fresh directory for temporary files in `place`.

    With UCX, the process ends without Python's own cleanup: UCX's thread may still run during the cleanup, and a
    segmentation fault would turn a successful job into a failed one (seen with UCX 1.21 at the end of schedulers).
    """
    atexit.register(gc.freeze)  # else Python's cleanup visits all objects several times: 0.3 s of a core
    _, flag, module, *arguments = command
    assert flag == "-m", "the templates start Dask as a module"
    with at_end, scratch.made(place) as temporary:
        os.environ["DASK_TEMPORARY_DIRECTORY"] = str(temporary)
        if "dask" in sys.modules:  # Dask was imported before the environment was complete
            sys.modules["dask"].config.refresh()
        for transport in ("tls_connections", "authenticated_tcp"):
            importlib.import_module(f"hpcgpu.fabric.{transport}").install()
        sys.argv = [module, *arguments]
        failure: SystemExit | Exception | None = None
        try:
            _run(module, arguments)
        except (SystemExit, Exception) as error:
            failure = error
    ended = failure.code if isinstance(failure, SystemExit) else None
    code = 0 if isinstance(ended, int) and ended > _SIGNALLED else afterwards()
    if failure is not None and not (isinstance(failure, SystemExit) and ended in (None, 0)):
        raise failure
    if _speaks_ucx(arguments):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        stage.release()
        os._exit(code)
    sys.exit(code)


def _run(module: str, arguments: list[str]) -> None:
    """Run ``python -m MODULE ARGUMENTS``.

    ``python -m dask`` would first read the entry points of all installed distributions, and import what each adds to
    the command: a thousand steps on the shared filesystem, one after the other, while the scheduler already waits for
    its workers.
    """
    if module == "dask" and arguments[0] in _COMMANDS:
        # else each process that this one starts would import `hpcgpu.runtime.launch` as its main program
        sys.modules["__main__"] = types.ModuleType("__main__")
        source, name = _COMMANDS[arguments[0]]
        dask = importlib.import_module("dask.cli").cli
        dask.add_command(getattr(importlib.import_module(source), name), arguments[0])
        dask.main(arguments, prog_name="python -m dask")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _speaks_ucx(arguments: Sequence[str]) -> bool:
    return any(flag == "--protocol" and value.startswith("ucx") for flag, value in pairwise(arguments))
