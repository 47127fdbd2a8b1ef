"""The clusters of this user, as their directories tell: which there are, what of them lives, how to end one whose client is gone."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgpu.batch import batch_system
from hpcgpu.batch.base import BatchError, BatchSystem, JobState, JobStatus
from hpcgpu.directory import ClusterDirectory, Submit
from hpcgpu.options import cluster_directories
from hpcgpu.ownership import NotTrusted
from hpcgpu.printable import printable

__all__ = ["Found", "NoCluster", "find", "live_jobs", "locate", "stop", "submitted"]


#: Answers of the queue in a row without a job of the cluster, before they are believed; one may leave out what lives.
_EMPTY = 2
#: Seconds that a submit may take whose client was killed.
_SUBMIT = 10.0


class NoCluster(LookupError):
    """There is no cluster of that name."""


@dataclass(frozen=True)
class Found:
    """A cluster that has a directory.

    Attributes
    ----------
    directory : ClusterDirectory
    jobs : list of JobStatus
        Those of its jobs that have not ended.
    trouble : str
        Why that is not known; empty if it is.
    """

    directory: ClusterDirectory
    jobs: list[JobStatus]
    trouble: str = ""


def find(roots: Iterable[Path], names: Iterable[str] = ()) -> list[Found]:
    """Return the clusters of these directories that were not closed, oldest first.

    Parameters
    ----------
    roots : iterable of Path
        Directories in which each cluster has its own.
    names : iterable of str, optional
        Only these, also closed ones. Default: all.
    """
    wanted = set(names)
    directories = [d for root in roots for path in sorted(root.glob("*/cluster.json")) if (d := _trusted(path.parent)) is not None]
    chosen = [d for d in directories if (d.path.name in wanted if wanted else not d.closed and "~" not in d.path.name)]
    found = []
    for directory in sorted(chosen, key=lambda directory: directory.created):
        try:
            found.append(Found(directory, live_jobs(directory, batch_system(directory.system))))
        except BatchError as error:
            found.append(Found(directory, [], str(error)))
    return found


def _trusted(path: Path) -> ClusterDirectory | None:
    """Return the directory of a cluster; none, and a word, where others can change it."""
    try:
        return ClusterDirectory.there(path)
    except NotTrusted as error:
        warnings.warn(printable(str(error), None), UserWarning, stacklevel=3)
        return None


def locate(name: str | Path) -> ClusterDirectory:
    """Return the directory of one cluster.

    Parameters
    ----------
    name : str or Path
        Its name, which is looked for where the configuration has clusters, or the path of its directory.

    Raises
    ------
    NoCluster
        There is none, or several have that name.
    NotTrusted
        Others can change its directory.
    """
    path = Path(name).expanduser()
    if path.is_absolute() or "/" in str(name):
        if not (path / "cluster.json").exists():
            raise NoCluster(f"{path} is not the directory of a cluster")
        return ClusterDirectory.there(path.absolute())
    roots = cluster_directories()
    there = [ClusterDirectory.there(root / name) for root in roots if (root / name / "cluster.json").exists()]
    chosen = [directory for directory in there if not directory.closed] or there
    if len(chosen) > 1:
        raise NoCluster(f"several clusters are named {name}: give the path of one, {', '.join(str(d.path) for d in chosen)}")
    if not chosen:
        others = sorted(path.parent.name for root in roots for path in root.glob("*/cluster.json") if "~" not in path.parent.name)
        there_are = printable(", ".join(others) or "none")
        raise NoCluster(f"there is no cluster named {str(name)!r} in {', '.join(map(str, roots))}; there are: {there_are}")
    return chosen[0]


async def discover() -> AsyncIterator[tuple[str, type[Any]]]:
    """Yield name and class of each cluster, for dask-ctl (entry point ``dask_cluster_discovery``)."""
    from hpcgpu.unattended import cluster_class

    for found in find(cluster_directories()):
        yield found.directory.path.name, cluster_class(found.directory.system)


def live_jobs(directory: ClusterDirectory, batch: BatchSystem) -> list[JobStatus]:
    """Return the jobs of a cluster that have not ended, by its journal. A job whose id now belongs to another name is not its own.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    """
    names = submitted(directory, batch)
    statuses = batch.poll(list(names))
    known = [(submit, statuses[job_id]) for job_id, submit in names.items() if job_id in statuses]
    return [status for submit, status in known if not status.state.ended and status.name == submit.name]


def submitted(directory: ClusterDirectory, batch: BatchSystem) -> dict[str, Submit]:
    """Return by id the jobs of a cluster that are not known to have ended. Of which no id is known, the queue is asked by name.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    """
    jobs: dict[str, Submit] = {}
    for submit in directory.submits():
        if submit.refused or submit.ended:
            continue
        ids = [submit.job_id] if submit.job_id is not None else batch.find(submit.name)
        jobs |= dict.fromkeys(ids, submit)
    return jobs


def stop(
    directory: ClusterDirectory, batch: BatchSystem, *, timeout: float = 30.0, sleep: Callable[[float], None] = time.sleep
) -> list[JobStatus]:
    """Cancel every job of a cluster, and no other; return those that are left after the timeout.

    Its client, if it lives, sees its scheduler go and gives up; jobs that it asks for meanwhile are cancelled too.

    Raises
    ------
    BatchUnavailable
        The queue does not answer: nothing is known of the jobs.
    """
    deadline = time.monotonic() + timeout
    directory.remove_secrets()
    empty = 0
    while True:
        jobs = live_jobs(directory, batch)
        empty = 0 if jobs else empty + 1
        if empty >= _EMPTY and not _submitting(directory, now=time.time()):
            directory.close()
            return []
        if time.monotonic() > deadline:
            left = [job for job in jobs if job.state is not JobState.COMPLETING]  # an epilog may take minutes; nothing else can come of it
            if jobs and not left and not _submitting(directory, now=time.time()):
                directory.close()
            return left
        if jobs:
            batch.cancel([job.job_id for job in jobs])
        sleep(1.0)


def _submitting(directory: ClusterDirectory, *, now: float) -> bool:
    """Whether a submit may still be under way that a killed client began: its command has a session of its own, and lives on."""
    return any(s.job_id is None and not s.refused and not s.ended and now - s.time < _SUBMIT for s in directory.submits())
