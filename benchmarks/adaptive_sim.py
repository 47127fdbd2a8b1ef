"""The policy of hpcgpu against distributed's own Adaptive, wired as dask-jobqueue 0.9 wires it, on the same simulated
queue; and against one who knows the future.

Waits in the queue are drawn from a log-normal distribution (sigma 1) whose median is stated with each table; jobs have
four workers of one GPU each, which connect 20 s after the job's start. Both sides are asked once per simulated second.
The peer is distributed's real `Adaptive` with its defaults, on a cluster object that does what SpecCluster does with
grouped workers: names of workers are mapped to jobs, a job goes as a whole when one of its workers is closed, and a job
that dies by its walltime is not noticed (distributed #9102).

The columns: the response of a burst is the time from its submit until its last task is done, mean and 95th percentile.
GPU hours paid are those of useful work, and of `start` (a job runs, its workers have not connected), `idle` (they have
no task) and `lost` (tasks that begin anew, because their workers were closed).

The waits are synthetic: no package registry has the queue waits of a public archive of workloads.

Run it with ``PYTHONHASHSEED=0 python benchmarks/adaptive_sim.py``; it takes some minutes. Without the variable the peer
differs from run to run, as it cancels pending jobs in the order of a set.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from adaptive_sides import Side, clairvoyant, ours, theirs
from adaptive_workloads import WORKLOADS
from adaptive_world import MAXIMUM_JOBS, World


@dataclass(frozen=True)
class Outcome:
    """What a run cost."""

    makespan: float
    mean: float
    late: float
    paid: float
    start: float
    idle: float
    lost: float
    submits: float

    @property
    def without_work(self) -> float:
        """GPU hours in which there was no task, whyever."""
        return self.start + self.idle


HEADS = ("makespan", "response", "95 %", "paid", "start", "idle", "lost", "submits")


def run(side: Side, workload: str, median_wait: float, seed: int) -> Outcome:
    """Simulate one side."""
    bursts, walltime = WORKLOADS[workload]
    world = World(bursts(), median_wait, walltime, seed)
    act = side(world)
    while not world.over:
        world.step()
        act()
    responses = sorted(world.responses.values()) if world.finished else [math.inf]
    late = responses[math.ceil(0.95 * len(responses)) - 1]
    hours = (seconds / 3600 for seconds in (world.paid, world.startup, world.idle, world.lost))
    return Outcome(world.makespan, statistics.fmean(responses), late, *hours, world.submits)


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    """Average runs."""
    return Outcome(*map(statistics.fmean, zip(*map(astuple, outcomes), strict=True)))


@functools.cache
def family(workload: str) -> list[Outcome]:
    """Return what those who know the future get, with fewer or more jobs; the wait of the queue is nothing to them."""
    return [
        run(clairvoyant(most, batch), workload, 0.0, 0)
        for most in (2, 3, 4, 5, 8, MAXIMUM_JOBS)
        for batch in (1, 20, 60)
    ]


def bound(workload: str, other: Outcome) -> Outcome:
    """Return the least GPU hours without work of those who know the future and are not slower than another."""
    fast = [
        o
        for o in family(workload)
        if o.makespan <= 1.05 * other.makespan and o.mean <= 1.05 * other.mean and o.late <= 1.05 * other.late
    ]
    return min(fast or family(workload), key=lambda o: (o.without_work, o.mean))


def show(values: Iterable[float]) -> str:
    """Return a row of numbers; infinite is what never came."""
    return "".join(
        f"{'never':>10}" if math.isinf(value) else f"{value:>10.{0 if value >= 100 else 2}f}" for value in values
    )


def ratio(mine: float, peer: float) -> float:
    """Return one over the other."""
    return mine / peer if peer else (1.0 if not mine else math.inf)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--waits", type=float, nargs="+", default=[20.0, 300.0, 1800.0], help="median waits, seconds")
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--no-bound", action="store_true", help="leave out the one who knows the future")
    arguments = parser.parse_args()
    ratios: list[tuple[float, ...]] = []
    missed = []
    for wait in arguments.waits:
        print(f"\nqueue waits: log-normal, median {wait:g} s, sigma 1; mean of {arguments.seeds} seeds")
        print(f"{'':44}{'':12}{'':>10}" + f"{'seconds':>20}{'GPU hours':>40}")
        print(f"{'':44}{'':12}" + "".join(f"{head:>10}" for head in HEADS))
        for workload in (name for name in WORKLOADS if arguments.only in name):
            mine, peer = (
                mean(run(side, workload, wait, seed) for seed in range(arguments.seeds)) for side in (ours, theirs)
            )
            print(f"{workload:44}{'hpcgpu':12}{show(astuple(mine))}")
            print(f"{'':44}{'peer':12}{show(astuple(peer))}")
            if not arguments.no_bound:
                best = bound(workload, mine if math.isinf(peer.makespan) else peer)
                print(f"{'':44}{'clairvoyant':12}{show(astuple(best))}", flush=True)
            if math.isinf(peer.makespan):
                print(f"{'':44}{'(the peer never finishes)'}", flush=True)
                continue
            row = tuple(ratio(a, b) for a, b in zip(astuple(mine), astuple(peer), strict=True))
            both = ratio(mine.without_work, peer.without_work)
            print(f"{'':44}{'ratio':12}{show(row)}   start + idle {both:.2f}", flush=True)
            ratios.append((row[5], both, row[3]))
            aims = {"makespan": row[0], "response": row[1], "95 % of responses": row[2]}
            missed += [f"{workload} at {wait:g} s: {aim} {r:.2f}" for aim, r in aims.items() if r > 1.05]
            if both > 1.0:
                missed.append(f"{workload} at {wait:g} s: start + idle {both:.2f}")
    for name, values in zip(("idle", "start + idle", "paid"), zip(*ratios, strict=True), strict=True):
        print(f"GPU hours {name}, ratios where the peer finishes: mean {statistics.fmean(values):.2f}, "
              f"largest {max(values):.2f}")  # fmt: skip
    print("aims missed (start + idle 1.0 x, times 1.05 x):", *(missed or ["none"]), sep="\n  ")


if __name__ == "__main__":
    main()
