"""Whether a worker accepts tasks. The scheduler decides, with `order`; the worker follows, with `obey`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.core import Status

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState
    from distributed.worker import Worker


_OPERATION = "hpcgpu-accepts-tasks"


def order(scheduler: Scheduler, ws: WorkerState, *, accepts: bool) -> None:
    """Order a worker to accept tasks, or no new ones, without waiting: a call may block the worker for long."""
    scheduler.worker_send(ws.address, {"op": _OPERATION, "accepts": accepts})


def obey(worker: Worker) -> None:
    """Let a worker follow `order`. The worker reports its new status to the scheduler."""

    def accept(accepts: bool) -> None:
        if worker.status in (Status.running, Status.paused, Status.closing_gracefully):  # else it is ending
            worker.status = Status.running if accepts else Status.closing_gracefully

    worker.stream_handlers[_OPERATION] = accept
