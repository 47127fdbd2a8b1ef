"""What the GPUs of a cluster do, as the scheduler knows it from the heartbeats of workers.

The workers' side is `hpcgpu.runtime.readings`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

from hpcgpu.fabric.report import NODE
from hpcgpu.runtime.readings import METRIC, Reading
from hpcgpu.runtime.recipients import GPUS
from hpcgpu.runtime.wire import GPUState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

__all__ = ["Usage", "computes", "period"]

_SILENT = Reading(utilization=None, memory_used=None, power=None)


def period(workers: int) -> float:
    """Return the seconds between two samples of so many workers: 200 workers a second, as distributed's heartbeats."""
    return max(1.0, workers / 200)


def computes(reading: Reading, tasks: int) -> bool:
    """Whether a GPU computes; where its driver does not say, whether its worker has tasks."""
    return reading["utilization"] > 0 if reading["utilization"] is not None else tasks > 0


class Usage:
    """The GPUs of the workers that are connected.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._idle_since: dict[WorkerState, float] = {}
        self._sampling = PeriodicCallback(self._sample_again, period(0) * 1000)

    def start(self) -> None:
        """Begin to sample; an event loop must run."""
        self._sampling.start()

    def stop(self) -> None:
        """Sample no more."""
        self._sampling.stop()

    async def gpus(self) -> list[GPUState]:
        """Return the GPUs of the connected workers; see `now`."""
        return self.now()

    def now(self) -> list[GPUState]:
        """Return the GPUs of the connected workers, as their last heartbeats reported them."""
        self.sample(time.time())
        return sorted(map(self._state, self._idle_since), key=lambda gpu: gpu["worker"])

    def sample(self, now: float) -> None:
        """Look at what all GPUs do."""
        known = self._idle_since
        workers = [ws for ws in self.scheduler.workers.values() if ws.extra.get(GPUS)]
        self._idle_since = {
            ws: 0.0 if computes(_reading(ws), len(ws.processing)) else known.get(ws, 0.0) or now for ws in workers
        }

    def _sample_again(self) -> None:
        self.sample(time.time())
        self._sampling.callback_time = period(len(self.scheduler.workers)) * 1000

    def _state(self, ws: WorkerState) -> GPUState:
        model, reading = ws.extra.get(METRIC) or {}, _reading(ws)
        return GPUState(
            worker=str(ws.name),
            node=str(ws.extra.get(NODE) or ws.host),
            model=str(model.get("model", "")),
            utilization=reading["utilization"],
            memory_used=reading["memory_used"],
            memory_total=model.get("memory_total"),
            power=reading["power"],
            idle_since=self._idle_since[ws] or None,
        )


def _reading(ws: Any) -> Reading:
    reading = ws.metrics.get(METRIC)
    return reading if isinstance(reading, dict) else _SILENT  # type: ignore[return-value]
