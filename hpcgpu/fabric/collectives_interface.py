"""The network interface of libraries that open their own connections between workers: NCCL and Gloo.

By themselves they may choose an interface that other nodes do not reach, and then a training hangs (xgboost issues 7982
and 7019). UCX chooses well by itself, and ucxx's documentation advises against ``UCX_NET_DEVICES``: it would exclude
the InfiniBand device of the same network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcgpu.fabric import interface_addresses
from hpcgpu.posix import checked_files
from hpcgpu.posix.printable import printable

_NCCL = "NCCL_SOCKET_IFNAME"
#: The variables, and how each writes the name of exactly one interface (NCCL's takes prefixes of names otherwise).
_VARIABLES = {_NCCL: "={}", "GLOO_SOCKET_IFNAME": "{}"}
#: The site's file of NCCL, and the most bytes that are read of such a file.
_OF_SITE, _LIMIT = Path("/etc/nccl.conf"), 1 << 20


def variables(environ: Mapping[str, str], interface: str | None, scheduler: str) -> dict[str, str]:
    """Return the variables that are missing in the environment of a worker.

    Parameters
    ----------
    environ : mapping
        What the user has set stays, there or in a file of NCCL.
    interface : str or None
        The interface of the workers' connections, if it was chosen.
    scheduler : str
        The address of the scheduler, without a port: otherwise the interface is taken through which it is reached.
    """
    name = interface or (interface_addresses.towards(scheduler) if scheduler else None)
    if not name or name == "lo":
        return {}
    return {variable: form.format(name) for variable, form in _VARIABLES.items() if variable not in _set(environ)}


def effective(environ: Mapping[str, str], interface: str | None, scheduler: str) -> str:
    """Return the values that workers would have, in words; empty if there are none."""
    found = _set(environ) | variables(environ, interface, scheduler)
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items()))


def _set(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the user or the site has set.

    NCCL reads a file of the user and then one of the site, and a variable of the environment would hide theirs
    (``initEnv`` in NCCL's ``param.cc``).
    """
    found = {name: environ[name] for name in _VARIABLES if name in environ}
    chosen = environ.get("NCCL_CONF_FILE")
    for path in (Path(chosen) if chosen else _of_user(), _OF_SITE):
        with suppress(OSError, RuntimeError):  # there is no such file, or NCCL cannot read it either
            with checked_files.opened(path.resolve(), of_anyone=bool(chosen)) as file:
                lines = file.read(_LIMIT).decode(errors="replace").splitlines()
            for name, equals, value in (line.partition("=") for line in lines):
                if equals and name == _NCCL:
                    found.setdefault(name, printable(value))
    return found


def _of_user() -> Path:
    """Return NCCL's file of the user; NCCL does not read ``HOME``."""
    import pwd  # not on Windows: a laptop that runs it imports this module too

    with suppress(KeyError):  # as in some containers
        return Path(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf")
    return _OF_SITE
