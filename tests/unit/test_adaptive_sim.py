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
    decide = adaptive_sides.clairvoyant(16, 1) if side == "clairvoyant" else getattr(adaptive_sides, side)
    act = decide(world)
    while not world.over:
        world.step()
        act()
    useful = sum(duration for burst in world.bursts for duration, _ in burst.tasks)
    assert world.finished and not world.jobs
    assert world.paid == useful + world.startup + world.idle + world.lost
