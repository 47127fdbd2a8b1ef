"""Lets UCX's objects live until their process has ended.

When a process ends, Python destroys the remaining objects in no fixed order, while UCX's thread may still use them.
Then a program that has succeeded ends with a segmentation fault (seen with UCX 1.21). The objects need no destruction:
the kernel closes what they hold.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os

_PACKAGES = ("ucxx", "distributed_ucxx")


def spare_ucx() -> None:
    """Let this process end without destroying UCX's objects.

    Its exit status and its exit hooks do not change.
    """
    atexit.register(_keep, os.getpid())


def _keep(process: int) -> None:
    """Give each of UCX's objects a permanent reference, and skip the destructors of libraries."""
    if os.getpid() != process:  # a forked child has none of UCX's threads
        return
    for thing in gc.get_objects():
        if str(getattr(type(thing), "__module__", "")).partition(".")[0] in _PACKAGES:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    with contextlib.suppress(AttributeError):  # only glibc has on_exit(3), which passes on the exit status
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
