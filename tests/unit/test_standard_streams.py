"""A job whose log cannot be written, as on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: What a job does with its log: it prints, logs, forks, and begins anew as a worker job without a scheduler does.
_PROGRAM = """
import logging, os, sys
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written
drop_what_cannot_be_written()
for stream in (sys.stdout, sys.stderr):
    print("é" * 10000, file=stream)
    print("flushed", file=stream, flush=True)
logging.warning("logged")
if not (fork := os.fork()):
    print("of a fork")
    sys.exit(0)
assert os.waitpid(fork, 0)[1] == 0
print("in the buffer")
if "again" not in sys.argv:
    sys.stdout.flush()
    os.execv(sys.executable, [*sys.orig_argv, "again"])
"""


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_job_goes_on_whose_log_cannot_be_written(options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, *options, "-c", _PROGRAM], stdout=full, stderr=full)
    assert ended.returncode == 0


def test_a_log_that_can_be_written_has_all_of_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
        assert subprocess.run([sys.executable, "-c", _PROGRAM], stdout=log, stderr=log, env=environment).returncode == 0
    written = (tmp_path / "log").read_text()
    assert written.count("é" * 10000) == 4 and written.count("flushed") == 4
    assert written.count("of a fork") == written.count("in the buffer") == 2


def test_a_process_without_standard_streams_goes_on() -> None:
    program = f"{_PROGRAM.partition('for stream')[0]}print('nowhere')"
    assert subprocess.run(["bash", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, program]).returncode == 0


_PRINTING_THREAD = """
import sys, threading
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written
drop_what_cannot_be_written()
begun = threading.Event()
def prints():
    while True:
        print("a line of a thread", flush=True)
        begun.set()
threading.Thread(target=prints, daemon=True).start()
begun.wait()
"""


def test_a_process_ends_while_a_thread_of_it_prints(tmp_path: Path) -> None:
    for _ in range(8):
        with (tmp_path / "log").open("w") as log:
            ended = subprocess.run([sys.executable, "-c", _PRINTING_THREAD], stdout=log, stderr=subprocess.PIPE)
        assert (ended.returncode, ended.stderr) == (0, b"")
