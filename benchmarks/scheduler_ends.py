"""The scheduler of a cluster is killed at random moments, again and again, with ``on_scheduler_end="restart"``.

Each round begins something (tasks, a shuffle, a checkpoint, growth, a drain, nothing), and kills the scheduler at a
random moment of it. After each round the cluster must compute, the worker jobs that ran must run (but for those that
were to end), and what was saved must be there, bit by bit. At the end no job may be left, and none submitted twice.

    python benchmarks/scheduler_ends.py --rounds 50 --seed 1           # the embedded queue
    python benchmarks/scheduler_ends.py --rounds 50 --seed 1 --slurm   # a Slurm of its own (as root)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client
from distributed.client import FutureCancelledError

from hpcgpu import CheckpointError, GPUCluster, LocalGPUCluster, SlurmGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.scaling import scheduler_restarts

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]

#: Seconds that a cluster may take until it computes again.
PATIENCE = 120.0
#: Seconds after the beginning of a round in which the scheduler is killed.
LATEST = 4.0


@dataclass
class Report:
    """What was seen."""

    rounds: Counter[str] = field(default_factory=Counter)
    #: Seconds from each kill to the first result of the next scheduler.
    seconds: list[float] = field(default_factory=list)
    checkpoints: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Rounds:
    """Begins things on a cluster, kills its scheduler, and checks what is left.

    Parameters
    ----------
    cluster : GPUCluster
    client : distributed.Client
    choose : random.Random
    report : Report
    """

    def __init__(self, cluster: GPUCluster, client: Client, choose: random.Random, report: Report) -> None:
        self.cluster, self.client, self.choose, self.report = cluster, client, choose, report
        self.size = 2
        numbers = client.persist(da.random.random((200, 200), chunks=(50, 60)))
        self.saved = numbers.compute()
        cluster.checkpoint(numbers, name="numbers")
        client.publish_dataset(published=numbers)
        cluster.checkpoint(numbers, name="published")

    def one(self, number: int) -> None:
        """Do one round."""
        begun: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "tasks": lambda: self.client.gather(
                self.client.map(lambda x: time.sleep(0.1) or x, range(100), pure=False)
            ),
            "shuffle": lambda: da.random.random((600, 600), chunks=(60, 600)).rechunk((600, 60)).sum().compute(),
            "checkpoint": self._checkpoint,
            "growth": lambda: self._scale(3),
            "drain": lambda: self._scale(2),
        }
        name = self.choose.choice(
            ["drain" if self.size == 3 else "growth", "nothing", "tasks", "shuffle", "checkpoint"]
        )
        self.report.rounds[name] += 1
        before = self._worker_jobs()
        pid = self.client.run_on_scheduler(os.getpid)
        doing = threading.Thread(target=_until_it_fails, args=(begun[name],), daemon=True)
        doing.start()
        time.sleep(self.choose.uniform(0, LATEST))
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        doing.join(PATIENCE)
        self._works(f"round {number} ({name})", killed)
        self._check(f"round {number} ({name})", before, name)

    def _checkpoint(self) -> None:
        numbers = self.client.persist(da.random.random((200, 200), chunks=(50, 60)))
        new = numbers.compute()
        try:
            self.cluster.checkpoint(numbers, name="numbers")
        except CheckpointError:
            self.report.checkpoints["not saved"] += 1
        else:
            self.saved = new
            self.report.checkpoints["saved"] += 1

    def _scale(self, jobs: int) -> None:
        self.size = jobs
        self.cluster.scale(jobs=jobs)

    def _works(self, where: str, killed: float) -> None:
        """Wait until the cluster computes again, with all its workers."""
        try:
            while True:
                try:
                    result = self.client.submit(pow, 2, 5, pure=False).result(timeout=PATIENCE)
                    break
                except FutureCancelledError:  # it was submitted before the client had noticed the loss
                    if time.monotonic() - killed > PATIENCE:
                        raise
            if result != 32:
                self.report.wrong.append(f"{where}: a wrong result")
            self.report.seconds.append(time.monotonic() - killed)
            self.cluster.settle()
            self.cluster.wait_for_workers(self.size, timeout=PATIENCE)
        except Exception as error:
            self.report.wrong.append(f"{where}: the cluster does not compute again: {error!r}")
            raise

    def _check(self, where: str, before: dict[str, str], name: str) -> None:
        after = self._worker_jobs()
        if gone := {job: before[job] for job in before if job not in after}:
            if name != "drain" or len(gone) > 1:
                self.report.wrong.append(f"{where}: worker jobs are gone: {gone}")
        if name != "growth" and (new := after.keys() - before.keys()):
            self.report.wrong.append(f"{where}: worker jobs were submitted again: {new}")
        if not np.array_equal(self.cluster.restore("numbers").compute(), self.saved):
            self.report.wrong.append(f"{where}: the checkpoint does not hold what was saved")
        if self.client.list_datasets() != ("published",):
            self.report.wrong.append(f"{where}: published are {self.client.list_datasets()}")

    def _worker_jobs(self) -> dict[str, str]:
        """Return the states of the worker jobs, by id."""
        return {str(job.id): job.state for job in self.cluster.jobs if job.kind == "worker" and job.state == "running"}


def _until_it_fails(function: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # its scheduler is killed
        function()


@contextlib.contextmanager
def cluster_on(slurm: bool, place: Path) -> Iterator[tuple[type[GPUCluster], dict[str, Any], Callable[[], list[str]]]]:
    """Yield a class of clusters, its options, and a function that returns the jobs in the queue."""
    options: dict[str, Any] = {"gpus_per_node": 0, "cores": 1, "memory": "1GB", "poll_interval": 1, "quiet": True}
    if not slurm:
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = str(place / "queue")
        queue = LocalQueue(place / "queue", gpus=0)

        def live() -> list[str]:
            ids = [path.stem for path in (place / "queue" / "jobs").glob("*.json")]
            return sorted(i for i, status in queue.poll(ids).items() if not status.state.ended)

        yield LocalGPUCluster, options, live
        return
    import bed as slurm_bed

    with slurm_bed.started(place / "slurm") as bed:
        options |= {"queue": "gpu", "walltime": "01:00:00", "scheduler": {"queue": "shared", "constraint": "t4"}}
        yield SlurmGPUCluster, options, lambda: [job.name for job in bed.squeue() if job.state != "COMPLETING"]


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slurm", action="store_true")
    arguments = parser.parse_args()
    report, choose = Report(), random.Random(arguments.seed)
    scheduler_restarts.LIMIT = 10**6  # this is no queue that kills each scheduler
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        with cluster_on(arguments.slurm, place) as (cls, options, live):
            options |= {"cluster_directory": place / "clusters", "checkpoint_directory": place / "saved"}
            with cls(name="ends", jobs=2, on_scheduler_end="restart", **options) as cluster, Client(cluster) as client:
                cluster.wait_for_workers(2)
                rounds = Rounds(cluster, client, choose, report)
                for number in range(arguments.rounds):
                    rounds.one(number)
                submits = cluster.directory.submits()
            if len({submit.name for submit in submits}) != len(submits):
                report.wrong.append("a name was submitted twice")
            if left := live():
                report.wrong.append(f"left in the queue: {left}")
    show(report)
    sys.exit(bool(report.wrong))


def show(report: Report) -> None:
    """Print what was seen."""
    print(f"the scheduler was killed {len(report.seconds)} times, during {dict(report.rounds)}")
    print(f"checkpoints meanwhile: {dict(report.checkpoints)}")
    if report.seconds:
        middle, most = statistics.median(report.seconds), max(report.seconds)
        print(f"from the kill to the first result of the next scheduler: median {middle:.1f} s, at most {most:.1f} s")
    print("\n".join(f"WRONG: {text}" for text in report.wrong) or "no worker job was lost, and nothing that was saved")


if __name__ == "__main__":
    main()
