"""Saves the published datasets of a cluster from time to time.

It runs in a thread with a client of its own, because data of the user are unpickled: that may import libraries for
seconds. What most schedulers never need is imported then too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Iterable
from contextlib import suppress
from pathlib import Path

from distributed import Client, futures_of
from distributed.scheduler import Scheduler

from hpcgpu.batch import batch_system
from hpcgpu.errors import BatchError, HpcgpuError
from hpcgpu.options.shared_options_and_defaults import ClusterOptions
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.job_identity import job_identity
from hpcgpu.store import certificates_and_keys, saved_datasets, saved_options
from hpcgpu.store.directory import ClusterDirectory

logger = logging.getLogger("distributed.hpcgpu")

#: Of the workers, so many write at the same time: what the cluster computes needs the others, and the disk.
_SHARE = 4
#: How long before the end of the walltime the last save begins: so many times what the longest save took, and at least
#: this many seconds.
_TIMES, _LEAST = 3.0, 60.0


def due(now: float, last: float, every: float, end: float | None, longest: float) -> float:
    """Return when the next save begins, in epoch seconds.

    Parameters
    ----------
    now : float
        Epoch seconds.
    last : float
        When the last save began.
    every : float
        Seconds between two saves.
    end : float or None
        When the walltime of the scheduler job ends, if that is known.
    longest : float
        Seconds that the longest save took.
    """
    planned = max(now, last + every)
    if end is None:
        return planned
    before = end - max(_LEAST, _TIMES * longest)
    return min(planned, before) if last < before else planned


def client_of(scheduler: Scheduler, directory: ClusterDirectory) -> Client:
    """Return a client of the scheduler of this process, for another thread than the scheduler's."""
    address = scheduler.listeners[-1].contact_address  # that for clients
    return Client(address, security=certificates_and_keys.security(directory), set_as_default=False)


class PublishedDatasets:
    """The published datasets of one scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        It listens.
    directory : ClusterDirectory
    """

    def __init__(self, scheduler: Scheduler, directory: ClusterDirectory) -> None:
        self.directory = directory
        self._scheduler = scheduler
        self._task: asyncio.Task[None] | None = None
        #: The futures of each dataset when it was saved last.
        self._saved: dict[str, frozenset[Hashable]] = {}
        #: The futures and the problem of each dataset at the last save.
        self._problems: dict[str, tuple[frozenset[Hashable], str]] = {}

    def begin(self) -> None:
        """Save the datasets from time to time, if the user wants that."""
        self._task = asyncio.create_task(self._keep_saving())

    def stop(self) -> None:
        """Save no more."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_saving(self) -> None:
        try:
            options = (await in_thread(saved_options.read, self.directory)).options.cluster
        except (HpcgpuError, OSError) as error:
            logger.warning("hpcgpu: published datasets are not saved: %s", error)
            return
        if not options.checkpoint_every or options.checkpoint_directory is None:
            return
        last, longest, end = time.time(), 0.0, await in_thread(self._end)
        while True:
            while (pause := due(time.time(), last, options.checkpoint_every, end, longest) - time.time()) > 0:
                await asyncio.sleep(pause)
            last = time.time()
            try:
                await in_thread(self._save, options)
            except Exception as error:  # the next save may succeed
                logger.warning("hpcgpu: published datasets were not saved: %s: %s", type(error).__name__, error)
            longest, end = max(longest, time.time() - last), await in_thread(self._end)

    def _end(self) -> float | None:
        """Return the end of the walltime of this job as the queue reports it; None if it is not known."""
        if (own := job_identity()) is None:  # the scheduler runs in the user's program
            return None
        with suppress(BatchError, OSError):  # compute nodes may lack the queue's commands
            if status := batch_system(self.directory.system).poll([own["id"]]).get(own["id"]):
                return status.end
        return None

    def _save(self, options: ClusterOptions) -> None:
        from hpcgpu.checkpoints import versions

        assert options.checkpoint_directory is not None
        with client_of(self._scheduler, self.directory) as client:
            published = {name for name in client.list_datasets() if isinstance(name, str)}
            for dataset in saved_datasets.read(self.directory):  # an earlier scheduler may have saved them
                if dataset.name not in published:
                    self._saved.pop(dataset.name, None)
                    saved_datasets.forget(self.directory, dataset.name)
            self._problems = {name: why for name, why in self._problems.items() if name in published}
            for name in sorted(published):
                keys, problem = frozenset[Hashable](), ""
                try:
                    data = client.get_dataset(name, default=None)  # it may have been unpublished just now
                    keys = frozenset(future.key for future in futures_of(data))
                    self._save_one(client, name, data, versions.directory_of(options.checkpoint_directory, name))
                except Exception as error:
                    problem = str(error) or type(error).__name__
                if problem and (keys, problem) != self._problems.get(name):
                    logger.warning("hpcgpu: %s", text := f"published dataset {name} is not saved: {problem}")
                    client.log_event("warn", f"hpcgpu: {text}")  # distributed shows it in all clients
                self._problems[name] = keys, problem

    def _save_one(self, client: Client, name: str, data: object, directory: Path) -> None:
        """Save a dataset if it is computed and has changed."""
        from hpcgpu.checkpoints import versions
        from hpcgpu.checkpoints.save_and_restore import Destination, save

        futures = futures_of(data)
        keys = frozenset(future.key for future in futures)
        if not keys:
            return
        if self._saved.get(name) == keys and versions.numbered(directory):  # somebody may have removed it
            return
        if missing := [key for key, workers in client.who_has(futures).items() if not workers]:
            self._raise_if_lost(missing)
            return  # it is still computed: the next save may have it
        at_a_time = max(1, len(self._scheduler.workers) // _SHARE)
        to = Destination(directory=directory, quiet=True, at_a_time=at_a_time, cluster=self.directory)
        save(client, data, to)
        self._saved[name] = keys

    def _raise_if_lost(self, keys: Iterable[Hashable]) -> None:
        """Raise an error if one of these results has failed, or cannot be computed any more."""
        for key in keys:
            task = self._scheduler.tasks.get(key)
            if task is not None and task.state == "erred":
                failed = task.exception_blame or task  # the task that it needs
                raise RuntimeError(f"its result {key} has failed: {failed.exception_text}")
            if task is None or (task.state == "released" and task.run_spec is None):
                raise RuntimeError(f"its result {key} was cancelled or lost")
