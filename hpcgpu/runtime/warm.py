"""Last import of the fork server (`hpcgpu.runtime.forkserver`): makes what it has imported ready to be shared.

Never import this module elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from multiprocessing import util

__all__: list[str] = []

_SERVER = os.getpid()


def _own_random_numbers() -> None:
    """Give a worker random numbers of its own: forks would have equal ones. `random` of Python does so itself."""
    if os.getppid() == _SERVER and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _end_as_spawned(_: object) -> None:
    """Let this worker do at its end what a new Python process does, and a fork does not.

    Later releases of Python run the functions of `atexit` in a fork too (python/cpython#83856), but flush no files.
    """
    done: list[bool] = []
    atexit.register(done.append, True)  # the first function registered in this process, so the last that runs
    util.Finalize(None, _tidy_up, args=(done,), exitpriority=-100)


def _tidy_up(done: list[bool]) -> None:
    if not done:
        atexit._run_exitfuncs()
    for file in gc.get_objects():
        if isinstance(file, io.IOBase) and not file.closed and file.writable():
            with contextlib.suppress(OSError, ValueError):
                file.flush()


os.register_at_fork(after_in_child=_own_random_numbers)
util.register_after_fork(_end_as_spawned, _end_as_spawned)
gc.collect()
gc.freeze()  # else the first garbage collection of each worker copies what they share
