"""Snapshots of clusters for all pages that show them: many pages cost the queue and the scheduler no more than one."""

from __future__ import annotations

import asyncio
import time

from hpcgpu.posix.threads import in_thread
from hpcgpu.remote.snapshot import Observer, SnapshotJSON
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["Snapshots"]

#: Seconds for which a snapshot is shown again. The queue is polled less often, see `hpcgpu.remote.snapshot.Observer`.
_FRESH = 2.0


class _Observed:
    def __init__(self, directory: ClusterDirectory) -> None:
        self.observer = Observer(directory)
        self.taken = float("-inf")
        self.task: asyncio.Task[SnapshotJSON] | None = None
        self.changed = False
        self._one_at_a_time = asyncio.Lock()

    async def take(self) -> SnapshotJSON:
        async with self._one_at_a_time:
            if self.changed:
                self.changed = False
                self.observer.soon()
            answer = await in_thread(lambda: self.observer.snapshot().as_json())
            self.taken = time.monotonic()
        return answer


class Snapshots:
    """The snapshots of all clusters, each taken when somebody wants it, and for all who want it."""

    def __init__(self) -> None:
        self._observed: dict[tuple[str, float], _Observed] = {}

    async def get(self, directory: ClusterDirectory) -> SnapshotJSON:
        """Return a snapshot that is at most some seconds old.

        Raises
        ------
        HpcgpuError
            The cluster cannot be read.
        """
        one = await self._of(directory)
        if one.task is None or (one.task.done() and time.monotonic() - one.taken > _FRESH):
            one.task = asyncio.ensure_future(one.take())
        return await asyncio.shield(one.task)

    def changed(self, directory: ClusterDirectory) -> None:
        """Let the next snapshot be a new one: a request has just changed something."""
        for one in [one for (path, _), one in self._observed.items() if path == str(directory.path)]:
            one.changed, one.task = True, None  # a snapshot that is under way began before the change

    async def _of(self, directory: ClusterDirectory) -> _Observed:
        key = (str(directory.path), await in_thread(lambda: directory.created))  # a later cluster may have its name
        if key not in self._observed:
            self._observed = {k: one for k, one in self._observed.items() if k[0] != key[0]}
            self._observed[key] = _Observed(directory)
        return self._observed[key]
