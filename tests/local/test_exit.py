"""What the end of the program does to the jobs that it submitted: signals, forked children, and other managers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory
from tests.conftest import running

Until = Callable[..., None]

#: A program with one job, as a cluster has it; it prints when that is in the queue, and ends when it reads a line.
PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.jobs.submit_and_cancel import Dispatcher
from hpcgpu.jobs.program_exit import cancel_at_exit
from hpcgpu.store.directory import ClusterDirectory

{before}
queue, directory, manager, script = sys.argv[1:]
dispatcher = Dispatcher(LocalQueue(Path(queue), gpus=4), ClusterDirectory(Path(directory)), int(manager))
asyncio.run(dispatcher.submit(Path(script), name="demo-0", kind="worker"))
cancel_at_exit(dispatcher)
{after}
print("up", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def directory(home: Path) -> ClusterDirectory:
    return create_directory.claim(home / "clusters" / "demo", lambda earlier: [], system="local")


@contextmanager
def program(
    queue: LocalQueue, directory: ClusterDirectory, *, before: str = "", after: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Start it, and let it end by itself."""
    script = directory.path / "job.sh"
    script.write_text("#!/bin/bash\n#HPCGPU --gpus=0\n#HPCGPU --output=/dev/null\nexec sleep 600\n")
    code = PROGRAM.format(before=before, after=after)
    number = directory.take_over("the program").number
    arguments = [str(queue.directory), str(directory.path), str(number), str(script)]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert len(running(queue)) == 1
        try:
            yield process
            process.communicate("\n", timeout=150)
        finally:
            process.kill()


def test_the_program_s_own_handlers_and_its_forked_children_stay_its_own(
    queue: LocalQueue, directory: ClusterDirectory
) -> None:
    own = (
        "signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does"
    )
    forked = "if (child := os.fork()) == 0:\n    sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0"
    with program(queue, directory, before=own, after=forked) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "mine\n"
        assert process.poll() is None and len(running(queue)) == 1
    assert process.returncode == 0 and running(queue) == []


def test_a_forked_child_ends_at_once_when_it_is_terminated(queue: LocalQueue, directory: ClusterDirectory) -> None:
    """Python would run a handler only between two instructions, and never while the child waits for a lock."""
    forked = (
        "if (child := os.fork()) == 0:\n"
        "    os._exit(any(signal.getsignal(n) is not signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP)))\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    with program(queue, directory, after=forked) as process:
        pass
    assert process.returncode == 0 and running(queue) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, None], ids=["SIGTERM", "exit"])
def test_a_program_whose_cluster_was_taken_over_ends_without_its_jobs(
    queue: LocalQueue, directory: ClusterDirectory, number: signal.Signals | None
) -> None:
    with program(queue, directory) as process:
        directory.take_over("another program")
        if number is not None:
            os.kill(process.pid, number)
            process.wait(timeout=150)
    [job] = running(queue)
    assert process.returncode == (0 if number is None else 128 + number)
    queue.cancel([job])


def test_the_second_signal_of_a_session_that_ends_does_not_break_off_the_first(
    queue: LocalQueue, directory: ClusterDirectory
) -> None:
    """At its end systemd sends a session SIGTERM, and SIGHUP right after it."""
    meanwhile = """
import fcntl
flock = fcntl.flock
def then(*arguments):
    flock(*arguments)
    if "dispatcher" in globals() and dispatcher.closing and signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGHUP)  # while it holds the queue's lock
fcntl.flock = then
"""
    with program(queue, directory, before=meanwhile) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=150) == 128 + signal.SIGTERM
    assert running(queue) == []


def test_a_program_whose_close_the_queue_refused_cancels_its_jobs_when_it_ends(
    queue: LocalQueue, directory: ClusterDirectory
) -> None:
    refused = """
from hpcgpu.errors import BatchUnavailable
def refuses(*arguments, **options):
    raise BatchUnavailable("no answer")
dispatcher.batch.cancel = refuses
try:
    dispatcher.cancel_all(1.0)
except BatchUnavailable:
    del dispatcher.batch.cancel
"""
    with program(queue, directory, after=refused) as process:
        pass
    assert process.returncode == 0 and running(queue) == []


def test_a_queue_that_does_not_answer_at_the_end_keeps_no_job_of_another_cluster(
    queue: LocalQueue, directory: ClusterDirectory
) -> None:
    others = """
from hpcgpu.errors import BatchUnavailable
def refuses(timeout):
    raise BatchUnavailable("no answer")
for _ in range(20):  # in any order
    other = Dispatcher(dispatcher.batch, dispatcher.directory, dispatcher.manager)
    other.cancel_all = refuses
    cancel_at_exit(other)
"""
    with program(queue, directory, after=others) as process:
        pass
    assert process.returncode == 0 and running(queue) == []
