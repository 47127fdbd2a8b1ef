"""The scheduler of a cluster ends at random moments, again and again, with ``on_scheduler_end="restart"``.

Each round begins something (tasks, a shuffle, a checkpoint, growth, a drain, nothing), and at a random moment of it the
scheduler is killed or, on Slurm, its job ends in another way: see slurm_ends.py. In some rounds the program that
manages the cluster is killed at the same moment, and another one takes the cluster over; in others the node of a worker
job is switched off, or both. After each round the cluster must compute, the worker jobs that ran must run (but for
those that were to end, and those whose node was lost), none may be there twice, and what was saved must be there, bit
by bit.
At the end no job may be left, and none submitted twice.

With ``--starts`` it also makes clusters whose scheduler is killed while it starts, again while the workers of the next
one start, and in half of them while the cluster closes. Each must compute, or its start must fail with an error; no
job may be left.

    python benchmarks/scheduler_ends.py --rounds 50 --seed 1                           # the embedded queue
    python benchmarks/scheduler_ends.py --rounds 50 --seed 1 --slurm                   # a Slurm of its own (as root)
    python benchmarks/scheduler_ends.py --rounds 9 --slurm --ends suspended "node off" --with manager
    python benchmarks/scheduler_ends.py --rounds 9 --seed 1 --pbs                      # an OpenPBS that runs, as a user
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client
from distributed.client import FutureCancelledError
from slurm_ends import KINDS, KINDS_OF_PBS, OF_NODE, Kind, Victim

import hpcgpu
from hpcgpu import CheckpointError, ClusterError, GPUCluster, LocalGPUCluster, PBSGPUCluster, SlurmGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.scaling import replace_failed_jobs, scheduler_restarts
from hpcgpu.scaling.scheduler_restarts import STANDBY

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]

#: Seconds that a cluster may take until it computes again.
PATIENCE = 150.0
#: Seconds after the beginning of a round in which the scheduler ends.
LATEST = 4.0
#: Nodes of the Slurm that worker jobs can have.
NODES = 4
#: What may fail at the same moment.
WITH = ("nothing", "manager", "worker node", "manager and worker node")
#: A program that manages the cluster until it is killed.
MANAGER = """
import sys, warnings, hpcgpu
from hpcgpu.scaling import scheduler_restarts
warnings.simplefilter("ignore")
scheduler_restarts.LIMIT = 10**6
cluster = getattr(hpcgpu, sys.argv[1]).from_name(sys.argv[2])
print("manages", flush=True)
sys.stdin.read()
"""


@dataclass
class Queue:
    """Where the cluster runs."""

    cls: type[GPUCluster]
    options: dict[str, Any]
    #: Returns the names of the jobs that are in the queue.
    live: Callable[[], list[str]]
    bed: Any = None
    kinds: dict[str, Kind] = field(default_factory=lambda: KINDS)


@dataclass
class Report:
    """What was seen."""

    rounds: Counter[str] = field(default_factory=Counter)
    activities: Counter[str] = field(default_factory=Counter)
    #: Seconds from each end to the first result of the next scheduler.
    seconds: list[float] = field(default_factory=list)
    checkpoints: Counter[str] = field(default_factory=Counter)
    #: What came of clusters whose scheduler was killed while it started.
    starts: Counter[str] = field(default_factory=Counter)
    #: Worker jobs whose node was lost.
    lost: int = 0
    #: Why a take-over had to be tried again.
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Rounds:
    """Begins things on a cluster, ends its scheduler, and checks what is left.

    Parameters
    ----------
    cluster : GPUCluster
    client : distributed.Client
    queue : Queue
    place : Path
        Of the checkpoints.
    choose : random.Random
    report : Report
    """

    def __init__(
        self, cluster: GPUCluster, client: Client, queue: Queue, place: Path, choose: random.Random, report: Report
    ) -> None:
        self.cluster, self.client, self.choose, self.report = cluster, client, choose, report
        self.queue, self.place, self.size = queue, place, 2
        numbers = client.persist(da.random.random((200, 200), chunks=(50, 60)))
        self.saved = numbers.compute()
        hpcgpu.checkpoint(client, numbers, place, name="numbers", quiet=True)
        client.publish_dataset(published=numbers)
        cluster.checkpoint(numbers, name="published")

    def one(self, number: int, kind: str, also: str) -> None:
        """Do one round."""
        name = self._activity(also)
        where = f"round {number} ({kind}, with {also}, during {name})"
        print(f"{time.strftime('%T')} {where}", flush=True)
        self.report.rounds[f"{kind}, with {also}"] += 1
        self.report.activities[name] += 1
        before, job = self._worker_jobs(), self._scheduler_job()
        kept = self.client.submit(pow, 3, 4, pure=False)
        kept.result(timeout=PATIENCE)
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(self._manager()) if also.startswith("manager") else None
            doing = Activity(self._activities()[name])
            time.sleep(self.choose.uniform(0, LATEST))
            nodes = {job.node} if kind in OF_NODE else set()
            others = sorted(set(before.values()) - {job.node})
            room = NODES - len(nodes - {"s0"}) > self.size  # each job needs a node of its own
            if also.endswith("worker node") and others and room:
                nodes.add(node := self.choose.choice(others))
                stack.callback(self.queue.bed.node_up, node)
                self.queue.bed.switch_off(node)
            early = manager is not None and self.choose.random() < 0.5
            if early:
                threading.Timer(self.choose.uniform(0, 3), manager.kill).start()
            stack.enter_context(self.queue.kinds[kind](job))
            if nodes - {job.node}:
                self.queue.bed.node_down(node)
            if kind != "suspended" and not early:
                self._until(lambda: job.name not in self.queue.live(), f"{job.name} has ended")
            if manager is not None:
                self._take_over(manager)
            if kind != "suspended":
                self._until(lambda: job.name not in self.queue.live(), f"{job.name} has ended")
            ended = time.monotonic()
            doing.join(PATIENCE)
            if kind == "suspended":
                self._is_the_same(where, job, doing, kept)
            self._works(where, ended, kind)
            self._check(where, before, name, nodes)

    def _activity(self, also: str) -> str:
        """Choose what is begun. A program that another one has taken the cluster over from cannot scale it."""
        names = ["nothing", "tasks", "shuffle", "checkpoint"]
        if not also.startswith("manager"):
            names.append("drain" if self.size == 3 else "growth")
        return self.choose.choice(names)

    def _activities(self) -> dict[str, Callable[[], object]]:
        return {
            "nothing": lambda: None,
            "tasks": lambda: self.client.gather(
                self.client.map(lambda x: time.sleep(0.1) or x, range(100), pure=False)
            ),
            "shuffle": lambda: da.random.random((600, 600), chunks=(60, 600)).rechunk((600, 60)).sum().compute(),
            "checkpoint": self._checkpoint,
            "growth": lambda: self._scale(3),
            "drain": lambda: self._scale(2),
        }

    def _checkpoint(self) -> None:
        numbers = self.client.persist(da.random.random((200, 200), chunks=(50, 60)))
        new = numbers.compute()
        try:
            hpcgpu.checkpoint(self.client, numbers, self.place, name="numbers", quiet=True)
        except CheckpointError:
            self.report.checkpoints["not saved"] += 1
        else:
            self.saved = new
            self.report.checkpoints["saved"] += 1

    def _scale(self, jobs: int) -> None:
        self.size = jobs
        self.cluster.scale(jobs=jobs)

    @contextlib.contextmanager
    def _manager(self) -> Iterator[subprocess.Popen[str]]:
        """Another program, which takes the cluster over."""
        argv = [sys.executable, "-c", MANAGER, self.queue.cls.__name__, str(self.cluster.directory.path)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            try:
                assert program.stdout is not None and program.stdout.readline() == "manages\n"
                yield program
            finally:
                program.kill()

    def _take_over(self, manager: subprocess.Popen[str]) -> None:
        """Kill the program that manages the cluster, if that has not happened, and take the cluster over."""
        manager.kill()
        manager.wait()
        begun = time.monotonic()
        while True:
            try:
                earlier, self.cluster = self.cluster, self.queue.cls.from_name(self.cluster.directory.path)
                earlier.close()
                return
            except ClusterError as error:
                self.report.refused[str(error).splitlines()[0]] += 1
                if time.monotonic() - begun > PATIENCE:
                    raise
                time.sleep(1)

    def _is_the_same(self, where: str, job: Victim, doing: Activity, kept: Any) -> None:
        """Nothing was started again for a scheduler that was suspended, and nothing is lost."""
        if self.client.run_on_scheduler(os.getpid) != job.pid or self._scheduler_job().id != job.id:
            self.report.wrong.append(f"{where}: there is another scheduler")
        if doing.failure is not None:
            self.report.wrong.append(f"{where}: {doing.failure!r}")
        if kept.result(timeout=PATIENCE) != 81:
            self.report.wrong.append(f"{where}: a wrong result")

    def _works(self, where: str, ended: float, kind: str) -> None:
        """Wait until the cluster computes again, with all its workers."""
        try:
            while True:
                try:
                    result = self.client.submit(pow, 2, 5, pure=False).result(timeout=PATIENCE)
                    break
                except FutureCancelledError:  # it was submitted before the client had noticed the loss
                    if time.monotonic() - ended > PATIENCE:
                        raise
            if kind != "suspended":
                self.report.seconds.append(time.monotonic() - ended)
            self.cluster.settle()
            self.cluster.wait_for_workers(self.size, timeout=PATIENCE)
            array = np.arange(3600).reshape(60, 60)
            turned = da.from_array(array, chunks=(6, 60)).rechunk((60, 6)).T.compute(scheduler=self.client)
            if result != 32 or not np.array_equal(turned, array.T):
                self.report.wrong.append(f"{where}: a wrong result")
        except Exception as error:
            self.report.wrong.append(f"{where}: the cluster does not compute again: {error!r}")
            raise

    def _check(self, where: str, before: dict[str, str], name: str, nodes: set[str]) -> None:
        """Compare the jobs with those before the round, and what was saved with what is restored."""
        wrong = self.report.wrong
        workers = lambda: [job for job in self.queue.live() if "-scheduler" not in job]  # noqa: E731
        try:
            self._until(lambda: len(workers()) == self.size, f"{self.size} worker jobs are in the queue")
        except TimeoutError:
            wrong.append(f"{where}: in the queue are {self.queue.live()}")
        self.cluster.settle()
        after = self._worker_jobs()
        lost = {job for job, node in before.items() if node in nodes}
        self.report.lost += len(lost)
        gone, new = before.keys() - after.keys(), after.keys() - before.keys()
        if len(gone - lost) > (name == "drain"):
            wrong.append(f"{where}: worker jobs are gone: {gone - lost}")
        if len(new) > len(lost) + (name == "growth"):
            wrong.append(f"{where}: worker jobs were submitted again: {new}, for {lost}")
        in_queue = self.queue.live()
        schedulers = [job for job in in_queue if "-scheduler" in job]
        if len(set(in_queue)) != len(in_queue) or len(schedulers) not in (1, 2):
            wrong.append(f"{where}: in the queue are {in_queue}")
        restored = hpcgpu.restore(self.client, self.place, name="numbers", quiet=True)
        if not np.array_equal(restored.compute(), self.saved):
            wrong.append(f"{where}: the checkpoint does not hold what was saved")
        if self.client.list_datasets() != ("published",):
            wrong.append(f"{where}: published are {self.client.list_datasets()}")

    def _worker_jobs(self) -> dict[str, str]:
        """Return the nodes of the worker jobs that run, by name."""
        return {job.name: job.node for job in self.cluster.jobs if job.kind == "worker" and job.state == "running"}

    def _scheduler_job(self) -> Victim:
        [job] = [
            job
            for job in self.cluster.jobs
            if job.kind == "scheduler" and job.state == "running" and job.reason != STANDBY
        ]
        pid = self.client.run_on_scheduler(os.getpid)
        return Victim(self.queue.bed, self.client, self.choose, job.id, job.name, job.node, pid)

    def _until(self, met: Callable[[], bool], what: str) -> None:
        begun = time.monotonic()
        while not met():
            if time.monotonic() - begun > PATIENCE:
                raise TimeoutError(what)
            time.sleep(0.2)


class Killer(threading.Thread):
    """Kills the schedulers of a cluster that it has not seen yet, some seconds after each has started.

    Most of the first ones listen by then: a start fails if they do not.
    """

    def __init__(self, directory: Path, choose: random.Random, times: int, latest: float) -> None:
        super().__init__(daemon=True)
        self.directory, self.times, self.seen, self.stop = directory, times, set[int](), threading.Event()
        self.delays = [choose.uniform(0, latest) for _ in range(times)]
        self.listens = choose.random() < 0.75
        self.start()

    def run(self) -> None:
        """Kill so many of them."""
        for delay in self.delays:
            while not (there := self.schedulers() - self.seen):
                if self.stop.wait(0.1):
                    return
            while self.listens and not (self.directory / "contact.json").exists() and not self.stop.wait(0.05):
                pass
            time.sleep(delay)
            self.seen |= there
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def schedulers(self) -> set[int]:
        """Return the processes of the schedulers of the cluster."""
        words = [b"hpcgpu.runtime.launch", b"scheduler", os.fsencode(self.directory)]
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if not {*words} - {*path.read_bytes().split(b"\0")}:
                    found.add(int(path.parent.name))
        return found


def start_and_close(queue: Queue, place: Path, number: int, choose: random.Random, report: Report) -> None:
    """Make a cluster whose scheduler is killed while it starts, and twice; close it."""
    name, closing = f"end-{number}", choose.random() < 0.5
    where = f"start {number}, killed while it closes: {closing}"
    print(f"{time.strftime('%T')} {where}", flush=True)
    killer = Killer(place / "clusters" / name, choose, times=2, latest=6.0)
    cluster = None
    try:
        cluster = queue.cls(name=name, jobs=2, **queue.options, cluster_directory=place / "clusters")
        killer.join(PATIENCE)
        cluster.wait_for_workers(2, timeout=PATIENCE)
        with hpcgpu.connect(cluster.directory.path, quiet=True) as client:
            if client.submit(pow, 2, 5).result(timeout=PATIENCE) != 32:
                report.wrong.append(f"{where}: a wrong result")
        report.starts["it computes"] += 1
    except ClusterError as error:
        report.starts[f"{type(error).__name__}: {str(error).partition(': ')[0]}"] += 1
    except Exception as error:
        report.wrong.append(f"{where}: {error!r}")
    killer.stop.set()
    killer.join()
    if cluster is not None:
        submits = [one for one in cluster.directory.submits() if one.kind == "worker"]
        if len(submits) != 2:
            report.wrong.append(f"{where}: worker jobs submitted: {[one.name for one in submits]}")
        if closing:
            killer.seen.clear()
            delay, pids = choose.uniform(0, 3), killer.schedulers()
            kill = lambda: [os.kill(pid, signal.SIGKILL) for pid in pids & killer.schedulers()]  # noqa: E731
            threading.Timer(delay, kill).start()
        cluster.close()
    begun = time.monotonic()
    while left := queue.live():
        if time.monotonic() - begun > PATIENCE:
            report.wrong.append(f"{where}: left in the queue: {left}")
            break
        time.sleep(0.5)


class Activity(threading.Thread):
    """Something that runs beside, and may fail: its scheduler ends."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.function, self.failure = function, None
        self.start()

    def run(self) -> None:
        """Run it, and keep its error."""
        try:
            self.function()
        except Exception as error:
            self.failure = error


