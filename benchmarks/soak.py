"""A cluster that is left alone while all around it fails: adaptive, under a changing load, on a real Slurm, with
walltimes of two minutes.

Meanwhile jobs are cancelled with scancel, nodes go down and come back, slurmctld is restarted, and the scheduler is
killed: a batch that its end cancels is computed again. At the end every result must be right, no job may be left, and
no job name used twice. In a soak of more than half an hour the memory of the manager and of the scheduler must not
grow from its second to its last sixth. ``python benchmarks/soak.py --minutes 60``
starts a Slurm of its own (as root).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from distributed.client import FutureCancelledError

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]


@dataclass
class Report:
    """What the soak met."""

    results: int = 0
    #: Batches that were computed again because the scheduler was killed.
    repeated: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    jobs: int = 0
    #: Memory in MiB at equal intervals: of this process, which holds the manager and the client, and of the scheduler.
    memory: list[tuple[float, float]] = field(default_factory=list)

    def count(self, fault: str) -> None:
        """Take note of a fault that was made."""
        self.faults[fault] = self.faults.get(fault, 0) + 1


def load(client: Any, until: float, seed: int, report: Report) -> None:
    """Compute batches of changing size, with pauses, and check each result."""

    def task(index: int, seconds: float) -> int:
        time.sleep(seconds)
        return index * index

    def batch(indices: range, seconds: float) -> tuple[list[int], int]:
        futures = client.map(task, indices, seconds=seconds, pure=False)
        total = client.submit(sum, futures, pure=False)
        return client.gather(futures), total.result()

    choice = random.Random(seed)
    offset = 0
    while time.monotonic() < until:
        size, seconds = choice.choice([4, 20, 60]), choice.choice([0.2, 0.5, 2.0])
        indices = range(offset, offset + size)
        offset += size
        expected = [index * index for index in indices]
        try:
            while True:
                with contextlib.suppress(FutureCancelledError):
                    found = batch(indices, seconds)
                    break
                report.repeated += 1
            if found != (expected, sum(expected)):
                report.wrong.append(f"the batch from {offset} has wrong results")
        except Exception as error:
            report.wrong.append(f"the batch from {offset} failed: {error!r}")
        report.results += size
        time.sleep(choice.choice([0.0, 0.0, 5.0, 20.0]))


def watch(client: Any, stop: threading.Event, report: Report) -> None:
    """Take note of the memory of manager and scheduler every ten seconds. All nodes of this Slurm are this machine."""
    while not stop.wait(10):
        with contextlib.suppress(Exception):  # between two schedulers
            both = psutil.Process(), psutil.Process(client.run_on_scheduler(os.getpid))
            manager, scheduler = (process.memory_info().rss / 2**20 for process in both)
            report.memory.append((manager, scheduler))


def growth(memory: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the medians of each sixth of the time, in MiB, for the manager and for the scheduler."""
    length = len(memory) / 6
    sixths = [memory[round(n * length) : round((n + 1) * length)] for n in range(6)] if length >= 1 else []
    return {
        name: [statistics.median(sample[which] for sample in sixth) for sixth in sixths]
        for which, name in enumerate(("manager", "scheduler"))
    }


def faults(bed: Any, cluster: Any, client: Any, stop: threading.Event, seed: int, report: Report) -> None:
    """Let things fail, one after the other."""
    choice = random.Random(seed)

    def cancel() -> None:
        jobs = [job.id for job in cluster.jobs if job.kind == "worker" and job.state in ("pending", "running")]
        if jobs:
            subprocess.run(["scancel", choice.choice(jobs)], check=True)

    def node() -> None:
        name = choice.choice(["n0", "n1", "n2", "n3"])
        bed.node_down(name)
        stop.wait(15)
        bed.node_up(name)

    def controller() -> None:
        bed.stop_controller()
        stop.wait(10)
        bed.start_controller()

    def scheduler() -> None:
        with contextlib.suppress(Exception):  # the one before is still being replaced
            os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
            report.count("scheduler killed")

    kinds: dict[str, Callable[[], None]] = {
        "job cancelled": cancel,
        "node down": node,
        "slurmctld restarted": controller,
    }
    for number in itertools.count():
        if stop.wait(choice.uniform(8, 20)):
            return
        if number % 10 == 5:
            scheduler()
            continue
        kind = list(kinds)[number % len(kinds)]
        kinds[kind]()
        report.count(kind)


