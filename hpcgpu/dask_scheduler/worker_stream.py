"""Reports to each manager which workers come and go, as long as the connection of the manager lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.batched import BatchedSend
from distributed.comm import Comm, CommClosedError

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState


def describe(ws: WorkerState) -> dict[str, Any]:
    """Return what a manager needs of a worker, without the values that change with each heartbeat."""
    facts: dict[str, Any] = ws.identity()
    del facts["metrics"], facts["last_seen"]
    facts["resources"] = dict(facts["resources"])  # distributed changes its dictionary in place
    return facts


class WorkerStream:
    """The connections of the managers that listen."""

    def __init__(self) -> None:
        self._listening: set[BatchedSend] = set()

    def listen(self, scheduler: Scheduler, comm: Comm) -> dict[str, Any]:
        """Report over this connection from now on; return the scheduler and its present workers."""
        sender = BatchedSend(interval="5ms")
        sender.start(comm)
        self._listening.add(sender)
        workers = {address: describe(ws) for address, ws in scheduler.workers.items()}
        return {**scheduler.identity(n_workers=0), "workers": workers}

    def report(self, event: str, content: Any) -> None:
        """Report that a worker has joined, ``add``, or left, ``remove``."""
        for sender in list(self._listening):
            try:
                sender.send([event, content])
            except CommClosedError:
                self._listening.discard(sender)
