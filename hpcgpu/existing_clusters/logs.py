"""Reads the logs of a cluster's jobs from any program, as far as they are written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpcgpu.dask_scheduler.keep_manager_running import LOG
from hpcgpu.errors import BatchError, ClusterError
from hpcgpu.existing_clusters.lookup import batch_of
from hpcgpu.existing_clusters.query_jobs import live_and_unknown
from hpcgpu.polling.poll_interval import Cadence
from hpcgpu.polling.queue_monitor import presumed_ended
from hpcgpu.posix import checked_files
from hpcgpu.posix.printable import printable
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory

#: Bytes of the end of a log that a page shows.
_PAGE = 64 * 1024


class Reader:
    """Reads the new part of the logs, call by call.

    Parameters
    ----------
    directory : ClusterDirectory
    job : str, optional
        Id or name of one job. Default: all, and the manager in the scheduler job if there is one.
    tail : int, optional
        Bytes at the end of each log with which the reader begins. Default: the whole log.

    Raises
    ------
    ClusterError
        The cluster has no such job.
    """

    def __init__(self, directory: ClusterDirectory, job: str | None = None, *, tail: int | None = None) -> None:
        self.directory = directory
        self.tail = tail
        self.job = job
        self.batch = batch_of(directory)
        self.logs = saved_options.logs(directory)
        self._read: dict[Path, int] = {}
        self._last: Path | None = None
        self._unreadable = set[Path]()
        self._cadence, self._ended = Cadence(), False
        self._missing_since: float | None = None
        self._answers = 0
        if job is not None and not any(job in (submit.job_id, submit.name) for submit in directory.submits()):
            jobs = ", ".join(f"{submit.name} ({submit.job_id})" for submit in directory.submits() if submit.job_id)
            raise ClusterError(f"cluster {directory.path.name} has no job {job!r}; it has {jobs or 'none'}")

    def new_output(self) -> Iterator[tuple[str, str]]:
        """Yield the new output since the last call: the text, with a heading for each change of the log."""
        for what, path in self._files():
            try:
                with checked_files.opened(path) as file:
                    size = file.seek(0, os.SEEK_END)
                    self._read[path] = file.seek(self._begin(path, size))
                    while self._read[path] < size and (new := file.read(checked_files.LIMIT)):
                        self._read[path] += len(new)
                        heading = "" if path == self._last else f"==> {what}: {path} <=="
                        self._last = path
                        yield heading, new.decode(errors="replace")
            except FileNotFoundError:
                continue  # nothing was written yet
            except OSError as error:
                if path not in self._unreadable:
                    self._unreadable.add(path)
                    yield "", f"({path} cannot be read: {error.strerror})\n"

    def _begin(self, path: Path, size: int) -> int:
        return self._read.get(path, 0 if self.tail is None else max(0, size - self.tail))

    def _files(self) -> Iterator[tuple[str, Path]]:
        for submit in self.directory.submits():
            if submit.job_id is not None and self.job in (None, submit.job_id, submit.name):
                yield (
                    f"{submit.kind} job {submit.job_id} ({submit.name})",
                    self.logs / self.batch.log_name(submit.name, submit.job_id),
                )
        if self.job is None:
            yield "manager in the scheduler job", self.directory.logs / LOG

    def ended(self) -> bool:
        """Whether no more output will come. If the queue does not answer, this is not known."""
        if self.directory.closed:
            return True
        now = time.monotonic()
        if not self._cadence.due(now=now):
            return self._ended
        try:
            live, unknown = live_and_unknown(self.directory, self.batch)
        except BatchError:
            self._cadence.failed(now=now)
            return self._ended
        ours = [job.job_id for job in live if self.job in (None, job.job_id, job.name)]
        self._cadence.answered(dict.fromkeys([*ours, *unknown], True), now=now, waiting=True)
        if ours:
            self._missing_since, self._answers = None, 0
        else:
            self._missing_since = now if self._missing_since is None else self._missing_since
            self._answers += 1
            known_to_have_ended = not unknown
            missing = now - self._missing_since
            self._ended = known_to_have_ended or presumed_ended(missing=missing, answers=self._answers)
        return self._ended


def end_of(directory: ClusterDirectory, job: str) -> str:
    """Return the end of a job's log for a page, with the log's path before it; empty if nothing was written yet.

    Raises
    ------
    ClusterError
        The cluster has no such job.
    """
    parts = [part for output in Reader(directory, job, tail=_PAGE).new_output() for part in output]
    return printable("\n".join(part.rstrip("\n") for part in parts if part), None, lines=True)
