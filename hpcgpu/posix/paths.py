"""How a path is read that a user writes: ``~``, ``$NAME`` and ``${NAME}`` are replaced, ``$$`` is a dollar sign.

Also whether the disk of a path is full, and what helps where nothing can be written.
"""

from __future__ import annotations

import errno
import os
import string
from collections.abc import Mapping
from pathlib import Path

__all__ = ["check", "expand", "is_full", "remedy", "written"]

#: A disk with fewer bytes left is full: the last blocks of some filesystems are never given out.
_FULL = 65536

_REMEDIES = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Your quota is used up. Make room there",
    errno.EROFS: "Its filesystem is read-only now. Ask the site's support when it can be written again",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Check the owner and the permissions of the directory"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Somebody has removed or replaced the directory"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO),
        "Its filesystem has a fault. Try again later. If it stays, tell the site's support",
    ),
}


def expand(path: str, environ: Mapping[str, str]) -> str:
    """Return a path with its home directory and its variables replaced.

    Raises
    ------
    ValueError
        A variable is not set, or is empty; there is no such user; or a ``$`` stands alone.
    """
    check(path)
    try:
        template = string.Template(str(Path(path).expanduser()))
    except RuntimeError as error:
        raise ValueError(f"there is no home directory for {path.split('/', 1)[0]}") from error
    if missing := next((name for name in template.get_identifiers() if not environ.get(name)), None):
        raise ValueError(f"the variable {missing} is not set")
    return template.substitute(environ)


def check(path: str) -> None:
    """Raise `ValueError` where no environment makes this a path."""
    if not string.Template(path).is_valid():
        raise ValueError("a $ must begin the name of a variable, such as $SCRATCH; $$ is a dollar sign")


def written(path: Path) -> str:
    """Return a path as a user writes it, so that `expand` returns it as it is."""
    return str(path).replace("$", "$$")


def is_full(path: Path) -> bool:
    """Whether the disk of a directory has no room for another file. False if it does not say."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL or 0 == disk.f_favail < disk.f_files


def remedy(error: OSError, otherwise: str = "Check the directory and its filesystem") -> str:
    """Return what a user can do where nothing can be written."""
    return _REMEDIES.get(error.errno or 0, otherwise)
