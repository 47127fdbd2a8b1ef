"""Environment variables that hpcgpu sets for one process, and that jobs which this process submits must not inherit."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

#: The variable that names the others.
_OWN = "HPCGPU_OWN_VARIABLES"


def set_missing(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Set those variables that the user has not set, and record which."""
    missing = {name: value for name, value in variables.items() if name not in environ}
    environ.update(missing)
    environ[_OWN] = " ".join([*environ.get(_OWN, "").split(), *missing])


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what `set_missing` has set."""
    own = {_OWN, *environ.get(_OWN, "").split()}
    return {name: value for name, value in environ.items() if name not in own}
