"""All properties of one batch system, in one object, a `System`; and which batch systems are installed.

Batch systems are entry points of the group ``hpcgpu.batch_systems``, and each names its `System`. A job looks up one
system by its name. So the entry points of hpcgpu itself are read first, from one file; those of all other distributions
are read only for a name that is not among them.

A `System` is made when its package is imported, in every job and for every command. So it holds references,
``"module:name"``, and the named objects are imported when they are used.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.batch import plugins_to_install
from hpcgpu.errors import ClusterWarning, OptionError
from hpcgpu.posix.user import group_names, user_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from hpcgpu.batch.base import BatchSystem
    from hpcgpu.batch.directive_syntax import Syntax
    from hpcgpu.batch.queues import Accounts, Machine, Queues


GROUP = "hpcgpu.batch_systems"


@dataclass(frozen=True, kw_only=True)
class System:
    """One batch system.

    Attributes
    ----------
    name : str
        Its name in commands, in the configuration and in ``cluster.json``: ``"slurm"``.
    title : str
        Its name in messages: ``"Slurm"``.
    client : str
        Reference to the `BatchSystem` class.
    syntax : str
        Reference to the `hpcgpu.batch.directive_syntax.Syntax` of its job scripts.
    cluster_class : str
        Reference to the class of its clusters.
    templates : Path
        Directory of its templates: ``scheduler.SUFFIX.j2`` and ``worker.SUFFIX.j2``; for `hpcgpu render` also
        ``launch.sh.j2`` and ``stop.sh.j2``.
    suffix : str
        Suffix of the names of its job scripts: ``"sbatch"``.
    command : str, optional
        Command that shows that it is installed. A system without one is never chosen automatically, unless it is a
        `fallback`.
    rank : int, default 0
        If several systems are installed, the one with the lowest rank is queried first.
    fallback : bool, default False
        It is chosen if no other system is installed.
    queues : str, optional
        Reference to a function that queries its queues, and returns `hpcgpu.batch.queues.Queues`. Without it they are
        not known.
    accounts : str, optional
        Reference to a function that queries what this user may name in a job, and returns
        `hpcgpu.batch.queues.Accounts`. Without it these names are not known.
    profiles : Path, optional
        Directory of its site profiles, ``NAME.yaml``, if its distribution has any.
    one_machine : bool, default False
        All its jobs run on the machine that submits them.
    worker_options, scheduler_options : str, optional
        References to the dataclasses of its job options: those that all systems share, or subclasses of them with more.
    check_options : str, optional
        Reference to a function of a job's options and of the beginning of a message. It raises `OptionError` for
        options that this batch system cannot serve.
    container_runtimes : mapping of str to str, optional
        Commands of container runtimes that only this batch system has, by name; see `hpcgpu.scripts.container`.
    """

    name: str
    title: str
    client: str
    syntax: str
    cluster_class: str
    templates: Path
    suffix: str
    command: str = ""
    rank: int = 0
    fallback: bool = False
    queues: str = ""
    accounts: str = ""
    profiles: Path | None = None
    one_machine: bool = False
    worker_options: str = "hpcgpu.options.shared_options_and_defaults:WorkerOptions"
    scheduler_options: str = "hpcgpu.options.shared_options_and_defaults:SchedulerOptions"
    check_options: str = ""
    container_runtimes: Mapping[str, str] = field(default_factory=dict)

    def scripts(self) -> Syntax:
        """Return how its job scripts are written."""
        syntax: Syntax = load(self.syntax)
        return syntax

    def discover(self) -> Queues | None:
        """Query the batch system for its queues with GPUs; None if it cannot list them.

        Raises
        ------
        BatchError
            It does not answer.
        """
        if not self.queues:
            return None
        found: Queues = load(self.queues)()
        return found

    def machine(self, *, accounts: bool = True) -> Machine | None:
        """Query the batch system for its queues, and for what this user may use; None if it cannot list its queues.

        Parameters
        ----------
        accounts : bool, default True
            Query `who_may` too.

        Raises
        ------
        BatchError
            It does not answer.
        """
        from hpcgpu.batch.queues import Accounts, Machine

        if (found := self.discover()) is None:
            return None
        return Machine(found, self.who_may() if accounts else Accounts(), user_name(), group_names())

    def who_may(self) -> Accounts:
        """Query what this user may name in a job."""
        from hpcgpu.batch.queues import Accounts

        found: Accounts = load(self.accounts)() if self.accounts else Accounts()
        return found

    def batch(self, **parameters: Any) -> BatchSystem:
        """Return a client of the batch system."""
        make: Callable[..., BatchSystem] = load(self.client)
        return make(**parameters)


def load(reference: str) -> Any:
    """Return what a reference names, ``"module:name"``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def common_templates() -> Path:
    """Return the directory of the templates that all systems share.

    It is inside the wheel, or beside the package in a checkout.
    """
    package = Path(__file__).parents[1]
    packaged = package / "templates"
    return packaged if packaged.is_dir() else package.parent / "templates"


def names() -> list[str]:
    """Return the names of all batch systems, without loading them."""
    return sorted(_own_entry_points() | _others())


def incomplete(name: str) -> str:
    """Return why a broken installation has no batch system of that name; empty if the installation is not broken."""
    if _own_entry_points():
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
        There is none, or the distribution that provides it is broken.
    """
    if problem := incomplete(name):
        raise OptionError(problem)
    entry = _own_entry_points().get(name) or _others().get(name)
    if entry is None:
        more = f"; {hint}" if (hint := plugins_to_install.advice(name)) else ""
        raise OptionError(f"unknown batch system {name!r}: the batch systems are {', '.join(names())}{more}")
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
def _own_entry_points() -> dict[str, EntryPoint]:
    """Entry points of hpcgpu itself."""
    from importlib.metadata import Distribution, PackageNotFoundError  # a third of what a job's supervisor imports

    try:
        found = Distribution.from_name("hpcgpu").entry_points
    except PackageNotFoundError:
        return {}
    return {entry.name: entry for entry in found if entry.group == GROUP}


@functools.cache
def _others() -> dict[str, EntryPoint]:
    """Entry points of all distributions."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


@functools.cache
def _loaded(entry: EntryPoint) -> System:
    brought = f"the batch system {entry.name!r} of {entry.dist.name if entry.dist else 'an unknown distribution'}"
    try:
        found = entry.load()
    except Exception as error:  # a plugin may raise anything
        raise OptionError(f"{brought} cannot be loaded from {entry.value}: {type(error).__name__}: {error}") from error
    if not isinstance(found, System) or found.name != entry.name:
        raise OptionError(
            f"{brought} cannot be used: {entry.value} is not a `System` (hpcgpu.batch.system_registry) with that name"
        )
    return found
