"""How a path is read that a user writes: ``~``, ``$NAME`` and ``${NAME}`` are replaced, ``$$`` is a dollar sign.

Also whether the disk of a path is full.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from pathlib import Path

__all__ = ["check", "expand", "is_full", "written"]

#: A disk with fewer bytes left is full: the last blocks of some filesystems are never given out.
_FULL = 65536


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
