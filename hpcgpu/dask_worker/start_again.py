"""A worker that loses its connection to a scheduler that still listens starts again, in the same job.

distributed cannot connect a worker again ("Worker reconnection is not supported", distributed/worker.py): it ends the
worker and its nanny, and with the last nanny the job, whose successor would wait in the queue. Here the nanny stays,
and starts the worker anew. Until the network works again, the new worker tries to connect, for `death_timeout` at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.scheduler_connection import refuses
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.hpcgpu")

#: Why distributed ends a worker: the stream from the scheduler has ended, or the scheduler has removed the worker.
_BROKEN, _REMOVED = "worker-handle-scheduler-connection-broken", "worker-heartbeat-missing"
_RUNS = {Status.running, Status.paused, Status.closing_gracefully}
#: Seconds in which the stream brings the request to end, if the scheduler removed the worker on purpose.
_REQUEST = 5.0


def start_again(worker: Worker, directory: ClusterDirectory) -> None:
    """Let the nanny of a worker start it again if its connection breaks, unless the scheduler has ended."""
    close = worker.close

    async def close_worker(*, nanny: bool = True, reason: str = "worker-close", **options: Any) -> str | None:
        lost = reason == _BROKEN or (reason == _REMOVED and not await _requested_to_end(worker))
        if lost and nanny and worker.nanny and await in_thread(_goes_on, directory):
            logger.warning("hpcgpu: worker %s has lost the scheduler, and starts again in this job", worker.name)
            nanny, options = False, {**options, "executor_wait": False}  # the scheduler runs its tasks elsewhere
        closed: str | None = await close(nanny=nanny, reason=reason, **options)
        return closed

    worker.close = close_worker


async def _requested_to_end(worker: Worker) -> bool:
    """Whether the scheduler requests a worker to end that it has removed: the request may come after a heartbeat."""
    until = time.monotonic() + _REQUEST
    while worker.status in _RUNS and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return worker.status not in _RUNS


def _goes_on(directory: ClusterDirectory) -> bool:
    """Whether the cluster goes on, as far as this node can see."""
    contact = directory.contact()
    return contact is not None and not directory.closing and not refuses(contact)
