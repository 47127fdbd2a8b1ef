"""What the benchmarks share that run each side as a program on a Slurm: its events, its jobs, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ROOT = Path(__file__).parents[1]
_FORMAT = "%i|%j|%T|%C|%b|%V|%S|%e|%l"


class Event(NamedTuple):
    """What a program wrote."""

    at: float
    what: str
    number: int
    text: str


class Note(Protocol):
    """Writes an event."""

    def __call__(self, what: str, number: int = 0, text: str = "") -> None: ...


@contextmanager
def written_events(place: Path) -> Iterator[Note]:
    """Let a program write its events to a file in its directory."""
    with open(place / "events", "a") as events:

        def note(what: str, number: int = 0, text: str = "") -> None:
            print(json.dumps(Event(time.time(), what, number, text)), file=events, flush=True)

        yield note


def read_events(place: Path) -> list[Event]:
    """Return what the program has written, without a line that it is writing."""
    try:
        lines = (place / "events").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [Event(*json.loads(line)) for line in lines]


class Job(NamedTuple):
    """A job as squeue prints it."""

    id: int
    name: str
    state: str
    cores: int
    gres: str
    submit: str
    start: str
    end: str
    limit: str

    @property
    def is_scheduler(self) -> bool:
        """Whether it is hpcgpu's scheduler job."""
        return re.search(r"-scheduler\d*$", self.name) is not None

    @property
    def times(self) -> tuple[float, float]:
        """When it started and ended; twice zero if it did not start."""
        try:
            return datetime.fromisoformat(self.start).timestamp(), datetime.fromisoformat(self.end).timestamp()
        except ValueError:
            return 0.0, 0.0

    @property
    def seconds(self) -> float:
        """How long it ran."""
        start, end = self.times
        return end - start

    @property
    def waited(self) -> float:
        """How long it waited in the queue, if it started."""
        return self.times[0] - datetime.fromisoformat(self.submit).timestamp()

    @property
    def gpus(self) -> int:
        """How many GPUs it has, such as 4 for `gres:gpu:a100:4`."""
        found = re.search(r"\bgpu\b(?:[:=][a-z]\w*)?(?:[:=](\d+))?", self.gres)
        return int(found[1] or 1) if found else 0


def parse(line: str) -> Job:
    """Return the job of a line of squeue."""
    row = line.split("|")
    return Job(int(row[0]), row[1], row[2], int(row[3]), *row[4:])


def listed(first: int = 0) -> list[Job]:
    """Return all jobs that Slurm knows, from this id on, also those that ended less than five minutes ago."""
    command = ["squeue", "-h", "-a", "-t", "all", "-o", _FORMAT]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [job for job in map(parse, done.stdout.splitlines()) if job.id >= first]


class Recorder:
    """Records the jobs of one run in a thread."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.jobs: dict[int, Job] = {}
        self.remarks: list[str] = []
        self.first_id = 1 + max((job.id for job in listed()), default=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def record(self) -> None:
        """Record the jobs as they are now."""
        self.jobs |= {job.id: job for job in listed(self.first_id)}

    def end(self) -> None:
        """Stop; return when nothing is recorded any more."""
        self._stop.set()
        self._thread.join()

    def disturb(self) -> None:
        """Disturb the run. It is called several times a second."""

    def _run(self) -> None:
        recorded = 0.0
        while not self._stop.wait(0.2):
            with suppress(subprocess.CalledProcessError):  # the next time
                if time.monotonic() > recorded + 5:
                    self.record()
                    recorded = time.monotonic()
                self.disturb()


def run_program(command: list[str], recorder: Recorder, bed: Any, limit: float, more: dict[str, str]) -> float:
    """Run a program with more in its environment; end it and all jobs. Return when it was started."""
    started = time.time()
    with open(recorder.place / "output", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | more)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            recorder.remarks.append(f"stopped after {limit:.0f} s")
        finally:
            end(process)
            bed.cancel_all()
            bed.wait_empty(120)
            recorder.end()
    recorder.record()
    return started


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program: politely, so that it ends what it started, and then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program in a way that ends all it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def heading(distributions: Iterable[str]) -> str:
    """Return the versions, the machine and the command of a measurement."""
    from importlib.metadata import version

    from bed import slurm_version

    versions = ", ".join(f"{name} {version(name)}" for name in distributions)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    slurm = ".".join(f"{part:02}" for part in slurm_version())
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return f"""\
{day}, Slurm {slurm} on one machine of {os.cpu_count()} cores, load at the start {os.getloadavg()[0]:.1f},
Python {sys.version.split()[0]}, {versions}, commit {commit.strip()}

python benchmarks/{" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
"""
