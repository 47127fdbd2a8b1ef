"""A start that another command overtakes reports by which; a home that is read-only is not called a failed start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
        if program.stderr is not None:
            program.stderr.close()
        hpcgpu("stop", "late")
        queue.cancel([blocker])


def test_a_start_that_stop_overtakes_reports_it(queue: LocalQueue, home: Path, fake_gpus: None, until: Until) -> None:
    with waiting_start(queue, home, until) as program:
        assert hpcgpu("stop", "late").returncode == 0
        _, said = program.communicate(timeout=250)
    assert program.returncode == 1 and "another program stopped it meanwhile, by `hpcgpu stop`" in said


#: A program that takes a cluster over, and scales it.
OTHER = "from hpcgpu import LocalGPUCluster; LocalGPUCluster.from_name('late').scale(jobs=2)"


def test_a_start_that_another_program_scales_reports_by_whom(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    with waiting_start(queue, home, until) as program:
        asked = hpcgpu("scale", "late", "--jobs", "2")
        assert asked.returncode == 1 and f"process {program.pid} on" in asked.stderr, "the command overtakes nobody"
        other = subprocess.Popen([sys.executable, "-c", OTHER])
        try:
            _, said = program.communicate(timeout=200)
        finally:
            other.kill()
            other.wait()
        assert len(live(queue)) == 3, "its jobs are the other program's"
    assert program.returncode == 1 and f"process {other.pid} on" in said and "was taken over by" in said, said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_home_that_is_read_only_is_reported_by_scale(
    queue: LocalQueue, home: Path, fake_gpus: None, until: Until
) -> None:
    with waiting_start(queue, home, until) as program:
        program.kill()
        program.wait()
        clusters = shlex.quote(str(home / "clusters"))
        read_only = f"mount --bind {clusters} {clusters} && mount -o remount,bind,ro {clusters}"
        words = shlex.join(command("scale", "late", "--jobs", "2"))
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{read_only} && exec {words}"],
            capture_output=True,
            text=True,
            timeout=250,
        )
    assert done.returncode == 1, done.stderr
    assert "failed to start" not in done.stderr and "read-only" in done.stderr.lower()
    assert "cannot be" in done.stderr and "late" in done.stderr
