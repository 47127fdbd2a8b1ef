"""A thread that takes snapshots repeatedly, while a page shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hpcgpu.existing_clusters.snapshot import Snapshot

#: Seconds between two snapshots; if a snapshot takes long, the pause is this many times as long, up to the last number.
_INTERVAL, _SHARE, _LONGEST = 2.0, 9, 20.0
#: Seconds without a message of a page, after which snapshots are rare: the Jupyter server keeps what no page fetches. A
#: kernel that runs a cell receives no messages of a page.
_ALONE = 600.0


class Screen(Protocol):
    """Shows the snapshots."""

    def draw(self, snapshot: Snapshot) -> None:
        """Show a new snapshot."""

    def show_problem(self, problem: str) -> None:
        """Show why there is no new snapshot."""

    def finish(self) -> None:
        """Show that no further snapshot comes."""


class Feed:
    """Takes snapshots while it is on, and a last one when the cluster has ended.

    Parameters
    ----------
    source : callable
        Takes a snapshot. Only this thread calls it.
    is_final : callable
        Whether this program no longer follows the cluster.
    screen : Screen
    interval : float, default 2
        Seconds.
    """

    def __init__(
        self, source: Callable[[], Snapshot], is_final: Callable[[], bool], screen: Screen, interval: float = _INTERVAL
    ) -> None:
        self._source, self._is_final, self._screen, self._interval = source, is_final, screen, interval
        self._seen = time.monotonic()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._off = threading.Event()
        self._first = threading.Event()
        self.latest: Snapshot | None = None

    def start(self) -> None:
        """Start taking snapshots, unless the thread already does."""
        self.seen()
        with self._lock:
            if self._thread is not None and self._thread.is_alive() and not self._off.is_set():
                return
            self._off = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._off,), name="hpcgpu-widget", daemon=True)
            self._thread.start()

    def seen(self) -> None:
        """Record that a page shows the snapshots. A closed laptop does not report that its page shows them no more."""
        self._seen = time.monotonic()

    def stop(self) -> None:
        """Stop taking snapshots; do not wait for one in progress."""
        with self._lock:
            self._off.set()

    def wait_first(self, seconds: float) -> Snapshot | None:
        """Return the latest snapshot; wait for the first one at most for this time."""
        self._first.wait(seconds)
        return self.latest

    def _run(self, off: threading.Event) -> None:
        while not off.is_set():
            over = self._is_final()  # before the snapshot: the last one is taken after the end
            begun = time.monotonic()
            try:
                self.latest = self._source()
                self._screen.draw(self.latest)
            except Exception as error:  # an error must not end the thread: the next snapshot may succeed
                self._screen.show_problem(f"The cluster cannot be queried: {str(error) or type(error).__name__}")
            finally:
                self._first.set()
            if over:
                self._screen.finish()
                return
            taken = time.monotonic()
            alone = taken - self._seen > _ALONE
            until = taken + max(self._interval, _LONGEST if alone else min(_LONGEST, _SHARE * (taken - begun)))
            while time.monotonic() < until and not off.wait(self._interval) and not self._is_final():
                pass
