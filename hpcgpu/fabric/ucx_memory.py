"""Keeps the memory that UCX writes to, or calls, until UCX has done so.

UCX gets the address of a buffer, and a thread of its own writes there. If the coroutine that waits for the message is
cancelled, Python frees the buffer, and UCX writes into memory that has become something else: the process dies, or goes
on with wrong data. ucxx 0.52 does this where two sides of a new connection exchange their tags: after five seconds it
gives up, which a busy node needs now and then. So nothing that receives is cancelled here: at a time limit the
connection is closed, which ends what UCX does with the buffer.

A listener that is stopped listens on while a connection lives that it accepted. ucxx 0.52 frees what UCX calls for a
new connection (libucxx.pyx, `_listener_callback`). A member that connects to a scheduler that ends lets it crash so.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hpcgpu.fabric import ucx_endpoints

_T = TypeVar("_T")

#: Nanoseconds that ucxx waits for UCX's thread when it closes a connection, as its own `Endpoint.abort` does.
_CLOSE = 10**10

#: What still runs after its time limit, until UCX has ended it. The event loop alone would not keep a task.
_ENDING: set[asyncio.Task[Any]] = set()

#: The listeners of this process that were stopped, with all that they had before.
_STOPPED: list[Any] = []


class KeepsListening:
    """A listener of distributed-ucxx that may stop while UCX listens on: to be mixed in.

    Attributes
    ----------
    stopped : bool
        Connections that come now are to be refused.
    """

    stopped = False
    _port = 0

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        self._port = super().port  # type: ignore[misc]

    def stop(self) -> None:
        _STOPPED.append(copy.copy(self))
        self.stopped = True
        super().stop()  # type: ignore[misc]

    @property
    def port(self) -> int:
        """The port; also after the end, when distributed-ucxx asks for it once more for each late connection."""
        return self._port


async def within(limit: float, coroutine: Coroutine[Any, Any, _T], close: Callable[[], object]) -> _T:
    """Wait for a coroutine that receives by UCX.

    Parameters
    ----------
    limit : float
        Seconds.
    coroutine : coroutine
    close : callable
        Closes the connection; called if the limit passes, or if who waits is cancelled.

    Raises
    ------
    TimeoutError
        The limit has passed.
    """
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.wait_for(asyncio.shield(task), limit)
    finally:
        if not task.done():
            _ENDING.add(task)
            task.add_done_callback(_ended)
            close()


def _ended(task: asyncio.Task[Any]) -> None:
    _ENDING.discard(task)
    if not task.cancelled():
        task.exception()  # else asyncio logs that nobody has asked for it


def why_refused(error: Exception) -> str:
    """Return why a connection that came was refused, for the log."""
    return str(error) or ("the peer sent nothing" if isinstance(error, TimeoutError) else type(error).__name__)


def exchange_tags_safely(limit: float) -> None:
    """Let ucxx exchange the tags of new connections without freeing a buffer too early.

    A peer that does not exchange them is logged as one that does not authenticate itself. ucxx would log a traceback
    for each, and a port scan could fill the disk; it logs nothing if its coroutine is cancelled.

    Parameters
    ----------
    limit : float
        Seconds for one connection.
    """
    from ucxx._lib_async import application_context, exchange_peer_info, listener

    from hpcgpu.fabric.unauthenticated_connections import Refusals

    refusals = Refusals()
    unlimited = functools.partial(exchange_peer_info.exchange_peer_info, connect_timeout=None)

    async def exchange(endpoint: Any, msg_tag: int, listener: bool, connect_timeout: float = 5) -> dict[str, int]:
        close = functools.partial(endpoint.close_blocking, _CLOSE, max_attempts=1)
        peer = ucx_endpoints.query(endpoint).peer or "an unknown address" if listener else ""
        try:
            return await within(limit, unlimited(endpoint, msg_tag, listener), close)
        except Exception as error:
            if not listener:
                raise
            refusals.log(peer, why_refused(error))
            raise asyncio.CancelledError from error

    application_context.exchange_peer_info = listener.exchange_peer_info = exchange
