"""How Dask's program waits for the signals that end it: by a function to which hpcgpu adds what it needs."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any

Wait = Callable[[], Awaitable[int]]

#: The release of dask-cuda from which on it waits by Dask's function.
_DASK_CUDA = (26, 8)
#: Each waits by the one before it; the first one is Dask's own, and Dask's program waits by the last one.
_waits: list[Wait] = []


def replace() -> None:
    """Let Dask's program wait by what `add` adds. Call this before that program is imported: it copies the name."""
    signals: Any = importlib.import_module("distributed._signals")
    _waits.append(signals.wait_for_signals)

    async def wait() -> int:
        return await _waits[-1]()

    signals.wait_for_signals = wait


def add(around: Callable[[Wait], Wait]) -> None:
    """Let Dask's program wait by what this function makes of the present way to wait."""
    _waits.append(around(_waits[-1]))


def obeyed(*, gpus: bool) -> bool:
    """Whether the program of workers with or without GPUs waits in this way."""
    if not gpus:
        return True
    version: str = importlib.import_module("dask_cuda").__version__
    return tuple(int(part) for part in version.split(".")[:2]) >= _DASK_CUDA
