"""Lets the time in which the scheduler was suspended count neither as silence of workers nor as time without work.

A process that is suspended receives nothing, and the clock goes on. When it continues, Dask would check the time before
it reads what came meanwhile: it would restart all workers, and lose their results
(``distributed.scheduler.worker-ttl``), or end a cluster that has just got work (``idle-timeout``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

#: Dask's checks. It makes the second one four times a second.
_CHECKS = ("worker-ttl", "idle-timeout")
#: Seconds between two checks after which the process was suspended, or its event loop blocked.
_SUSPENDED = 5.0


class SuspendedTime:
    """Measures the time between Dask's checks, and corrects what they compare with the clock.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Its periodic checks are replaced.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._checked = time.monotonic()
        for name in _CHECKS:
            if check := scheduler.periodic_callbacks.get(name):  # the user may have switched it off
                check.callback = self._corrected(check.callback)

    def _corrected(self, check: Callable[[], Any]) -> Callable[[], Any]:
        def checked() -> Any:
            self.correct()
            return check()

        return checked

    def correct(self) -> None:
        """Move the times of the last heartbeats and of the last work on, if the last check was long ago."""
        now, scheduler = time.monotonic(), self.scheduler
        passed, self._checked = now - self._checked, now
        if passed < _SUSPENDED:
            return
        for ws in scheduler.workers.values():
            ws.last_seen = min(time.time(), ws.last_seen + passed)
        if scheduler.idle_since:
            scheduler.idle_since = min(time.time(), scheduler.idle_since + passed)
