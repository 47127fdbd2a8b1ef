"""The simulator of adaptive scaling: it runs, and its books balance."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("side", ["ours", "theirs", "clairvoyant"])
def test_each_gpu_second_of_the_simulator_is_of_work_or_has_another_name(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import adaptive_sides
    from adaptive_workloads import alike, recorded
    from adaptive_world import World

    bursts = [alike(30, 200), alike(5, 8, at=600), recorded("slurm", think=30)]
    world = World(bursts[:2] if side == "theirs" else bursts, 20.0, None, 1)
    decide = adaptive_sides.clairvoyant(16) if side == "clairvoyant" else getattr(adaptive_sides, side)
    act = decide(world)
    while not world.over:
        world.step()
        act()
    useful = sum(duration for burst in world.bursts for duration, _ in burst.tasks)
    assert world.finished and not world.jobs
    assert world.paid == useful + world.startup + world.idle + world.lost


def test_who_has_the_future_waits_for_the_queue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from adaptive_sides import clairvoyant
    from adaptive_workloads import alike
    from adaptive_world import STARTUP, World

    world = World([alike(30, 4, at=10), alike(30, 4, at=5000)], 300.0, None, 1)
    act = clairvoyant(1)(world)
    while not world.over:
        world.step()
        act()
    first = World([], 300.0, None, 1).wait()
    assert world.responses == {0: first + STARTUP + 29 - 10, 1: 30}, "the second job was submitted in time"
    assert world.submits == 2 and world.idle <= 4 and world.startup == 2 * 4 * STARTUP


def test_the_hours_that_nobody_can_spare_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from adaptive_sim import floor
    from adaptive_workloads import WORKLOADS

    stated = [floor(workload) for workload in WORKLOADS]
    assert stated[:2] == [
        "0.36 for the starts, if all 16 jobs start",
        "without a backlog: 15 workers have work, 4 jobs have 16: 2.00 idle, and 0.09 for 4 starts",
    ]
    assert not any(stated[2:])
