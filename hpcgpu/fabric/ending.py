"""How a process ends that spoke UCX: UCX's objects live until the process is gone.

At its end Python destroys what is left in an order of its own, while UCX's thread may still be at work on it: a segmentation fault makes a
failure of a program that did well (seen with UCX 1.21). Nothing is lost where they are not destroyed: the kernel closes what they hold.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os

__all__ = ["spare_ucx"]

_PACKAGES = ("ucxx", "distributed_ucxx")


def spare_ucx() -> None:
    """From now on this process ends without destroying UCX's objects. Its exit status and its exit hooks stay as they are."""
    atexit.register(_keep, os.getpid())


def _keep(process: int) -> None:
    """Give each of UCX's objects a reference that nobody takes back, and skip the destructors of libraries."""
    if os.getpid() != process:  # a forked child has none of UCX's threads
        return
    for thing in gc.get_objects():
        if str(getattr(type(thing), "__module__", "")).partition(".")[0] in _PACKAGES:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    with contextlib.suppress(AttributeError):  # glibc's alone, on_exit(3); it hands the exit status on
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
