"""Blocking calls beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


def in_event_loop() -> bool:
    """Whether an event loop runs in this thread."""
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop() is not None
    return False


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Run a blocking function in a daemon thread of its own.

    An executor is not suitable: its threads are joined before atexit callbacks run, and a hanging queue command would
    keep the interpreter from cancelling the other jobs. At interpreter exit no thread can be started; the function then
    runs in the calling thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=work, name=f"hpcgpu-{getattr(function, '__name__', 'call')}", daemon=True).start()
    except RuntimeError:
        return function(*arguments)
    return await future


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end; in another thread if an event loop already runs, as in a notebook's cell."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
