"""Which lost workers count as failures of their tasks: those that crashed, and not those whose job only ended.

A task that loses too many workers fails with `KilledWorker`. distributed counts each lost worker at once. Here a lost
worker counts when it comes back, because its nanny restarted it after a crash, or when its job has failed. It does not
count if the worker reports that it only lost its connection.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from dask import config
from distributed.scheduler import KilledWorker, Scheduler, TaskState, WorkerState

from hpcgpu.dask_scheduler import lost_results
from hpcgpu.dask_scheduler.time_limits import Silence
from hpcgpu.runtime.complete_dask_commands import ALLOWED_FAILURES

logger = logging.getLogger("distributed.hpcgpu")

#: Seconds for which the loss of a worker may still count against its tasks.
CHARGEABLE = 600.0
#: Seconds without a heartbeat after which a worker whose job has ended is removed.
#: The queue may report it while the job's processes still run.
_SILENT_WORKER = 30.0


class LostWorkers:
    """The workers that the scheduler lost, until it is known whether they count against their tasks.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        It allows any number of failures: distributed would count each loss at once, and four preempted jobs would fail
        a task.
    silence : Silence
        Of its workers.
    """

    def __init__(self, scheduler: Scheduler, silence: Silence) -> None:
        self.scheduler, self._silence = scheduler, silence
        self._lost: dict[str, tuple[float, WorkerState, set[Any]]] = {}
        #: For each task, how many lost workers count against it.
        self._suspicious = Counter[Any]()
        allowed = os.environ.get(ALLOWED_FAILURES) or config.get("distributed.scheduler.allowed-failures")
        self._allowed_failures = int(allowed)
        self._ended: dict[str, float] = {}
        self._crashed: set[str] = set()

    def record(self, ws: WorkerState, tasks: Collection[Any]) -> None:
        """Record the tasks of a lost worker, whose job may have ended or not: that is known later."""
        if tasks:
            now = time.monotonic()
            self._lost = {name: loss for name, loss in self._lost.items() if now - loss[0] < CHARGEABLE}
            self._lost[str(ws.name)] = (now, ws.clean(), set(tasks))

    def forget(self, name: str) -> None:
        """Forget the loss of a worker that has not crashed."""
        self._lost.pop(name, None)

    def forget_task(self, key: Any) -> None:
        """Forget a task that the scheduler has forgotten."""
        self._suspicious.pop(key, None)

    async def ended(self, names: Iterable[str], crashed: Iterable[str]) -> None:
        """Record the workers whose job has ended; count the loss of a worker if its job failed."""
        now = time.time()
        self._ended = {name: at for name, at in self._ended.items() if now - at < CHARGEABLE}
        self._ended |= dict.fromkeys(names, now)
        self._crashed = {name for name in self._crashed if name in self._ended} | set(crashed)
        for name in crashed:
            self.count(name)

    async def remove_silent(self) -> None:
        """Remove workers whose job has ended and that send no heartbeats.

        The connection to a node that hangs does not break: its worker would keep its tasks until
        ``distributed.scheduler.worker-ttl``, which is 5 minutes.
        """
        now = time.time()
        for ws in list(self.scheduler.workers.values()):
            name = str(ws.name)
            if name in self._ended and self._silence.seconds(ws) > _SILENT_WORKER:
                logger.warning("hpcgpu: no heartbeat from worker %s, and its job has ended: it is removed", ws.address)
                await self.scheduler.remove_worker(ws.address, stimulus_id=f"hpcgpu-ended-{now}")
                if name in self._crashed:
                    self.count(name)

    def count(self, name: str) -> None:
        """Count the loss of a worker against the tasks that it ran, as `Scheduler.remove_worker` would have done."""
        if name not in self._lost:
            return
        _, worker, keys = self._lost.pop(name)
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state not in ("waiting", "processing", "queued", "no-worker"):
                continue
            self._suspicious[key] += 1
            if self._suspicious[key] > self._allowed_failures:
                self._fail(ts, worker)

    def _fail(self, ts: TaskState, worker: WorkerState) -> None:
        error = KilledWorker(task=ts.key, last_worker=worker, allowed_failures=self._allowed_failures)
        count = self._suspicious[ts.key]
        logger.error("Task %s marked as failed because %d workers died while trying to run it", ts.key, count)
        lost_results.fail(self.scheduler, ts, error)
