"""The clusters of this user, as their directories tell: which there are, what of them lives, how to end one whose client is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.batch.base import BatchError, BatchSystem, JobStatus
from hpcgpu.directory import ClusterDirectory

__all__ = ["Found", "find", "live_jobs", "stop"]


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
    directories = [ClusterDirectory(path.parent) for root in roots for path in sorted(root.glob("*/cluster.json"))]
    chosen = [d for d in directories if (d.path.name in wanted if wanted else not d.closed and "~" not in d.path.name)]
    found = []
    for directory in sorted(chosen, key=lambda directory: directory.created):
        try:
            found.append(Found(directory, live_jobs(directory, batch_system(directory.system))))
        except BatchError as error:
            found.append(Found(directory, [], str(error)))
    return found


def live_jobs(directory: ClusterDirectory, batch: BatchSystem) -> list[JobStatus]:
    """Return the jobs of a cluster that have not ended, by its journal. A job whose id now belongs to another name is not its own.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    """
    names = {submit.job_id: submit.name for submit in directory.submits() if submit.job_id is not None}
    for submit in directory.submits():
        if submit.job_id is None and not submit.refused:
            names |= dict.fromkeys(batch.find(submit.name), submit.name)
    statuses = batch.poll(list(names))
    return [status for job_id, status in statuses.items() if not status.state.ended and status.name == names[job_id]]


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
    while True:
        jobs = live_jobs(directory, batch)
        if not jobs:
            directory.close()
            return []
        if time.monotonic() > deadline:
            return jobs
        batch.cancel([job.job_id for job in jobs])
        sleep(1.0)
