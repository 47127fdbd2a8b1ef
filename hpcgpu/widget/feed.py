"""A thread that takes a snapshot again and again, while somebody looks at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hpcgpu.remote.snapshot import Snapshot

__all__ = ["Feed"]

#: Seconds between two snapshots. If they take long: it waits so many times longer, but not for more than this.
_INTERVAL, _SHARE, _LONGEST = 2.0, 9, 20.0
#: Seconds without a word of a page, after which it takes them rarely: the Jupyter server keeps what no page fetches.
#: A kernel that runs a cell does not hear a page.
_ALONE = 600.0


class Screen(Protocol):
    """What shows the snapshots."""

    def draw(self, snapshot: Snapshot) -> None:
        """Show a new one."""

    def say(self, problem: str) -> None:
        """Show why there is no new one."""

    def finish(self) -> None:
        """Show that no other one comes."""


class Feed:
    """Takes snapshots while it is on, and one last when the cluster has ended.

    Parameters
    ----------
    source : callable
        Takes a snapshot. It is called in this thread alone.
    over : callable
        Whether this program no longer follows the cluster.
    screen : Screen
    interval : float, default 2
        Seconds.
    """

    def __init__(
        self, source: Callable[[], Snapshot], over: Callable[[], bool], screen: Screen, interval: float = _INTERVAL
    ) -> None:
        self._source, self._over, self._screen, self._interval = source, over, screen, interval
        self._seen = time.monotonic()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._off = threading.Event()
        self._first = threading.Event()
        self.latest: Snapshot | None = None

    def start(self) -> None:
        """Take snapshots from now on, unless it does so already."""
        self.seen()
        with self._lock:
            if self._thread is not None and self._thread.is_alive() and not self._off.is_set():
                return
            self._off = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._off,), name="hpcgpu-widget", daemon=True)
            self._thread.start()

    def seen(self) -> None:
        """Record that a page shows it. A laptop that is closed does not say that nobody looks any more."""
        self._seen = time.monotonic()

    def stop(self) -> None:
        """Take no more of them; do not wait for one that is under way."""
        with self._lock:
            self._off.set()

    def wait_first(self, seconds: float) -> Snapshot | None:
        """Return the latest snapshot; wait for the first one, but not for longer than this."""
        self._first.wait(seconds)
        return self.latest

    def _run(self, off: threading.Event) -> None:
        while not off.is_set():
            over = self._over()  # before the snapshot: the last one is taken after the end
            begun = time.monotonic()
            try:
                self.latest = self._source()
                self._screen.draw(self.latest)
            except Exception as error:  # the thread must not end by it: the next snapshot may succeed
                self._screen.say(f"The cluster cannot be queried: {str(error) or type(error).__name__}")
            finally:
                self._first.set()
            if over:
                self._screen.finish()
                return
            taken = time.monotonic()
            alone = taken - self._seen > _ALONE
            until = taken + max(self._interval, _LONGEST if alone else min(_LONGEST, _SHARE * (taken - begun)))
            while time.monotonic() < until and not off.wait(self._interval) and not self._over():
                pass
