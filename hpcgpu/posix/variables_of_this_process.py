"""Environment variables that hpcgpu sets for one process, and that jobs which this process submits must not inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

_first: dict[str, str] = {}


def set_missing(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Set those variables that the user has not set."""
    environ.update({name: value for name, value in variables.items() if name not in environ})


def remember(environ: Mapping[str, str]) -> None:
    """Remember the environment in which this process begins."""
    _first.clear()
    _first.update(environ)


def without() -> dict[str, str]:
    """Return the environment without what hpcgpu has set in this process."""
    return dict(_first or os.environ)
