"""Requests of other programs to the manager of a cluster. They go through the scheduler, which both can reach.

A page in Jupyter and a widget use them to change the size of a cluster while the program that manages it computes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from hpcgpu.dask_scheduler.rpc_types import ScalingRequest

#: Seconds after which a manager renews its query for a request.
REQUEST_WAIT = 20.0
#: Seconds that a manager has to answer a request.
_ANSWER = 30.0
#: Most requests that wait. Only a faulty program sends more.
_WAITING = 100


class Requests:
    """Requests that wait for the manager, and those that it has received and not answered."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: asyncio.Queue[ScalingRequest] = asyncio.Queue(_WAITING)
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._reader = 0
        #: Seconds since its last query, of those in which one could be received.
        self._silence = 0.0

    def accepted_by(self, manager: int) -> bool:
        """Whether this manager accepts requests: it waits for one now, or will do so in a moment."""
        return manager == self._reader and self._silence < 2 * REQUEST_WAIT

    def step(self, seconds: float) -> None:
        """Count so many seconds without a query; see `ManagerLease`."""
        self._silence += seconds

    async def request(self, command: Mapping[str, Any]) -> str:
        """Pass a request to the manager; return what is wrong with the request, empty if nothing is.

        Raises
        ------
        TimeoutError
            The manager did not answer. It may still do what was requested.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._waiting.put_nowait(ScalingRequest(number=number, command=dict(command)))
            return await asyncio.wait_for(answer, _ANSWER)
        except asyncio.QueueFull:
            return f"{_WAITING} earlier requests wait for the manager already"
        finally:
            del self._answers[number]

    async def next_request(self, manager: int) -> ScalingRequest | None:
        """Wait for a request; None if none came within `REQUEST_WAIT`."""
        self._reader, self._silence = manager, 0.0
        try:
            async with asyncio.timeout(REQUEST_WAIT):
                while True:
                    request = await self._waiting.get()
                    if manager != self._reader:  # another manager has taken over: the request is for that one
                        self._waiting.put_nowait(request)
                        return None
                    if request["number"] in self._answers:  # the program that sent it still waits
                        return request
        except TimeoutError:
            return None

    async def answer_request(self, number: int, error: str) -> None:
        """Pass on the answer of the manager."""
        if (answer := self._answers.get(number)) is not None and not answer.done():
            answer.set_result(error)
