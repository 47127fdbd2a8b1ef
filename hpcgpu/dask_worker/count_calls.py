"""Counts the calls that run on a worker and are no tasks, and reports their number with the worker's heartbeats.

The scheduler's side is `hpcgpu.dask_scheduler.running_calls`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.worker import Worker


#: The name of the number of calls among a worker's metrics.
METRIC = "hpcgpu-calls"
#: Operations of a worker that run the user's code.
OPERATIONS = ("run", "actor_execute")


def count(worker: Worker) -> None:
    """Let a worker count the calls that it runs, and report their number with its heartbeats."""
    begun: set[object] = set()
    for operation in OPERATIONS:
        worker.handlers[operation] = _counted(worker.handlers[operation], begun)
    worker.metrics[METRIC] = lambda worker: len(begun)


def _counted(handler: Callable[..., Any], begun: set[object]) -> Callable[..., Awaitable[Any]]:
    """Return a handler of a worker that keeps each of its calls in `begun` while the call runs."""

    @functools.wraps(handler)  # distributed reads the names of the handler's arguments
    async def counted(*arguments: Any, **options: Any) -> Any:
        call = object()
        begun.add(call)
        before = asyncio.all_tasks() if options.get("wait") is False else set()
        try:
            answer = handler(*arguments, **options)
            return await answer if inspect.isawaitable(answer) else answer
        finally:
            begun.discard(call)
            if options.get("wait") is False:  # the handler did not wait, so each new task belongs to this call
                for task in asyncio.all_tasks() - before:
                    begun.add(task)
                    task.add_done_callback(begun.discard)

    return counted
