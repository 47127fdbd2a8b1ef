"""Dask's limits of time, counted in steps and not by the clock: the silence of workers, and the time without work.

A process that is suspended receives nothing, and the clock goes on. When it continues, Dask would compare the clock
before it reads what came meanwhile: it would restart all workers, and lose their results
(``distributed.scheduler.worker-ttl``), or end a cluster that has just got work (``idle-timeout``). So Dask has no such
limits in a scheduler of hpcgpu (`hpcgpu.runtime.complete_dask_commands.take_limits`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dask import config
from dask.utils import parse_timedelta
from distributed.scheduler import heartbeat_interval

from hpcgpu.runtime.complete_dask_commands import IDLE_TIMEOUT, WORKER_TTL

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

logger = logging.getLogger("distributed.hpcgpu")


def _limit(variable: str, setting: str) -> float:
    """Return a limit in seconds: that of the variable, which a scheduler job has, or of Dask's configuration."""
    return float(parse_timedelta(os.environ.get(variable) or config.get(setting) or 0))


class Silence:
    """For how long each worker has sent no heartbeat, of the time in which one could be received.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Seconds after which a worker is restarted; 0 if the user has switched this off.
        self.limit = _limit(WORKER_TTL, "distributed.scheduler.worker-ttl")
        #: The time of the last heartbeat and the seconds without another one, by the address of the worker.
        self._counted: dict[str, tuple[float, float]] = {}

    def seconds(self, ws: WorkerState) -> float:
        """Return for how many seconds a worker has sent no heartbeat."""
        seen, seconds = self._counted.get(ws.address, (0.0, 0.0))
        return seconds if seen == ws.last_seen else 0.0

    def end(self, ws: WorkerState) -> None:
        """Count from now on: there is another sign that the worker lives."""
        self._counted[ws.address] = (ws.last_seen, 0.0)

    def step(self, seconds: float) -> None:
        """Count so many seconds for each worker."""
        workers = self._scheduler.workers.values()
        self._counted = {ws.address: (ws.last_seen, self.seconds(ws) + seconds) for ws in workers}

    async def restart(self) -> None:
        """Restart the workers that are silent for longer than the limit, as distributed does."""
        workers = self._scheduler.workers.values()
        limit = max(self.limit, 10 * heartbeat_interval(len(workers)))
        silent = [ws.address for ws in workers if self.seconds(ws) > limit] if self.limit else []
        if silent:
            logger.warning("hpcgpu: no heartbeat for %g s from %s: restarting", limit, ", ".join(silent))
            event = {"action": "worker-ttl-timed-out", "workers": [*silent], "ttl": limit}
            self._scheduler.log_event("scheduler", event)
            stimulus = f"hpcgpu-silent-{time.time()}"
            await self._scheduler.restart_workers(silent, wait_for_workers=False, stimulus_id=stimulus)


class IdleTime:
    """For how long a scheduler has had no work; it closes when that is the limit.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    works : callable
        Whether there is work that distributed does not count.
    """

    def __init__(self, scheduler: Scheduler, works: Callable[[], bool]) -> None:
        self._scheduler, self._works = scheduler, works
        #: Seconds after which the scheduler closes; 0 if it does not.
        self.limit = _limit(IDLE_TIMEOUT, "distributed.scheduler.idle-timeout")
        self._since: float | None = None
        self._seconds = 0.0

    async def step(self, seconds: float) -> None:
        """Count so many seconds, unless there is work, or was since the last step."""
        since = self._scheduler.check_idle()
        works = since is None or since != self._since or self._works()
        self._since, self._seconds = since, 0.0 if works else self._seconds + seconds
        if self.limit and self._seconds > self.limit:
            logger.info("hpcgpu: no work for %g s (idle_timeout): this scheduler ends", self.limit)
            await self._scheduler.close(reason="idle-timeout-exceeded")
