"""`hpcgpu top` in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.helpers import GPU

Until = Callable[..., None]


def test_top_shows_a_cluster_until_q_is_pressed_and_leaves_the_terminal_as_it_was(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(**GPU, name="shown", jobs=1) as cluster:
        cluster.wait_for_workers(2)
        once = subprocess.run([sys.executable, "-m", "hpcgpu", "top", "shown"], capture_output=True, text=True)
        assert once.returncode == 0 and "shown-0-1" in once.stdout and "q ends" not in once.stdout, once.stderr
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = termios.tcgetattr(theirs)
        program = subprocess.Popen(
            [sys.executable, "-m", "hpcgpu", "top", "shown"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        seen = bytearray()
        threading.Thread(target=_read, args=(ours, seen), daemon=True).start()
        until(
            lambda: b"shown-0-1" in seen and b"q ends" in seen, lambda: f"its GPUs are shown: {bytes(seen)[-2000:]!r}"
        )
        cluster.scale(jobs=0)
        until(lambda: b"0 workers" in seen, lambda: f"the picture changes: {bytes(seen)[-2000:]!r}")
        os.write(ours, b"q")
        assert program.wait(150) == 0
        assert termios.tcgetattr(theirs) == before
        until(
            lambda: seen.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in seen,
            lambda: f"the cursor and the screen are back: {bytes(seen)[-2000:]!r}",
        )
        os.close(theirs)
        os.close(ours)


def _read(descriptor: int, seen: bytearray) -> None:
    while True:
        try:
            seen.extend(os.read(descriptor, 65536))
        except OSError:
            return
