"""Programs that take a cluster over from each other, two at a time, and are killed at random moments.

Each orders sizes of the worker group until it is killed, or until the other has taken the cluster over. After each
round the queue is compared with the journal: no job may be in it twice or be unknown to the journal, and the one
scheduler must run. Data that was there before the first round must be there after the last one.

    python benchmarks/take_overs.py --rounds 100 --seed 1 --keep /tmp/wrong

With ``--keep``, the queue and the cluster's directory are copied there after each round in which something was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from hpcgpu.store.directory import ClusterDirectory

NAME = "taken"
TAKER = f"""
import random, sys, warnings
from hpcgpu import ClusterError, LocalGPUCluster
warnings.simplefilter("ignore")
choose = random.Random(int(sys.argv[1]))
try:
    cluster = LocalGPUCluster.from_name({NAME!r}, shutdown_on_close=False, quiet=True)
    for _ in range(20):
        size = choose.randint(1, 4)
        cluster.scale(jobs=size)
        print("ordered", size, flush=True)
        if choose.random() < 0.5:
            cluster.settle()
    cluster.close()
except ClusterError as error:
    print("ended:", str(error).splitlines()[0], flush=True)
"""
#: Seconds that the last size may take.
PATIENCE = 180.0


@dataclass
class Report:
    """What was seen."""

    orders: int = 0
    submits: int = 0
    kills: int = 0
    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def live() -> dict[str, str]:
    """Names of the jobs that the queue has, by id."""
    from hpcgpu.batch.local.queue import LocalQueue

    queue = LocalQueue(Path(os.environ["HPCGPU_QUEUE_DIRECTORY"]))
    ids = [path.stem for path in (queue.directory / "jobs").glob("*.json")]
    return {job_id: status.name for job_id, status in queue.poll(ids).items() if not status.state.ended}


def compare(directory: ClusterDirectory, report: Report, when: str) -> None:
    """Compare the queue with the journal."""
    found = live()
    counts = Counter(found.values())
    report.wrong += [f"{when}: {name} is {n} times in the queue" for name, n in counts.items() if n > 1]
    submits = {submit.name: submit for submit in directory.submits()}
    for job_id, name in found.items():
        if name not in submits or submits[name].job_id not in (None, job_id):
            report.wrong.append(f"{when}: job {job_id} ({name}) is unknown to the journal")
    if sum(name.endswith("-scheduler") for name in counts) != 1:
        report.wrong.append(f"{when}: there is no scheduler among {sorted(counts)}")


def one_round(choose: random.Random, report: Report, when: str) -> None:
    """Let two programs take the cluster over, and kill both."""
    takers: list[tuple[subprocess.Popen[bytes], IO[str]]] = []
    for _ in range(2):
        command = [sys.executable, "-P", "-c", TAKER, str(choose.randrange(10**9))]
        printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read after the end of the program
        takers.append((subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT), printed))
        time.sleep(choose.uniform(0, 1.5))
    for taker, printed in choose.sample(takers, 2):
        deadline = time.monotonic() + choose.choice([1, 30, 30])
        while taker.poll() is None and not os.fstat(printed.fileno()).st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(choose.choice([0, 0.1, 1, 4]) * choose.random())
        report.kills += taker.poll() is None
        taker.send_signal(choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
    for taker, printed in takers:
        taker.wait(120)
        printed.seek(0)
        text = printed.read()
        printed.close()
        report.orders += text.count("ordered")
        report.said.update(line.partition(" by ")[0] for line in text.splitlines() if line.startswith("ended"))
        if "Traceback" in text:
            report.wrong.append(f"{when}: {text[-2000:]}")


def attack(rounds: int, seed: int, place: Path, keep: Path | None) -> Report:
    """Run so many rounds, and copy ``place`` to ``keep`` after each that went wrong."""
    from hpcgpu import LocalGPUCluster

    choose, report, data = random.Random(seed), Report(), list(range(1000))
    options = {"gpus_per_node": 0, "cores": 1, "memory": "1GB", "lease": 0, "poll_interval": "2s", "quiet": True}
    first = LocalGPUCluster(name=NAME, jobs=2, **options)
    first.wait_for_workers(2)
    directory, client = first.directory, first.get_client()
    kept = client.scatter(data)
    first.detach()
    for at in range(rounds):
        wrong = len(report.wrong)
        one_round(choose, report, f"round {at}")
        compare(directory, report, f"round {at}")
        if keep and len(report.wrong) > wrong:
            subprocess.run(["cp", "-a", place, keep / f"round-{at}"], check=True)  # also sockets, unlike copytree
        print(f"round {at}: {report.orders} orders, {len(live())} jobs, {len(report.wrong)} wrong", flush=True)
    last = LocalGPUCluster.from_name(NAME, quiet=True)
    last.scale(jobs=2)
    last.settle()
    last.wait_for_workers(2)
    deadline = time.monotonic() + PATIENCE
    while len(live()) != 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    compare(directory, report, "at the end")
    if len(live()) != 3:
        report.wrong.append(f"at the end: {live()}, and not a scheduler and two worker jobs")
    if client.gather(kept) != data:
        report.wrong.append("at the end: the data is not what it was")
    names = Counter(submit.name for submit in directory.submits())
    report.submits = len(names)
    report.wrong += [f"the journal has {name} {n} times" for name, n in names.items() if n > 1]
    client.close()
    last.close()
    if live():
        report.wrong.append(f"after the cluster was closed: {live()}")
    return report


def main() -> int:
    """Run the attack in a directory of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY")
    chosen = parser.parse_args()
    if chosen.keep:
        chosen.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = f"{place}/queue"
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = f"{place}/clusters"
        os.environ["DASK_TEMPORARY_DIRECTORY"] = f"{place}/dask"
        warnings.simplefilter("ignore")
        report = attack(chosen.rounds, chosen.seed, Path(place), chosen.keep)
    print(
        f"{chosen.rounds} rounds, seed {chosen.seed}: {report.kills} programs killed, {report.orders} orders, "
        f"{report.submits} jobs submitted"
    )
    for line, n in report.said.most_common(10):
        print(f"  {n} x {line}")
    for line in report.wrong:
        print("WRONG:", line)
    print(f"{len(report.wrong)} wrong" if report.wrong else "nothing was lost or doubled")
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
