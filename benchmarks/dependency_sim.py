"""When worker jobs may start: simulates ways to keep them behind the scheduler job, in three queues of a Slurm.

``python benchmarks/dependency_sim.py`` prints for each queue and each way: seconds until the first worker is connected,
GPU seconds that worker jobs hold before the scheduler job starts, jobs that lose their place in the queue, and jobs
that nobody submits again where the cluster has no manager. It is pure, and its seed is fixed.

The queues: *idle* starts each job at once. In *hours* all jobs wait, the worker jobs a bit longer, because they are
larger. In *crossed* all jobs wait for hours, in any order. In *last* the worker jobs could start within minutes, and
the scheduler job waits for hours. In each, places are counted from the submit (``priority/basic``, ``ACCRUE_ALWAYS``),
or, as age, only while a job may start (``priority/multifactor`` with all weight on age; real sites are between the
two).

The seconds that Slurm needs are measured, see docs/architecture.md: it starts what a change made startable 3 s after
the last time that it looked, and else in its next cycle of 30 s.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

JOBS, GPUS = 4, 4
CYCLE, AFTER_CHANGE = 30.0, 3.0
#: Seconds from the start of the scheduler job to its contact, and from that of a worker job to its readiness.
READY, IMPORTS = 2.5, 2.0
#: Seconds after which a worker job that finds no scheduler ends (option B).
RELEASE = 60.0
HOUR = 3600.0


@dataclass(frozen=True)
class Queue:
    """How long jobs wait that may start; by age, their place counts from then on, else from the submit. None starts
    before Slurm has looked at the queue.
    """

    scheduler: float
    workers: tuple[float, ...]
    again: tuple[float, ...]
    by_age: bool
    looked: float = 0.0

    def start(self, number: int, startable: float, submitted: float = 0.0) -> float:
        """When a worker job starts; one that is submitted a second time has another wait."""
        wait = self.again[number] if submitted else self.workers[number]
        return max(self.looked, startable + wait if self.by_age else max(startable, submitted + wait))


@dataclass
class Cost:
    first: float
    burned: float = 0.0
    places: int = 0
    lost: int = 0


def idle(chance: random.Random, by_age: bool) -> Queue:
    soon = chance.uniform(0, AFTER_CHANGE)
    return Queue(soon, (0.0,) * JOBS, (0.0,) * JOBS, by_age, looked=soon)


def hours(chance: random.Random, by_age: bool) -> Queue:
    wait = chance.uniform(1, 6) * HOUR
    return Queue(wait, *([tuple(wait * chance.uniform(1, 1.5) for _ in range(JOBS))] * 2), by_age)


def crossed(chance: random.Random, by_age: bool) -> Queue:
    def some_hours() -> tuple[float, ...]:
        return tuple(chance.uniform(1, 6) * HOUR for _ in range(JOBS))

    return Queue(chance.uniform(1, 6) * HOUR, some_hours(), some_hours(), by_age)


def last(chance: random.Random, by_age: bool) -> Queue:
    def minutes() -> tuple[float, ...]:
        return tuple(chance.uniform(1, 20) * 60 for _ in range(JOBS))

    return Queue(chance.uniform(1, 6) * HOUR, minutes(), minutes(), by_age)


def connected(queue: Queue, starts: list[float]) -> float:
    return max(min(starts) + IMPORTS, queue.scheduler + READY)


def never_held(queue: Queue) -> float:
    """When the first worker is connected if worker jobs wait for their turn only, and then for the scheduler."""
    return connected(queue, [queue.start(number, 0.0) for number in range(JOBS)])


def depends(queue: Queue, delay: float) -> Cost:
    """Worker jobs depend on the start of the scheduler job, and Slurm looks at them `delay` seconds after it."""
    return Cost(connected(queue, [queue.start(n, queue.scheduler + delay) for n in range(JOBS)]))


def next_cycle(queue: Queue, chance: random.Random) -> Cost:
    return depends(queue, chance.uniform(AFTER_CHANGE, CYCLE))


def job_changes(queue: Queue, chance: random.Random) -> Cost:
    return depends(queue, AFTER_CHANGE)


def manager_releases(queue: Queue, chance: random.Random) -> Cost:
    """The manager sees the contact, at most a second late, and takes the dependency away; without it: a cycle."""
    return depends(queue, READY + chance.uniform(0, 1) + AFTER_CHANGE)


def submits_when_it_runs(queue: Queue, chance: random.Random) -> Cost:
    """Worker jobs are submitted when the scheduler job has started: none has a place until then."""
    submit = queue.scheduler + chance.uniform(0, 1)
    starts = [submit + max(queue.workers[n], AFTER_CHANGE) for n in range(JOBS)]
    return Cost(connected(queue, starts), places=JOBS, lost=JOBS)


def no_dependency(queue: Queue, chance: random.Random) -> Cost:
    """Option B: a worker job without a scheduler ends soon, and the manager submits one that depends on it."""
    cost, starts = Cost(0.0), []
    for n in range(JOBS):
        start = queue.start(n, 0.0)
        alone = queue.scheduler - start
        cost.burned += GPUS * max(0.0, min(RELEASE, alone))
        if alone > RELEASE:
            cost.places += 1
            cost.lost += 1
            start = queue.start(n, queue.scheduler + AFTER_CHANGE, start + RELEASE)
        starts.append(start)
    cost.first = connected(queue, starts)
    return cost


WAYS: dict[str, Callable[[Queue, random.Random], Cost]] = {
    "dependency, next cycle": next_cycle,
    "dependency, job changes": job_changes,
    "dependency, manager releases": manager_releases,
    "submit when it runs": submits_when_it_runs,
    "no dependency, 60 s": no_dependency,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{JOBS} worker jobs of {GPUS} GPUs; mean of {arguments.runs} runs. First: seconds from the submit until the")
    print(
        "first worker is connected. Late: by how many of them, against worker jobs that wait for nothing but their turn"
    )
    print("and hold their GPUs until the scheduler comes.\n")
    print(f"{'queue':8}{'place':7}{'way':29}{'first (s)':>10}{'late (s)':>9}{'GPU s':>7}{'places':>7}{'lost':>6}")
    for name, make in {"idle": idle, "hours": hours, "crossed": crossed, "last": last}.items():
        for by_age in (False, True):
            for way, cost_of in WAYS.items():
                chance = random.Random(f"{arguments.seed} {name} {by_age}")
                costs, late = [], []
                for _ in range(arguments.runs):
                    queue = make(chance, by_age)
                    cost = cost_of(queue, random.Random(chance.random()))
                    costs.append(cost)
                    late.append(cost.first - never_held(queue))
                means = [statistics.mean(getattr(c, f) for c in costs) for f in ("first", "burned", "places", "lost")]
                first, burned, places, lost = means
                print(
                    f"{name:8}{'age' if by_age else 'submit':7}{way:29}{first:>10.0f}{statistics.mean(late):>9.1f}"
                    f"{burned:>7.0f}{places:>7.1f}{lost:>6.1f}"
                )
        print()


if __name__ == "__main__":
    main()
