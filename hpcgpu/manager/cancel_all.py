"""Cancels all jobs of a cluster that is over, again until the queue has accepted it."""

from __future__ import annotations

import asyncio

from hpcgpu.display.counts_and_durations import listed
from hpcgpu.errors import BatchError
from hpcgpu.posix.threads import in_thread
from hpcgpu.state.cluster_state import ClusterState

#: Seconds that closing may take.
CLOSE_TIMEOUT = 30.0


class CancelAll:
    """The cancel of all jobs of one cluster.

    Parameters
    ----------
    state : ClusterState

    Attributes
    ----------
    problem : str
        Why the queue has not cancelled all jobs; empty if it has.
    retry_at : float
        Epoch seconds before which it does not try again by itself.
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.problem = ""
        self.retry_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._reported = False

    def begin(self) -> None:
        """Begin to cancel, unless that is under way."""
        if self._task is None or self._task.done():
            self._task = self.state.spawn(self._cancel(), set())

    async def wait(self) -> None:
        """Wait until the queue has cancelled all jobs, or has refused to."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _cancel(self) -> None:
        state, cadence = self.state, self.state.dispatcher.monitor.cadence
        try:
            await in_thread(state.dispatcher.cancel_all, CLOSE_TIMEOUT / 2, state.phase.lost)
        except Exception as error:  # after any error, the jobs must still be cancelled
            self.problem = str(error) if isinstance(error, BatchError) else repr(error)
            cadence.failed(now=state.now)
            self.retry_at = cadence.next_poll
            if not self._reported and not state.phase.closing:  # `Closing.finish` reports it, too
                self._reported = True
                state.report(
                    f"could not cancel {listed(state.dispatcher.left())}: {self.problem}. hpcgpu tries again "
                    f"until the queue has cancelled them. {state.dispatcher.advice()}"
                )
        else:
            self.problem = ""
            for job in state.registry.draining:
                job.workers.clear()
        state.changed.set()
