"""The lease of a cluster's manager: its heartbeats renew it, and without them the scheduler ends.

How long it lasts is the option `lease`, see `hpcgpu.options.shared_options_and_defaults`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpcgpu.dask_scheduler.rpc_types import GroupState, ManagerState
from hpcgpu.posix.threads import in_thread

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.hpcgpu")

#: Seconds for the first heartbeat of a manager; its lease begins after that.
_FIRST_HEARTBEAT = 60.0
#: Seconds of silence after which a manager counts as gone.
_SILENT = 60.0
#: Seconds of silence after which a cluster without a lease may need a manager.
_NO_LEASE = 600.0


class ManagerLease:
    """The managers that sent heartbeats to a scheduler; it closes when none came for the time of the lease.

    The option ``lease`` sets that time. `step` counts it, not the clock: a process that is suspended receives
    nothing, and the clock goes on.

    Parameters
    ----------
    scheduler, seconds, released
        See `hpcgpu.dask_scheduler.scheduler_extension.install`.
    """

    def __init__(self, scheduler: Scheduler, seconds: float | None, released: Callable[[], bool]) -> None:
        self.scheduler = scheduler
        self.seconds = seconds
        self._released = released
        #: Seconds without a heartbeat, of those in which one could be received.
        self._silence = -_FIRST_HEARTBEAT
        #: The number of the latest manager.
        self.manager = 0
        self._about = ""
        self._groups: list[GroupState] = []
        self._warnings: list[str] = []
        self._present = False
        self._left = -1

    async def heartbeat(
        self, manager: int = 0, about: str = "", groups: Sequence[GroupState] = (), warnings: Sequence[str] = ()
    ) -> int:
        """Record a manager's heartbeat and the state of its scaling; return the highest manager number.

        Heartbeats of earlier managers do not count.
        """
        if manager >= self.manager and manager != self._left:
            self.manager, self._silence, self._about, self._present = manager, 0.0, about, True
            self._groups, self._warnings = list(groups), list(warnings)
        return self.manager

    async def goodbye(self, manager: int) -> None:
        """Record that a manager left; one of its heartbeats may still arrive."""
        self._left = manager
        if manager == self.manager:
            self._present = False

    @property
    def present(self) -> bool:
        """Whether the latest manager manages the cluster now."""
        return self._present and self._silence < _SILENT

    def jobs_that_stay(self) -> int | None:
        """Return how many worker jobs stay without tasks; None if all do, because the user sets the sizes."""
        if all(group["minimum"] is None for group in self._groups):
            return None
        return sum(int(group["target" if group["minimum"] is None else "minimum"] or 0) for group in self._groups)

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

    async def step(self, seconds: float) -> bool:
        """Count so many seconds of silence; close the scheduler if the lease has ended, and the cluster needs one.

        Returns
        -------
        bool
            Whether the lease has ended, or would have, and the cluster needs none.
        """
        self._silence += seconds
        if not self._lease_ended:
            return False
        released = await in_thread(self._released)
        if not self._lease_ended:  # a heartbeat came meanwhile
            return False
        if released or self.seconds is None:  # it is read again after another lease
            self._silence, self._present = 0.0, False
            return released
        logger.error(
            "hpcgpu: no heartbeat from the cluster's manager for %g s (option lease): this scheduler ends",
            self.seconds,
        )
        await self.scheduler.close(reason="hpcgpu-lease")
        return False

    @property
    def _lease_ended(self) -> bool:
        return self._silence >= (_NO_LEASE if self.seconds is None else self.seconds)
