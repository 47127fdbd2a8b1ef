"""A start that another command overtakes says by which."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import Until, live
from tests.helpers import block_queue, command, hpcgpu

WAITS = ("--system", "local", "--gpus-per-node", "1", "--protocol", "tcp", "--poll-interval", "0.5")


@contextmanager
def waiting_start(queue: LocalQueue, home: Path, until: Until) -> Iterator[subprocess.Popen[str]]:
    """A start whose jobs wait; whatever is left of it is stopped."""
    blocker = block_queue(queue, home)
    program = subprocess.Popen(command("start", "late", *WAITS, "--jobs", "1"), stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(live(queue)) == 3, "its jobs wait")
        yield program
    finally:
        program.kill()
        program.wait()
        hpcgpu("stop", "late")
        queue.cancel([blocker])


def test_a_start_that_stop_overtakes_says_so(queue: LocalQueue, home: Path, fake_gpus: None, until: Until) -> None:
    with waiting_start(queue, home, until) as program:
        assert hpcgpu("stop", "late").returncode == 0
        _, said = program.communicate(timeout=250)
    assert program.returncode == 1 and "another program stopped it meanwhile, by `hpcgpu stop`" in said
