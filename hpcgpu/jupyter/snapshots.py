"""Snapshots of clusters, shared by all pages: many pages query the queue and the scheduler no more often than one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hpcgpu.existing_clusters.snapshot import Observer
from hpcgpu.posix.threads import in_thread
from hpcgpu.store.directory import ClusterDirectory

#: Seconds for which a snapshot is shown again. The queue is polled less often: see
#: `hpcgpu.existing_clusters.snapshot.Observer`.
_FRESH = 2.0


class _Observed:
    def __init__(self, directory: ClusterDirectory) -> None:
        self.observer = Observer(directory)
        self.taken_at = float("-inf")
        self.task: asyncio.Task[dict[str, Any]] | None = None
        self.changed = False
        self._one_at_a_time = asyncio.Lock()

    async def take(self) -> dict[str, Any]:
        async with self._one_at_a_time:
            if self.changed:
                self.changed = False
                self.observer.soon()
            answer = await in_thread(lambda: self.observer.snapshot().as_json())
            self.taken_at = time.monotonic()
        return answer


class Snapshots:
    """The snapshots of all clusters. Each is taken on request, for all pages that request it."""

    def __init__(self) -> None:
        self._observed: dict[tuple[str, float], _Observed] = {}

    async def get(self, directory: ClusterDirectory) -> dict[str, Any]:
        """Return a snapshot that is at most some seconds old.

        Raises
        ------
        HpcgpuError
            The cluster cannot be read.
        """
        one = await self._of(directory)
        if one.task is None or (one.task.done() and time.monotonic() - one.taken_at > _FRESH):
            one.task = asyncio.ensure_future(one.take())
        return await asyncio.shield(one.task)

    def changed(self, directory: ClusterDirectory) -> None:
        """Let the next snapshot be a new one, because a request has just changed the cluster."""
        for one in [one for (path, _), one in self._observed.items() if path == str(directory.path)]:
            one.changed, one.task = True, None  # a snapshot in progress began before the change

    async def _of(self, directory: ClusterDirectory) -> _Observed:
        key = (str(directory.path), await in_thread(lambda: directory.created))  # a later cluster may have its name
        if key not in self._observed:
            self._observed = {k: one for k, one in self._observed.items() if k[0] != key[0]}
            self._observed[key] = _Observed(directory)
        return self._observed[key]
