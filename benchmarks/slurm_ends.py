"""The kinds of ends that a scheduler job has on a real Slurm, and on a PBS; for scheduler_ends.py.

Each kind is a context manager. On entry the end happens, or will soon; on exit its cause is removed. A suspended job
does not end.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "slurm")]

from bed import SlurmBed, call  # noqa: E402  # it is no package

#: Seconds for which a job is suspended, at most.
SUSPENDED = 40.0


@dataclass(frozen=True)
class Victim:
    """A scheduler job, and what its end needs.

    Attributes
    ----------
    bed : SlurmBed or None
        None with the embedded queue.
    client : distributed.Client
    choose : random.Random
    id, name, node : str
        Of the job.
    pid : int
        Of the scheduler.
    """

    bed: SlurmBed | None
    client: Client
    choose: random.Random
    id: str
    name: str
    node: str
    pid: int

    @property
    def slurm(self) -> SlurmBed:
        """The Slurm in which it runs."""
        assert self.bed is not None
        return self.bed


@contextlib.contextmanager
def killed(job: Victim) -> Iterator[None]:
    """SIGKILL for the scheduler."""
    os.kill(job.pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def node_off(job: Victim) -> Iterator[None]:
    """All processes of its node are gone at once. Slurm sees that some seconds later, as by its SlurmdTimeout."""
    with switched_off(job.slurm, job.node, job.choose.uniform(0, 8)):
        yield


@contextlib.contextmanager
def switched_off(bed: SlurmBed, node: str, seconds: float) -> Iterator[None]:
    """A node is off, and Slurm sees that after so many seconds."""
    bed.switch_off(node)
    time.sleep(seconds)
    bed.node_down(node)
    yield
    bed.node_up(node)


@contextlib.contextmanager
def node_down(job: Victim) -> Iterator[None]:
    """Slurm takes its node out of service, and ends what runs there."""
    job.slurm.node_down(job.node)
    yield
    job.slurm.node_up(job.node)


@contextlib.contextmanager
def walltime(job: Victim) -> Iterator[None]:
    """Its walltime is nearly over. Slurm looks at that once in half a minute."""
    call("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    yield


@contextlib.contextmanager
def preempted(job: Victim) -> Iterator[None]:
    """A job of a partition with a higher priority gets its node."""
    urgent = ["-p", "urgent", "-w", job.node, "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    blocker = call("sbatch", "--parsable", *urgent).strip()
    yield
    call("scancel", blocker)


@contextlib.contextmanager
def out_of_memory(job: Victim) -> Iterator[None]:
    """It takes twice the memory that it has asked for."""

    def soon(dask_scheduler: Any) -> None:  # it answers before it dies
        dask_scheduler.loop.call_later(0.1, lambda: setattr(dask_scheduler, "too_much", bytearray(2**31)))

    job.client.run_on_scheduler(soon)
    yield


@contextlib.contextmanager
def suspended(job: Victim) -> Iterator[None]:
    """Nothing in it runs for some seconds."""
    call("scontrol", "suspend", job.id)
    resume = threading.Timer(job.choose.uniform(2, SUSPENDED), call, ["scontrol", "resume", job.id])
    resume.start()
    yield
    resume.join()


Kind = Callable[[Victim], AbstractContextManager[Any]]
KINDS: dict[str, Kind] = {
    "killed": killed,
    "node off": node_off,
    "node down": node_down,
    "walltime": walltime,
    "preempted": preempted,
    "out of memory": out_of_memory,
    "suspended": suspended,
}


@contextlib.contextmanager
def killed_by_pbs(job: Victim) -> Iterator[None]:
    """SIGKILL for all processes of the job."""
    call("qsig", "-s", "SIGKILL", job.id)
    yield


@contextlib.contextmanager
def walltime_of_pbs(job: Victim) -> Iterator[None]:
    """Its walltime is over."""
    call("qalter", "-l", "walltime=00:00:10", job.id)
    yield


#: What a user can do on a PBS.
KINDS_OF_PBS: dict[str, Kind] = {"killed": killed_by_pbs, "walltime": walltime_of_pbs}
#: What ends all jobs of a node.
OF_NODE = {"node off", "node down", "preempted"}
