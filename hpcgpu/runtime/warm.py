"""Last import of the fork server (`hpcgpu.runtime.forkserver`): makes what it has imported ready to be shared.

Never import this module elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
from multiprocessing import util
from typing import Any

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
    files, archives = list[io.IOBase](), list[Any]()
    for one in gc.get_objects():
        with contextlib.suppress(Exception):  # a proxy of what is gone, a file that is detached
            if isinstance(one, _archives()):
                archives.append(one)
            elif isinstance(one, io.IOBase) and not one.closed and one.writable():
                files.append(one)
    for finish in (*(file.flush for file in files), *(one.close for one in archives), *(file.flush for file in files)):
        with contextlib.suppress(Exception):  # it is closed, or its disk is full
            finish()
    ctypes.CDLL(None).fflush(None)


def _archives() -> tuple[type, ...]:
    """Return the types of files that have an end of their own, of modules that are imported."""
    names = (
        ("zipfile", "ZipFile"),
        ("tarfile", "TarFile"),
        ("gzip", "GzipFile"),
        ("bz2", "BZ2File"),
        ("lzma", "LZMAFile"),
    )
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


os.register_at_fork(after_in_child=_own_random_numbers)
util.register_after_fork(_end_as_spawned, _end_as_spawned)
gc.collect()
gc.freeze()  # else the first garbage collection of each worker copies what they share