OPTIONS: dict[str, Any] = {
    "gpus_per_node": 0,
    "cores": 1,
    "memory": "1GB",
    "poll_interval": 1,
    "quiet": True,
    "worker_restarts": 10**6,
    "on_scheduler_end": "restart",
}


def local_queue(place: Path) -> Queue:
    """The embedded queue, with its files in this directory."""
    os.environ["HPCGPU_QUEUE_DIRECTORY"] = str(place / "queue")
    queue = LocalQueue(place / "queue", gpus=0)

    def live() -> list[str]:
        ids = [path.stem for path in (place / "queue" / "jobs").glob("*.json")]
        return sorted(status.name for status in queue.poll(ids).values() if not status.state.ended)

    return Queue(LocalGPUCluster, OPTIONS, live)


def slurm_queue(bed: Any) -> Queue:
    """A Slurm of tests/slurm/bed.py."""
    bed.set_partition("urgent", "Nodes=n[0-3],s0")  # which may have the scheduler's node, too
    options = OPTIONS | {"queue": "gpu", "walltime": "01:00:00", "scheduler": {"queue": "shared", "prefer": "t4"}}
    options |= {"cores": 9}  # of sixteen: each job has a node of its own

    def live() -> list[str]:  # without the jobs that preempt
        return [job.name for job in bed.squeue() if job.state != "COMPLETING" and job.name.startswith("end-")]

    return Queue(SlurmGPUCluster, options, live, bed)


