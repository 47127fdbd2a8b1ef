"""Pretends to be Windows or macOS: ``python tests/ssh/pretended_system.py win32 PROGRAM.py ...``, or ``... -m MODULE``.

Modules that are imported from now on find no module, and no name of `os` and the like, that Python does not have
there. The standard library and Dask, which run there anyway, are imported before. Paths, pipes and ssh stay those of
this machine, but ssh shares no connection on Windows.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.abc
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import click  # noqa: F401
import distributed  # noqa: F401
import jinja2  # noqa: F401
import rich.live  # noqa: F401
import yaml  # noqa: F401

#: Packages of CUDA, which are not for macOS, and not needed on Windows.
_CUDA = {"cuda", "cupy", "dask_cuda", "distributed_ucxx", "numba", "rmm", "ucxx"}
#: By system, modules that are not there.
MODULES = {
    "win32": _CUDA | {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"},
    "darwin": _CUDA,
}
#: By module, names that neither Windows nor macOS has.
OF_LINUX: dict[ModuleType, set[str]] = {
    errno: {"EREMOTEIO"},
    os: {"O_PATH", "O_TMPFILE", "O_DIRECT", "P_PIDFD", "RTLD_DEEPBIND", "ST_NOEXEC", "copy_file_range", "eventfd"}
    | {"getxattr", "listxattr", "setxattr", "removexattr", "getrandom", "memfd_create", "pidfd_open", "pipe2"}
    | {"posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "splice", "unshare", "waitid"},
    select: {"epoll"},
    signal: {"SIGRTMAX", "SIGRTMIN", "sigtimedwait", "sigwaitinfo"},
    socket: {"SO_PEERCRED", "SO_BINDTODEVICE", "AF_NETLINK"},
    time: {"CLOCK_BOOTTIME"},
}
#: By module, names that Windows lacks too.
OF_POSIX: dict[ModuleType, set[str]] = {
    asyncio: {"open_unix_connection", "start_unix_server"},
    os: {"O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "P_PID", "RTLD_LAZY", "RTLD_NOW"}
    | {"RTLD_NOLOAD", "WEXITED", "WNOHANG", "WNOWAIT", "WIFEXITED", "WEXITSTATUS", "chown", "chroot", "confstr"}
    | {"fchdir", "fchmod", "fchown", "fdatasync", "fork", "forkpty", "fpathconf", "fstatvfs", "fwalk", "get_blocking"}
    | {"getegid", "geteuid", "getgid", "getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority", "getresuid"}
    | {"getsid", "getuid", "killpg", "lchown", "lockf", "mkfifo", "mknod", "nice", "openpty", "pathconf"}
    | {"posix_spawn", "pread", "preadv", "pwrite", "readv", "register_at_fork", "sendfile", "set_blocking", "setgid"}
    | {"setpgid", "setsid", "setuid", "statvfs", "sync", "sysconf", "tcgetpgrp", "ttyname", "uname", "wait", "wait3"}
    | {"writev"},
    select: {"poll"},
    signal: {"SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP"}
    | {"SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGXCPU", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK", "alarm", "pause"}
    | {"pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigpending", "sigwait"},
    socket: {"AF_UNIX", "SO_REUSEPORT", "recv_fds", "send_fds"},
    time: {"CLOCK_MONOTONIC", "clock_gettime", "tzset"},
}


class _Lacking(ModuleType):
    """A module without some names."""

    def __init__(self, whole: ModuleType, names: Collection[str]) -> None:
        super().__init__(whole.__name__, whole.__doc__)
        self.__dict__.update({name: value for name, value in vars(whole).items() if name not in names})


class _Finder(importlib.abc.MetaPathFinder):
    """The finders of this machine, which find some modules no more."""

    def __init__(self, missing: Collection[str]) -> None:
        self._missing, self._finders = missing, list(sys.meta_path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self._missing:
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self._finders)), None)

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        for finder in self._finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*context)


def pretend(system: str) -> None:
    """From now on this is another system."""
    for name in MODULES[system]:
        sys.modules.pop(name, None)
    sys.meta_path[:] = [_Finder(MODULES[system])]
    for module in [*OF_LINUX, asyncio]:
        missing = OF_LINUX.get(module, set()) | (OF_POSIX.get(module, set()) if system == "win32" else set())
        sys.modules[module.__name__] = _Lacking(module, missing)
    if system == "win32":
        import asyncio as lacking

        # the loop that Dask and Jupyter choose there starts no process
        vars(lacking).update(ProactorEventLoop=_Proactor, new_event_loop=_NoProcesses)
    sys.modules["sys"] = here = _Lacking(sys, ())  # a copy: the standard library is that of this machine
    vars(here)["platform"] = system


class _Proactor(asyncio.SelectorEventLoop):
    pass


class _NoProcesses(asyncio.SelectorEventLoop):
    async def subprocess_exec(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


if __name__ == "__main__":
    pretend(sys.argv[1])
    run = runpy.run_module if sys.argv[2] == "-m" else runpy.run_path
    del sys.argv[: 3 if sys.argv[2] == "-m" else 2]
    run(sys.argv[0], run_name="__main__")