def soak(bed: Any, minutes: float, seed: int = 0, **options: Any) -> Report:
    """Run it; what is wrong stands in the report."""
    from distributed import Client

    from hpcgpu import SlurmGPUCluster

    report = Report()
    settings: dict[str, Any] = {
        "queue": "gpu",
        "gpus_per_node": 0,
        "cores": 1,
        "memory": "1GB",
        "walltime": "00:02:00",
        "scheduler": {"queue": "shared", "constraint": "t4", "walltime": "2-00:00:00"},
        "worker_restarts": 1000,
        "on_scheduler_end": "restart",
        "poll_interval": 2,
        "quiet": True,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with SlurmGPUCluster(**settings | options) as cluster, Client(cluster) as client:
            adaptive = cluster.adapt(minimum_jobs=1, maximum_jobs=4, target_duration="5s")
            stop = threading.Event()
            chaos = threading.Thread(target=faults, args=(bed, cluster, client, stop, seed, report))
            chaos.start()
            watcher = threading.Thread(target=watch, args=(client, stop, report))
            watcher.start()
            try:
                load(client, time.monotonic() + 60 * minutes, seed, report)
            finally:
                stop.set()
                chaos.join()
                watcher.join()
            report.log = [f"{time.strftime('%T', time.localtime(at))} {text}" for at, text in adaptive.log]
            report.jobs = sum(job.kind == "worker" for job in cluster.jobs)
            if adaptive.state.paused:
                report.wrong.append(f"adaptive scaling paused: {adaptive.state.paused}")
        report.log += [f"warning: {str(warning.message).splitlines()[0]}" for warning in caught]
    if minutes > 30:
        report.wrong += [
            f"the memory of the {name} grew: {sixths}"
            for name, sixths in growth(report.memory).items()
            if sixths[-1] > 1.1 * sixths[1]
        ]
    report.wrong += left(bed, cluster)
    return report


def left(bed: Any, cluster: Any) -> list[str]:
    """Return what is wrong with the jobs of a cluster that is closed."""
    wrong = []
    names = [job.name for job in bed.squeue() if job.state != "COMPLETING"]
    if names:
        wrong.append(f"left in the queue: {names}")
    lines = [json.loads(line) for line in (cluster.directory.path / "journal.jsonl").read_text().splitlines()]
    ids = [line["id"] for line in lines if line["event"] == "submitted"]
    intents = [line["name"] for line in lines if line["event"] == "intent"]
    if len(set(ids)) != len(ids) or len(set(intents)) != len(intents):
        wrong.append("a job was submitted twice")
    return wrong


def show(report: Report) -> None:
    """Print what happened."""
    print("\n".join(report.log))
    print(f"{report.results} results checked, {report.jobs} worker jobs, faults: {report.faults}")
    print(f"{report.repeated} batches were computed again, because the scheduler was killed meanwhile")
    for name, sixths in growth(report.memory).items():
        print(f"memory of the {name}, median of each sixth of the time: {' '.join(f'{m:.0f}' for m in sixths)} MiB")
    print(
        "\n".join(f"WRONG: {text}" for text in report.wrong) or "every result right, no job left, none submitted twice"
    )


def main() -> None:
    """Start a Slurm and soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import bed as slurm_bed

    from hpcgpu.scaling import scheduler_restarts

    scheduler_restarts.LIMIT = 10**6  # this is no queue that kills each scheduler

    with tempfile.TemporaryDirectory() as temporary, slurm_bed.started(Path(temporary) / "slurm") as bed:
        report = soak(bed, arguments.minutes, arguments.seed, cluster_directory=str(Path(temporary) / "clusters"))
    show(report)
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
