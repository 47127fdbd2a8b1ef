"""Connections to a listener whose other side has not yet proved that it belongs to the cluster.

Everybody who reaches a port can make them, as many as he likes. So a listener keeps a limited number of them at a time,
and writes a limited number of lines about them into its log, which is in the home directory of the cluster's owner.
"""

from __future__ import annotations

import logging
import resource
import time

from tornado.iostream import IOStream

__all__ = ["Refusals", "Strangers", "most_at_a_time"]

logger = logging.getLogger("distributed.hpcgpu")

#: Connections at a time. A member of the cluster needs milliseconds to prove itself, and tries again if it is refused.
_MOST = 2000
#: Lines in the log, and the seconds that they are for.
_LINES, _PERIOD = 10, 60.0


def most_at_a_time() -> int:
    """Return how many connections a listener keeps: they use at most a quarter of the file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(soft // 4, _MOST), 1)


class Refusals:
    """Which refused connections are told: ten within a minute."""

    def __init__(self) -> None:
        self._until, self._lines, self._left_out = 0.0, 0, 0

    def told(self, now: float) -> int | None:
        """Return how many were not told since the last that was; None if this one is not told either.

        Parameters
        ----------
        now : float
            Seconds of a clock that does not go back.
        """
        if now >= self._until:
            self._until, self._lines = now + _PERIOD, 0
        if self._lines >= _LINES:
            self._left_out += 1
            return None
        self._lines += 1
        before, self._left_out = self._left_out, 0
        return before


class Strangers:
    """The connections of one listener that are not authenticated yet, oldest first; closed ones may be among them."""

    def __init__(self) -> None:
        self._streams: dict[IOStream, None] = {}
        self._most = most_at_a_time()
        self._refusals = Refusals()

    def __contains__(self, stream: IOStream) -> bool:
        return stream in self._streams

    def add(self, stream: IOStream) -> None:
        """Keep a new connection. If there are too many, the oldest is closed: a member would have proved itself."""
        if len(self._streams) >= self._most and self._close_oldest():
            self.refuse("others", f"more than {self._most} at a time do not authenticate themselves")
        self._streams[stream] = None

    def remove(self, stream: IOStream) -> None:
        """Forget a connection that is authenticated, or closed."""
        self._streams.pop(stream, None)

    def close(self) -> None:
        """Close all of them."""
        while self._streams:
            self._close_oldest()

    def refuse(self, address: str, why: str) -> None:
        """Say in the log why a connection was refused, unless many were refused just now."""
        before = self._refusals.told(time.monotonic())
        if before is not None:
            more = f" ({before} more were refused since the last message)" if before else ""
            logger.warning("refused a connection from %s: %s%s", address, why, more)

    def _close_oldest(self) -> bool:
        """Close and forget the oldest. Return whether it was still open."""
        oldest = next(iter(self._streams))
        del self._streams[oldest]
        was_open = not oldest.closed()
        oldest.close()
        return was_open
