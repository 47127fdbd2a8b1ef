"""A worker that loses its connection to a scheduler that lives starts again, in the same job.

distributed cannot connect a worker again ("Worker reconnection is not supported", distributed/worker.py): it ends the
worker and its nanny, and with the last nanny the job, whose successor would wait in the queue. Here the worker waits
until the scheduler answers, for `death_timeout` at most. Then it ends alone, and its nanny starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.nanny import Nanny

from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.next_scheduler import RESTARTS
from hpcgpu.runtime.scheduler_connection import ConnectionResult, identify
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.hpcgpu")

#: Why distributed ends a worker: the stream from the scheduler has ended, or the scheduler has removed the worker.
_BROKEN, _REMOVED = "worker-handle-scheduler-connection-broken", "worker-heartbeat-missing"
#: Why it ends a worker whose scheduler closes.
_ENDED = "scheduler-close"
_RUNS = {Status.running, Status.paused, Status.closing_gracefully}
#: Seconds in which the stream brings the request to end, if the scheduler removed the worker on purpose.
_REQUEST = 5.0
#: Seconds between two attempts to reach the scheduler, and for its answer to a call.
_INTERVAL, _ANSWER = 2.0, 10.0
#: Seconds in which a process ends after SIGKILL; the scheduler that requests a restart waits for its own time.
_KILLED = 300.0


def start_again(worker: Worker, directory: ClusterDirectory) -> None:
    """Let the nanny of a worker start it again if its connection breaks, unless the scheduler has ended."""
    close, restarts = worker.close, bool(os.environ.get(RESTARTS))

    async def close_worker(*, nanny: bool = True, reason: str = "worker-close", **options: Any) -> str | None:
        lost = reason == _BROKEN or (reason == _REMOVED and not await _requested_to_end(worker))
        if lost and nanny and worker.nanny and await _reachable(worker, directory):
            logger.warning("hpcgpu: worker %s has lost the scheduler, and starts again in this job", worker.name)
            nanny, options = False, {**options, "executor_wait": False}  # the scheduler runs its tasks elsewhere
        if restarts and (lost or reason == _ENDED):
            options = {**options, "executor_wait": False}  # nobody waits for its tasks any more
        closed: str | None = await close(nanny=nanny, reason=reason, **options)
        return closed

    worker.close = close_worker


async def _requested_to_end(worker: Worker) -> bool:
    """Whether the scheduler requests a worker to end that it has removed: the request may come after a heartbeat."""
    until = time.monotonic() + _REQUEST
    while worker.status in _RUNS and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return worker.status not in _RUNS


async def _reachable(worker: Worker, directory: ClusterDirectory) -> bool:
    """Wait until the scheduler of a worker answers; false if it has ended, or if `death_timeout` is over.

    The answer is the proof: a process that ends may still accept connections for a moment.
    """
    until = time.monotonic() + (worker.death_timeout or 0.0)
    while worker.status in _RUNS and time.monotonic() < until:
        address = worker.scheduler.address if os.environ.get(RESTARTS) else ""
        answer = await in_thread(_check_scheduler, directory, address)
        if answer is ConnectionResult.REFUSED:
            return False
        if answer in (ConnectionResult.ACCEPTED, ConnectionResult.BUSY):
            with suppress(OSError, TimeoutError):
                call = worker.scheduler.hpcgpu_disconnected(address=worker.address, name=str(worker.name))
                await asyncio.wait_for(call, _ANSWER)
                return worker.status in _RUNS
        await asyncio.sleep(_INTERVAL)
    return False


def _check_scheduler(directory: ClusterDirectory, address: str) -> ConnectionResult:
    """Return whether the scheduler of this address can be reached now; by default that of the contact.

    A filesystem that fails proves nothing.
    """
    try:
        contact = None if directory.closing else directory.certain_contact()
    except (OSError, ValueError):
        return ConnectionResult.SILENT
    another = contact is None or (address and contact.workers != address)
    return ConnectionResult.REFUSED if contact is None or another else identify(contact, directory)


def replace_kill() -> None:
    """Let a nanny of this process end while its worker starts again, and wait for a worker that ends slowly.

    distributed expects that a process that starts has started before it is killed. A nanny whose worker did not connect
    within `death_timeout` fails then, and neither ends nor obeys SIGTERM (see dask/distributed#7323).

    It also expects that a process ends within a second after SIGKILL. One with much GPU memory, or on a busy node, may
    take longer. Then `Client.restart_workers` raises an error, although the worker starts again.
    """
    kill = Nanny.kill

    async def kill_worker(self: Any, *arguments: Any, **options: Any) -> None:
        started = self.process
        # only where the nanny ends: a later start of the process would wait for the message of this one
        if self.status is Status.closing and started is not None and started.status is Status.starting:
            process = started.process
            with suppress(TimeoutError, ValueError):  # ValueError: it has just ended
                await process.kill()
                await asyncio.wait_for(started.stopped.wait(), _ANSWER)
        try:
            await kill(self, *arguments, **options)
        except TimeoutError:
            if started is None or self.status is not Status.running:
                raise
            await asyncio.wait_for(started.stopped.wait(), _KILLED)

    Nanny.kill = kill_worker
