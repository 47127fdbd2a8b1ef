"""All processes of a job end with it, and no other process that has got the pid of one."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import psutil

from hpcgpu.posix.process_identity import alive, identity
from hpcgpu.posix.process_trees import end_all, members


def test_a_process_that_was_found_once_ends_although_nothing_shows_later_whose_it_is() -> None:
    """A daemon leaves its session and its parent, and a process may overwrite its environment."""
    code = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    with subprocess.Popen(["bash", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        found = [{psutil.Process(process.pid)}]
        try:
            assert end_all(lambda: found.pop() if found else set(), grace=0.5) == []
            assert process.wait(10) == -9
        finally:
            process.kill()


def test_what_a_process_starts_because_of_term_ends_by_itself(tmp_path: Path) -> None:
    saves = f"trap 'sleep 2 && touch {tmp_path}/saved; exit' TERM; echo up; while :; do sleep 0.1; done"
    with subprocess.Popen(["bash", "-c", saves], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        try:
            assert end_all(partial(members, {"NOBODY": "HAS IT"}, process.pid), grace=60) == []
        finally:
            process.kill()
    assert (tmp_path / "saved").exists()


def test_a_process_that_has_the_pid_of_an_earlier_one_is_another() -> None:
    pid, start = identity(os.getpid())
    assert alive([pid, start]) and not alive([pid, start - 1]) and not alive([])
