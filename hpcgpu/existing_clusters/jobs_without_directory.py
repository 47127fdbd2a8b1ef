"""Jobs of clusters whose directory was removed: only the queue still lists them.

The queue keeps the path of each job's script, and so the cluster directory. Only this user's jobs count, and only
those whose script hpcgpu has written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from hpcgpu.batch import batch_system, system_registry
from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.errors import BatchError
from hpcgpu.existing_clusters.lookup import Found
from hpcgpu.existing_clusters.stop import cancel_until_gone
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.removed_directory import missing


def strays(known: Collection[Found], silent: Callable[[str], None] = lambda problem: None) -> list[Found]:
    """Return the clusters that have jobs and no directory.

    Parameters
    ----------
    known : collection of Found
        The clusters that have a directory; it may have been renamed since their jobs were submitted.
    silent : callable, optional
        Called with a sentence about each batch system that does not answer.
    """
    with_directory = {(one.system, job.job_id) for one in known for job in one.jobs}
    found = []
    for system in system_registry.systems():
        if not (shutil.which(system.command) if system.command else system.fallback):
            continue
        try:
            batch = batch_system(system.name)
            marked = batch.marked(lambda script: missing(script.parent))
            jobs = [job for job in batch.poll(list(marked)).values() if not job.state.ended] if marked else []
        except BatchError as error:
            if not system.fallback:  # a queue of this machine, which another machine may have used
                silent(f"it is not known whether jobs run whose cluster directory was removed: {error}")
            continue
        directories = dict[Path, list[JobStatus]]()
        for job in jobs:
            if (system.name, job.job_id) not in with_directory:
                directories.setdefault(marked[job.job_id].parent, []).append(job)
        found += [_found(system.name, path, there) for path, there in directories.items()]
    return found


def _found(system: str, path: Path, jobs: list[JobStatus]) -> Found:
    began = [job.start for job in jobs if job.start is not None]
    return Found(
        directory=ClusterDirectory(path),
        system=system,
        created=min(began, default=time.time()),
        jobs=jobs,
        problem=f"its directory is gone, so no program can use it. To end its jobs, run: hpcgpu stop {path.name}",
        known=True,
    )


def end(
    cluster: Found, batch: BatchSystem, *, timeout: float = 30.0, sleep: Callable[[float], None] = time.sleep
) -> list[JobStatus]:
    """Cancel the jobs of a cluster that has no directory; return those that are left after the timeout.

    Raises
    ------
    BatchUnavailable
        The queue does not answer.
    """
    names = {job.job_id: job.name for job in cluster.jobs}

    def jobs() -> list[JobStatus]:
        there = batch.poll(list(names)).values()
        return [job for job in there if not job.state.ended and job.name == names[job.job_id]]

    return cancel_until_gone(jobs, batch, timeout=timeout, sleep=sleep)
