"""The lease of a cluster's manager: its heartbeats renew it, and without them the scheduler ends.

How long it lasts is the option `lease`, see `hpcgpu.options.shared_options_and_defaults`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpcgpu.dask_scheduler.rpc_types import GroupState, ManagerState
from hpcgpu.posix.threads import in_thread

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.hpcgpu")

#: Seconds for the first heartbeat of a manager; its lease begins after that.
_FIRST_HEARTBEAT = 60.0
#: In how many steps the lease is counted.
_STEPS = 100
#: Seconds of silence after which a manager counts as gone.
_SILENT = 60.0


class ManagerLease:
    """The managers that sent heartbeats to a scheduler; it closes when none came for the time of the lease.

    The option ``lease`` sets that time.

    Parameters
    ----------
    scheduler, seconds, released
        See `hpcgpu.dask_scheduler.scheduler_extension.install`.
    """

    def __init__(self, scheduler: Scheduler, seconds: float | None, released: Callable[[], bool]) -> None:
        self.scheduler = scheduler
        self.seconds = seconds
        self._released = released
        self._last_heartbeat = -math.inf
        #: Seconds without a heartbeat, of those in which one could be heard.
        self._silence = -_FIRST_HEARTBEAT
        #: The number of the latest manager.
        self.manager = 0
        self._about = ""
        self._groups: list[GroupState] = []
        self._warnings: list[str] = []
        self._present = False
        self._left = -1
        if seconds:
            self._watching = asyncio.ensure_future(self._watch(seconds))

    async def heartbeat(
        self, manager: int = 0, about: str = "", groups: Sequence[GroupState] = (), warnings: Sequence[str] = ()
    ) -> int:
        """Record a manager's heartbeat and the state of its scaling; return the highest manager number.

        Heartbeats of earlier managers do not count.
        """
        if manager >= self.manager and manager != self._left:
            self.manager, self._last_heartbeat, self._about, self._present = manager, time.monotonic(), about, True
            self._groups, self._warnings, self._silence = list(groups), list(warnings), 0.0
        return self.manager

    async def goodbye(self, manager: int) -> None:
        """Record that a manager left; one of its heartbeats may still arrive."""
        self._left = manager
        if manager == self.manager:
            self._present = False

    @property
    def present(self) -> bool:
        """Whether the latest manager manages the cluster now."""
        return self._present and time.monotonic() - self._last_heartbeat < _SILENT

    def state(self, problem: str) -> ManagerState:
        """Return what other programs see of the manager."""
        return ManagerState(
            number=self.manager,
            present=self.present,
            about=self._about,
            problem=problem,
            groups=self._groups,
            warnings=self._warnings,
        )

    async def release(self) -> None:
        """Continue without a manager from now on."""
        self.seconds = None

    async def end(self, manager: int) -> None:
        """Close the scheduler soon, and its workers with it, unless a later manager has the cluster."""
        if manager < self.manager:
            return
        self._ending = asyncio.ensure_future(self.scheduler.close(reason="hpcgpu-closed"))

    async def _watch(self, lease: float) -> None:
        while self._silence < lease:
            # Count steps, not the clock: a process that is suspended hears nobody, and the clock goes on.
            await asyncio.sleep(lease / _STEPS)
            self._silence += lease / _STEPS
            if self._silence >= lease and self.seconds is not None and await in_thread(self._released):
                self._silence = 0.0
            if self.seconds is None:
                return
        logger.error(
            "hpcgpu: no heartbeat from the cluster's manager for %g s (option lease): this scheduler ends", lease
        )
        await self.scheduler.close(reason="hpcgpu-lease")