def pbs_queue() -> Queue:
    """The PBS of this host."""

    def live() -> list[str]:
        done = subprocess.run(["qstat", "-f", "-F", "json"], check=True, capture_output=True, text=True)
        # PBS has the first fifteen characters of the names
        jobs = json.loads(done.stdout).get("Jobs", {}).values()
        there = [job["Job_Name"] for job in jobs if job["job_state"] not in ("E", "F")]
        return sorted(name for name in there if name.startswith("end-"))

    options = OPTIONS | {"queue": "gpu", "walltime": "01:00:00"}
    return Queue(PBSGPUCluster, options, live, kinds=KINDS_OF_PBS)


def attack(queue: Queue, place: Path, rounds: list[tuple[str, str]], seed: int) -> Report:
    """Do the rounds, each of a kind of end and of what fails with it."""
    report, choose = Report(), random.Random(seed)
    scheduler_restarts.LIMIT = 10**6  # this is no queue that kills each scheduler
    replace_failed_jobs._BACKOFF = (0.0, 1.0, 1.0, 1.0, 1.0)
    replace_failed_jobs._EXCLUDED = 1  # there are only four nodes
    options = queue.options | {"cluster_directory": place / "clusters", "checkpoint_directory": place / "saved"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = queue.cls(name="end", jobs=2, **options)
        with hpcgpu.connect(cluster.directory.path, quiet=True) as client:
            done = Rounds(cluster, client, queue, place / "saved", choose, report)
            try:
                cluster.wait_for_workers(2)
                for number, (kind, also) in enumerate(rounds):
                    done.one(number, kind, also)
            except Exception as error:
                report.wrong.append(f"the rounds end: {error!r}")
            finally:
                done.cluster.close()
    submits = cluster.directory.submits()
    if len({submit.name for submit in submits}) != len(submits):
        report.wrong.append("a name was submitted twice")
    if left := queue.live():
        report.wrong.append(f"left in the queue: {left}")
    return report


def rounds_of(number: int, kinds: list[str], also: list[str], seed: int) -> list[tuple[str, str]]:
    """Return rounds in which each kind of end comes as often as any other, in random order."""
    choose, rounds = random.Random(seed), list[tuple[str, str]]()
    while len(rounds) < number:
        rounds += choose.sample(both := [(kind, what) for kind in kinds for what in also], len(both))
    return rounds[:number]


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--starts", type=int, default=0, help="clusters whose scheduler is killed while it starts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--pbs", action="store_true")
    parser.add_argument("--ends", nargs="+", choices=KINDS, help="default: all, or 'killed' in the embedded queue")
    parser.add_argument("--with", nargs="+", choices=WITH, dest="also", help="what fails at the same moment")
    arguments = parser.parse_args()
    kinds, also = arguments.ends or ["killed"], arguments.also or ["nothing"]
    if arguments.slurm:
        kinds, also = arguments.ends or list(KINDS), arguments.also or list(WITH)
    elif arguments.pbs:
        kinds, also = arguments.ends or list(KINDS_OF_PBS), arguments.also or ["nothing", "manager"]
    rounds = rounds_of(arguments.rounds, kinds, also, arguments.seed)
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.slurm:
            import bed as slurm_bed

            queue = slurm_queue(stack.enter_context(slurm_bed.started(place / "slurm", slurm_bed.FAST)))
        else:
            queue = pbs_queue() if arguments.pbs else local_queue(place)
        report = attack(queue, place, rounds, arguments.seed) if rounds else Report()
        choose = random.Random(arguments.seed)
        warnings.simplefilter("ignore")
        for number in range(arguments.starts):
            start_and_close(queue, place, number, choose, report)
    show(report)
    sys.exit(bool(report.wrong))


def show(report: Report) -> None:
    """Print what was seen."""
    print(f"{sum(report.rounds.values())} rounds, during {dict(report.activities)}:")
    print("\n".join(f"  {number} x {what}" for what, number in sorted(report.rounds.items())))
    print(f"checkpoints meanwhile: {dict(report.checkpoints)}; worker jobs whose node was lost: {report.lost}")
    print("\n".join(f"killed while it started: {number} x {what}" for what, number in report.starts.items()))
    print("\n".join(f"taken over again after: {number} x {why}" for why, number in report.refused.items()))
    if report.seconds:
        middle, most = statistics.median(report.seconds), max(report.seconds)
        print(f"from the end to the next result: median {middle:.1f} s, at most {most:.1f} s")
    print("\n".join(f"WRONG: {text}" for text in report.wrong) or "no worker job was lost, and nothing that was saved")


if __name__ == "__main__":
    main()
