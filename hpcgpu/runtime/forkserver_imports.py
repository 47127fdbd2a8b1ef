"""Last import of the fork server (`hpcgpu.runtime.forkserver`): prepares the imported modules for sharing.

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

_SERVER = os.getpid()


def _own_random_numbers() -> None:
    """Give a worker its own random numbers: forks would have equal ones. Python's `random` reseeds itself."""
    if os.getppid() == _SERVER and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _end_as_spawned(_: object) -> None:
    """Let this worker end as a new Python process does; a fork does less.

    A process that a worker starts is not meant: it would remove the files of the worker, and write them twice.

    Later releases of Python run the functions of `atexit` in a fork too (python/cpython#83856), but flush no files.
    """
    if os.getppid() != _SERVER:
        return
    done: list[bool] = []
    atexit.register(done.append, True)  # registered first in this process, so it runs last
    util.Finalize(None, _tidy_up, args=(done,), exitpriority=-100)


def _tidy_up(done: list[bool]) -> None:
    if not done:
        atexit._run_exitfuncs()
    files, archives = list[io.IOBase](), list[Any]()
    for one in gc.get_objects():
        with contextlib.suppress(Exception):  # a proxy of a removed object, or a detached file
            if isinstance(one, _archives()):
                archives.append(one)
            elif isinstance(one, io.IOBase) and not one.closed and one.writable():
                files.append(one)
    for finish in (*(file.flush for file in files), *(one.close for one in archives), *(file.flush for file in files)):
        with contextlib.suppress(Exception):  # the file is closed, or its disk is full
            finish()
    ctypes.CDLL(None).fflush(None)


def _archives() -> tuple[type, ...]:
    """Return the types of files, in imported modules, that write something of their own when they are closed."""
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
gc.freeze()  # else the first garbage collection of each worker copies the shared memory
gc.enable()
