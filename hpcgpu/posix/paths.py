"""Expands a path that a user writes: ``~``, ``$NAME`` and ``${NAME}`` are replaced, ``$$`` is a dollar sign."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path


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
    """Raise `ValueError` if this is no path in any environment."""
    if not string.Template(path).is_valid():
        raise ValueError("a $ must begin the name of a variable, such as $SCRATCH; $$ is a dollar sign")


def written(path: Path) -> str:
    """Return a path as a user writes it, so that `expand` returns the same path."""
    return str(path).replace("$", "$$")
