"""The batch systems that are installed: entry points of the group ``hpcgpu.batch_systems``, each names a `System`.

A job looks up one system by its name. So the entry points of hpcgpu itself are read first, from one file; those of all
other distributions are read only for a name that is not among them.
"""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points

from hpcgpu.batch.system import System
from hpcgpu.errors import ClusterWarning, OptionError

__all__ = ["GROUP", "fallback", "incomplete", "names", "system", "systems"]

GROUP = "hpcgpu.batch_systems"


def names() -> list[str]:
    """Return the names of all batch systems, without loading them."""
    return sorted(_own() | _others())


def incomplete(name: str) -> str:
    """Return why no batch system of that name can be found in a broken installation; empty in any other."""
    if _own():
        return ""
    return (
        f"the batch system {name!r} cannot be found: this installation of hpcgpu does not list its batch systems. "
        "Install hpcgpu again (in a checkout: `pip install --no-deps --no-build-isolation -e .`)"
    )


def system(name: str) -> System:
    """Return the batch system of that name.

    Raises
    ------
    OptionError
        There is none, or the distribution that brings it is broken.
    """
    if problem := incomplete(name):
        raise OptionError(problem)
    entry = _own().get(name) or _others().get(name)
    if entry is None:
        raise OptionError(f"unknown batch system {name!r}: the batch systems are {', '.join(names())}")
    return _loaded(entry)


def systems() -> list[System]:
    """Return all batch systems, by rank. One that cannot be loaded is left out, with a warning."""
    found = []
    for name in names():
        try:
            found.append(system(name))
        except OptionError as error:
            warnings.warn(str(error), ClusterWarning, stacklevel=2)
    return sorted(found, key=lambda one: (one.rank, one.name))


def fallback() -> System:
    """Return the batch system for a machine that has no other."""
    return next(one for one in systems() if one.fallback)


@functools.cache
def _own() -> dict[str, EntryPoint]:
    """Entry points of hpcgpu itself."""
    try:
        found = Distribution.from_name("hpcgpu").entry_points
    except PackageNotFoundError:
        return {}
    return {entry.name: entry for entry in found if entry.group == GROUP}


@functools.cache
def _others() -> dict[str, EntryPoint]:
    """Entry points of all distributions."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@functools.cache
def _loaded(entry: EntryPoint) -> System:
    brought = f"the batch system {entry.name!r} of {entry.dist.name if entry.dist else 'an unknown distribution'}"
    try:
        found = entry.load()
    except Exception as error:  # whatever a distribution of somebody else does
        raise OptionError(f"{brought} cannot be loaded from {entry.value}: {type(error).__name__}: {error}") from error
    if not isinstance(found, System) or found.name != entry.name:
        raise OptionError(f"{brought} cannot be used: {entry.value} is not a `hpcgpu.batch.system.System` of that name")
    return found
