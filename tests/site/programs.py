"""Programs of users on the hosts of the site: ada has a cluster on a login node, and a test reads what she receives."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from typing import Any

from site_bed import NAME, PYTHON

from tests.slurm.helpers import CPU

#: One GPU for each worker job.
SMALL: dict[str, Any] = CPU | {"walltime": "30m", "gpus_per_node": 1}
PRELUDE = """
import os, sys, time, warnings
import hpcgpu
from hpcgpu import SlurmGPUCluster
warnings.simplefilter("always", hpcgpu.errors.ClusterWarning)
def say(*words):
    print(*words, flush=True)
def until(condition, what, timeout=150):
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            say("NOT IN TIME:", what)
            sys.exit(9)
        time.sleep(0.1)
def listen():  # what the test sends
    return sys.stdin.readline().strip()
"""


def command(host: str, user: str = "ada") -> list[str]:
    """The beginning of a command line that runs on a host."""
    home = "/root" if user == "root" else f"/home/{user}"
    place = ["--user", user, "--workdir", home, "--env", f"HOME={home}", "--env", f"USER={user}"]
    return ["docker", "exec", "--interactive", *place, f"{NAME}-{host}"]


_RUNNING: list[Program] = []


class Program:
    """A Python program of a user; `said` is all that it has printed so far, warnings and exceptions too."""

    def __init__(self, host: str, code: str, user: str = "ada") -> None:
        self.host = host
        self.said = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        argv = [*command(host, user), PYTHON, "-u", "-c", PRELUDE + code]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        _RUNNING.append(self)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def hears(self, pattern: str, timeout: float = 150) -> re.Match[str]:
        """Wait until the program has printed what the pattern matches, since the last time; `.` matches line ends."""
        deadline = time.monotonic() + timeout
        new = ""
        while not (match := re.search(pattern, new, re.DOTALL)):
            left = deadline - time.monotonic()
            try:
                line = self._lines.get(timeout=max(left, 0.01))
            except queue.Empty:
                line = None
            assert line is not None, f"never said {pattern!r} on {self.host}, but:\n{self.said}"
            self.said += line
            new += line
        return match

    def send(self, line: str = "go") -> None:
        """Let the program's `listen()` return."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ends(self, timeout: float = 150) -> str:
        """Wait for the end of the program, which has done all without an error, and return all that it printed."""
        code = self.process.wait(timeout=timeout)
        while (line := self._lines.get(timeout=10)) is not None:
            self.said += line
        assert code == 0, self.said
        return self.said

    def end(self) -> None:
        """End it if it still runs, and close its pipes. Its processes on the host end with the reset of the site."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self._reader.join(timeout=10)
        self.process.stdout.close()


def end_all() -> None:
    """End the programs of a test."""
    while _RUNNING:
        _RUNNING.pop().end()
