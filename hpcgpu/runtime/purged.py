"""Ends a job whose cluster directory was removed: nobody can find, use or stop its cluster any more."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.gone import Gone

__all__ = ["watch_directory"]


def watch_directory(directory: ClusterDirectory) -> None:
    """Watch the cluster directory in a thread of this process, which ends with it: a look may hang for long."""
    gone = Gone(directory, directory.token())
    threading.Thread(target=_watch, args=(gone,), name="hpcgpu-directory", daemon=True).start()


def _watch(gone: Gone) -> None:
    while not (why := gone.look(now=time.monotonic())):
        time.sleep(gone.interval)
    print(
        f"hpcgpu: nobody can reach cluster {gone.directory.path.name} any more, because {why}. This job ends",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
