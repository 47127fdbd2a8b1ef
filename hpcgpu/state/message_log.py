"""The log of a cluster: each message of its manager, which may also be a warning."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterWarning

#: Number of messages that are kept: a cluster may run for weeks, and a message may contain the end of a log.
_MOST_LINES = 1000


class MessageLog:
    """Messages to the user, in a log and as warnings.

    Parameters
    ----------
    silent : callable
        Whether warnings are left out: while the constructor runs, which raises an exception instead.

    Attributes
    ----------
    lines : collections.deque of (float, str)
        Epoch seconds, and the message; the last thousand.
    """

    def __init__(self, silent: Callable[[], bool]) -> None:
        self._silent = silent
        self.lines: deque[tuple[float, str]] = deque(maxlen=_MOST_LINES)

    def log(self, text: str) -> None:
        """Write a message into the cluster's log."""
        self.lines.append((time.time(), text))

    def warn(self, text: str) -> None:
        """Write a message into the log, and warn."""
        self.log(text)
        if not self._silent():
            with suppress(ClusterWarning):  # `-W error` must not stop the management of the jobs
                warn(text)

    def text(self) -> str:
        """Return the log."""
        return "\n".join(f"{time.strftime('%F %T', time.localtime(at))} {text}" for at, text in list(self.lines))
