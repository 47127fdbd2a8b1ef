"""Ends a job whose cluster directory was removed: nobody can find, use or stop its cluster any more."""

from __future__ import annotations

import os
import signal
import threading
import time

from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.removed_directory import RemovalWatch


def watch_directory(directory: ClusterDirectory) -> None:
    """Watch the cluster directory in a daemon thread of this process: a filesystem call may hang for a long time."""
    gone = RemovalWatch(directory, directory.token())
    threading.Thread(target=_watch, args=(gone,), name="hpcgpu-directory", daemon=True).start()


def _watch(gone: RemovalWatch) -> None:
    while not (why := gone.check(now=time.monotonic())):
        time.sleep(gone.interval)
    write_stderr(f"nobody can reach cluster {gone.directory.path.name} any more, because {why}. This job ends")
    os.kill(os.getpid(), signal.SIGTERM)
