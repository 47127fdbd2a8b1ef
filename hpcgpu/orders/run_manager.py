"""Runs a manager in a process that does nothing else."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hpcgpu.errors import ClusterWarning
from hpcgpu.manager.manager import Manager
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written

#: Seconds between two checks whether it still manages the cluster.
_CHECK = 1.0


def manage_alone(managing: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this in the event loop of a process whose output is the log of the manager."""
    drop_what_cannot_be_written()
    warnings.simplefilter("ignore", ClusterWarning)  # `run` prints those of the cluster; others were shown at its start
    asyncio.run(managing())


async def run(manager: Manager, end: asyncio.Event, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Manage a cluster, and print what the manager does, until `end` is set or there is nothing to manage any more.

    Parameters
    ----------
    manager : Manager
    end : asyncio.Event
    leave : callable
        Closes the manager.
    """
    printed = 0
    try:
        await manager.start()
        while not end.is_set() and manager.managing:
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _CHECK)
            printed = _print_new(manager, printed)
    finally:
        await leave()
        _print_new(manager, printed)


def _print_new(manager: Manager, printed: int) -> int:
    """Print what the manager did since the last call; return how much of its log is printed."""
    text = manager.messages.text()
    if len(text) > printed:
        print(text[printed:].strip(), flush=True)
    return len(text)
