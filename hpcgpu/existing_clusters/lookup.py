"""Finds the clusters of this user, from their directories: all of them, or one by its name."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcgpu.batch import batch_system, system_registry
from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.errors import (
    BatchError,
    ClusterWarning,
    Damaged,
    NoCluster,
    NotTrusted,
    OptionError,
)
from hpcgpu.existing_clusters.query_jobs import live_jobs
from hpcgpu.options import values
from hpcgpu.posix.printable import printable
from hpcgpu.scripts.render import script_name
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory


@dataclass(frozen=True, kw_only=True)
class Found:
    """A cluster that has a directory.

    Attributes
    ----------
    directory : ClusterDirectory
    system : str
        Name of its batch system; empty if its files do not contain it.
    created : float
        Epoch seconds.
    jobs : list of JobStatus
        Those of its jobs that have not ended.
    problem : str
        Unknown facts, and damage of its files.
    known : bool
        Whether the queue answered.
    readable : bool
        Whether this version of hpcgpu can read its files.
    """

    directory: ClusterDirectory
    system: str
    created: float
    jobs: list[JobStatus]
    problem: str
    known: bool
    readable: bool = True


def renamed(directory: ClusterDirectory) -> bool:
    """Whether a later cluster has taken the name of this cluster."""
    return "~" in directory.path.name


def directories(root: Path) -> list[ClusterDirectory]:
    """Return the cluster directories in a directory.

    These directories have a journal or a ``cluster.json``. Directories renamed to ``NAME~...`` and directories of other
    users are included; links of other users are not.
    """
    found = []
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                # A link of another user may lead to a filesystem that does not answer.
                there = stat.S_ISDIR(about.st_mode) or (
                    stat.S_ISLNK(about.st_mode) and about.st_uid in (0, os.geteuid())
                )
                if there and not entry.name.startswith(".") and _is_cluster(root / entry.name):
                    found.append(ClusterDirectory(root / entry.name))
    return sorted(found, key=lambda directory: directory.path)


def _warn(path: Path, error: NotTrusted) -> None:
    warnings.warn(printable(str(error), None), ClusterWarning, stacklevel=4)


def find(roots: Iterable[Path], refuse: Callable[[Path, NotTrusted], None] = _warn) -> list[Found]:
    """Return the clusters of these directories that were not closed, oldest first.

    A damaged cluster is included, with a description of the damage. A cluster whose name a later cluster has taken is
    included while it has jobs. Scripts of ``hpcgpu render`` count as a cluster after their launch.

    Parameters
    ----------
    roots : iterable of Path
        Directories in which each cluster has its own.
    refuse : callable, optional
        Called with a cluster directory that is left out because others can change it, and with the reason. Default:
        warns.
    """
    found = [one for root in roots for directory in directories(root) if (one := _open(directory, refuse)) is not None]
    return sorted((one for one in found if one.jobs or not renamed(one.directory)), key=lambda one: one.created)


def unclosed(directory: ClusterDirectory, *, any_format: bool = False) -> ClusterDirectory | None:
    """Return a cluster that was launched and not closed; None otherwise, also if it was removed just now."""
    with suppress(FileNotFoundError):
        there = ClusterDirectory.existing(directory.path, any_format=any_format)
        if not there.closed and not there.only_scripts:
            return there
    return None


def _open(directory: ClusterDirectory, refuse: Callable[[Path, NotTrusted], None]) -> Found | None:
    """Return an unclosed cluster. Unreadable files affect only this cluster."""
    try:
        there = unclosed(directory, any_format=True)
        return _examine(there) if there is not None else None
    except NotTrusted as error:
        refuse(directory.path, error)
        return None
    except FileNotFoundError:  # removed or renamed just now
        return None
    except OSError as error:
        return Found(directory=directory, system="", created=0.0, jobs=[], problem=str(error), known=False)


def _examine(directory: ClusterDirectory) -> Found:
    jobs, system, created, known = list[JobStatus](), "", directory.modified, False
    other = directory.other_format()
    problem = [other] if other else directory.damage()
    with suppress(OSError, Damaged):
        created = directory.created
    if not other and (directory.path / "options.json").exists():
        try:
            saved_options.read(directory)
        except OptionError as error:
            problem.append(str(error))
    try:
        system = system_of(directory)
        jobs = live_jobs(directory, batch_system(system))
        known = True
    except (BatchError, Damaged, OSError) as error:
        problem = list(dict.fromkeys([*problem, str(error)]))
    return Found(
        directory=directory,
        system=system,
        created=created,
        jobs=jobs,
        problem="; ".join(problem),
        known=known,
        readable=not other,
    )


def system_of(directory: ClusterDirectory) -> str:
    """Return the name of a cluster's batch system, from ``cluster.json``, or else from the names of its scripts.

    Raises
    ------
    Damaged
        Neither shows it.
    """
    try:
        system = directory.system
        if system in system_registry.names():
            return system
        raise Damaged(f"{directory.path / 'cluster.json'} is damaged: unknown batch system {system[:40]!a}")
    except (OSError, Damaged) as error:
        for system in system_registry.names():
            if (directory.path / script_name(system, "worker")).exists():
                return system
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{directory.path / 'cluster.json'} cannot be read: {error.strerror}") from error


def batch_of(directory: ClusterDirectory) -> BatchSystem:
    """Return the batch system of a cluster; see `system_of`."""
    return batch_system(system_of(directory))


def locate(name: str | Path, *, any_format: bool = False) -> ClusterDirectory:
    """Return the directory of one cluster.

    Parameters
    ----------
    name : str or Path
        Its name, which is searched in the cluster directories of the configuration, or the path of its directory.
    any_format : bool, default False
        Whether another version of hpcgpu may have made it. Such a cluster can only be stopped.

    Raises
    ------
    NoCluster
        There is none, or several have that name.
    NotTrusted
        Others can change its directory.
    OtherFormat
        Another version of hpcgpu made it, and this one cannot read it.
    """
    directory = _at(name) if "/" in str(name) else _named(str(name))
    if not any_format:
        directory.check_format()
    return directory


def _at(path: str | Path) -> ClusterDirectory:
    path = path.expanduser() if isinstance(path, Path) else values.directory("the name of the cluster", path)
    if not _is_cluster(path):
        raise NoCluster(f"{path} is not the directory of a cluster")
    return ClusterDirectory.existing(path.absolute(), any_format=True)


def _named(name: str) -> ClusterDirectory:
    roots = cluster_directories()
    there = [ClusterDirectory.existing(root / name, any_format=True) for root in roots if _is_cluster(root / name)]
    # the journal of a cluster may be unreadable: then the command itself reports it, and continues with other clusters
    chosen = [directory for directory in there if len(there) == 1 or not directory.closed] or there
    if len(chosen) > 1:
        raise NoCluster(
            f"several clusters are named {name}: give the path of one of them: {', '.join(str(d.path) for d in chosen)}"
        )
    if not chosen:
        raise NoCluster(f"there is no cluster named {name!r} in {', '.join(map(str, roots))}. {_existing(roots)}")
    return chosen[0]


def _existing(roots: Iterable[Path]) -> str:
    """Return a sentence that names the clusters in these directories, and one on scripts that were never launched."""
    clusters, scripts = list[str](), list[str]()
    for directory in (found for root in roots for found in directories(root)):
        with suppress(OSError, NotTrusted):  # directories of others
            there = ClusterDirectory.existing(directory.path, any_format=True)
            if not renamed(there) and not there.closed:
                kind = clusters
                with suppress(OSError):
                    kind = scripts if there.only_scripts else clusters
                kind.append(there.path.name)
    text = f"Existing clusters: {printable(', '.join(sorted(clusters)) or 'none')}"
    return f"{text}. Scripts that were not launched: {printable(', '.join(sorted(scripts)))}" if scripts else text


def _is_cluster(path: Path) -> bool:
    """Return whether a cluster has this directory; PermissionError if the user may not enter it."""
    for name in ("cluster.json", "journal.jsonl"):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path / name)
            return True
    return False
