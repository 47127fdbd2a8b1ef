"""The logs of a cluster's jobs, read from any program, as far as they are written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hpcgpu.errors import BatchError, ClusterError
from hpcgpu.remote.lookup import batch_of, live_jobs
from hpcgpu.runtime.manager_process import LOG
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["Reader"]

#: Seconds between two questions to the queue.
_POLL_INTERVAL = 10.0


class Reader:
    """Reads on, call by call.

    Parameters
    ----------
    directory : ClusterDirectory
    job : str, optional
        Id or name of one job. Default: all, and the manager in the scheduler job if there is one.

    Raises
    ------
    ClusterError
        The cluster has no such job.
    """

    def __init__(self, directory: ClusterDirectory, job: str | None = None) -> None:
        self.directory = directory
        self.job = job
        self.batch = batch_of(directory)
        self.logs = saved.logs(directory)
        self._read: dict[Path, int] = {}
        self._last: Path | None = None
        self._asked, self._ended = -_POLL_INTERVAL, False
        if job is not None and not any(job in (submit.job_id, submit.name) for submit in directory.submits()):
            jobs = ", ".join(f"{submit.name} ({submit.job_id})" for submit in directory.submits() if submit.job_id)
            raise ClusterError(f"cluster {directory.path.name} has no job {job!r}; it has {jobs or 'none'}")

    def new_output(self) -> Iterator[tuple[str, str]]:
        """Yield what was written since the last call: a heading where the log changes, and the text."""
        for what, path in self._files():
            try:
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
            except OSError:
                continue  # nothing was written yet
            if new:
                self._read[path] = self._read.get(path, 0) + len(new)
                heading = "" if path == self._last else f"==> {what}: {path} <=="
                self._last = path
                yield heading, new.decode(errors="replace")

    def _files(self) -> Iterator[tuple[str, Path]]:
        for submit in self.directory.submits():
            if submit.job_id is not None and self.job in (None, submit.job_id, submit.name):
                yield f"{submit.kind} job {submit.job_id} ({submit.name})", self.logs / self.batch.log_name(submit.name, submit.job_id)
        if self.job is None:
            yield "manager in the scheduler job", self.directory.logs / LOG

    def ended(self) -> bool:
        """Whether nothing more will be written. A queue that does not answer says nothing of that."""
        if self.directory.closed:
            return True
        if time.monotonic() - self._asked >= _POLL_INTERVAL:
            self._asked = time.monotonic()
            with contextlib.suppress(BatchError):
                jobs = live_jobs(self.directory, self.batch)
                self._ended = not any(self.job in (None, job.job_id, job.name) for job in jobs)
        return self._ended
