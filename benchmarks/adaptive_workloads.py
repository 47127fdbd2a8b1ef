"""The workloads of `adaptive_sim.py`: synthetic ones, and tasks that were recorded from the examples."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from adaptive_world import Burst

RECORD = Path(__file__).with_name("recorded_tasks.json")
#: Seconds of work of one recorded query: its durations are stretched, as the examples are small.
QUERY = 1600


def alike(duration: int, count: int, at: int = 0) -> Burst:
    """Return a burst of tasks of one duration."""
    return Burst([(duration, ())] * count, at)


def recorded(name: str, think: int) -> Burst:
    """Return the tasks of an example, submitted `think` seconds after the burst before is done."""
    tasks = json.loads(RECORD.read_text())[name]
    stretch = QUERY / sum(duration for duration, _ in tasks)
    return Burst([(max(1, round(duration * stretch)), needs) for duration, needs in tasks], think=think)


def notebook(name: str, pause: float) -> list[Burst]:
    """Return twelve runs of an example by somebody who thinks between them, for log-normal times with this median."""
    chance = random.Random(f"{name} {pause}")
    return [recorded(name, round(pause * math.exp(chance.gauss(0.0, 1.0)))) for _ in range(12)]


#: By name: the bursts, and the walltime of a job.
WORKLOADS: dict[str, tuple[Callable[[], list[Burst]], int | None]] = {
    "burst: 2000 tasks of 1 min at once": (lambda: [alike(60, 2000)], None),
    "steady: a task of 1 min every 4 s for 2 h": (lambda: [alike(60, 1, t) for t in range(0, 7200, 4)], None),
    "long tail: 600 tasks of 30 s, 6 of 1 h": (lambda: [Burst([(30, ())] * 594 + [(3600, ())] * 6)], None),
    "interactive: 64 tasks of 20 s every 10 min": (lambda: [alike(20, 64, t) for t in range(0, 7200, 600)], None),
    "walltime of 20 min, 2000 tasks of 1 min": (lambda: [alike(60, 2000)], 1200),
    "flights.py 12 x, pauses of about 10 s": (lambda: notebook("flights", 10.0), None),
    "flights.py 12 x, pauses of about 2 min": (lambda: notebook("flights", 120.0), None),
    "slurm.py 12 x, pauses of about 2 min": (lambda: notebook("slurm", 120.0), None),
}
