"""The directories of clusters that have ended: their size, and their removal.

A directory is removed only if it certainly belongs to such a cluster: it is in a cluster directory of the
configuration, is no link, belongs to this user, is marked as closed, and the queue lists no live job of it. Scripts of
``hpcgpu render`` stay, because people edit them and launch them again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.errors import BatchError, BatchUnavailable, Damaged, HpcgpuError, NotTrusted
from hpcgpu.existing_clusters.lookup import directories, system_of
from hpcgpu.existing_clusters.query_jobs import jobs_without_end
from hpcgpu.store.directory import ClusterDirectory

#: Name of a directory during its removal. If the removal is incomplete, the next call continues it.
_REMOVING = ".removing~"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The directory of a cluster that has ended.

    Attributes
    ----------
    directory : ClusterDirectory
    system : str
        Name of its batch system; empty if its files do not contain it.
    created : float
        Epoch seconds.
    changed : float
        Epoch seconds of the last change in it.
    size : int
        Bytes that it takes on the disk.
    """

    directory: ClusterDirectory
    system: str
    created: float
    changed: float
    size: int


def ended(roots: Iterable[Path], refuse: Callable[[Path, NotTrusted], None]) -> list[Ended]:
    """Return the clusters of these directories that are closed, oldest first.

    Parameters
    ----------
    roots : iterable of Path
        Directories in which each cluster has its own.
    refuse : callable
        Called with a cluster directory that is left out because others can change it, and with the reason.
    """
    found = []
    for directory in (one for root in roots for one in directories(root)):
        try:
            there = ClusterDirectory.existing(directory.path, any_format=True)
            if there.closed:
                found.append(_ended(there))
        except NotTrusted as error:
            refuse(directory.path, error)
        except OSError:  # another program removed it just now
            continue
    return sorted(found, key=lambda one: one.changed)


def _ended(directory: ClusterDirectory) -> Ended:
    system, changed = "", max([directory.modified, *directory.times()])
    created = changed
    try:
        created = directory.created
        system = system_of(directory)
    except (OSError, Damaged):
        pass
    return Ended(directory=directory, system=system, created=created, changed=changed, size=size(directory.path))


def size(path: Path) -> int:
    """Return the bytes that a directory takes on the disk, as a quota counts them. Links are not followed."""
    total = 0
    for place, _, files in os.walk(path):
        for name in (place, *(f"{place}/{file}" for file in files)):
            try:
                total += os.lstat(name).st_blocks * 512
            except OSError:
                continue
    return total


class Queues:
    """The batch systems of one call. A system that does not answer is not queried again."""

    def __init__(self) -> None:
        self._batches: dict[str, BatchSystem] = {}
        self._silent: dict[str, BatchUnavailable] = {}

    def jobs_without_end(self, directory: ClusterDirectory) -> dict[str, JobStatus]:
        """Return what the queue reports about a cluster's jobs, see the function of this name in `query_jobs`."""
        system = system_of(directory)
        if system in self._silent:
            raise self._silent[system]
        if system not in self._batches:
            self._batches[system] = batch_system(system)
        try:
            return jobs_without_end(directory, self._batches[system])
        except BatchUnavailable as error:
            self._silent[system] = error
            raise


def why_not(one: Ended, queues: Queues, *, now: float, older_than: float) -> str:
    """Return why a directory is not removed, in words; empty if it may be."""
    directory = one.directory
    if now - one.changed < older_than:
        return "it is not that old"
    if (directory.path / "launch.sh").exists():
        return "it holds scripts of `hpcgpu render`, which can be launched again"
    about = os.lstat(directory.path)
    if stat.S_ISLNK(about.st_mode):
        return "it is a link"
    if about.st_uid != os.geteuid():
        return "it belongs to another user"
    try:
        alive = [job.job_id for job in queues.jobs_without_end(directory).values() if not job.state.ended]
    except (HpcgpuError, BatchError, OSError) as error:
        return f"it is not certain that its jobs have ended: {error}"
    return f"its jobs have not ended: {' '.join(alive)}" if alive else ""


def remove(one: Ended) -> None:
    """Remove the directory of a cluster that has ended.

    The directory first gets a hidden name, so that no program finds a half-removed one. Links in it are removed, their
    targets are not.

    Raises
    ------
    OSError
        It could not be removed whole.
    """
    path = one.directory.path
    if not one.directory.closed:
        raise OSError(errno.EBUSY, "it is no longer that of a cluster that has ended", str(path))
    gone = ClusterDirectory(path.with_name(f"{_REMOVING}{secrets.token_hex(8)}"))
    path.rename(gone.path)
    if not gone.closed or gone.path.is_symlink():  # another cluster has the name by now
        gone.path.rename(path)
        raise OSError(errno.EBUSY, "another cluster has just got its name", str(path))
    shutil.rmtree(gone.path)


def remove_leftovers(roots: Iterable[Path]) -> list[OSError]:
    """Remove directories that an earlier call could not remove completely; return a reason for each that remains."""
    left = []
    for path in (path for root in roots for path in root.glob(f"{_REMOVING}*")):
        with contextlib.suppress(FileNotFoundError):  # another call has removed it
            about = os.lstat(path)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            journal = path / "journal.jsonl"
            if ClusterDirectory(path).closed or not journal.exists():  # else a live cluster got this name by a race
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    left.append(error)
    return left
