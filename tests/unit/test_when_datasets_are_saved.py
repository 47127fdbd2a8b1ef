"""When published datasets are saved."""

from __future__ import annotations

import pytest

from hpcgpu.dask_scheduler.published_datasets import due


@pytest.mark.parametrize(
    ("now", "last", "end", "longest", "expected"),
    [
        (1000, 1000, None, 0, 1600),
        (5000, 1000, None, 0, 5000),  # it was suspended
        (1000, 1000, 9000, 0, 1600),
        (8500, 8500, 9000, 0, 8940),  # once more before the walltime ends
        (8500, 8500, 9000, 100, 8700),  # as early as a long save needs
        (8950, 8941, 9000, 0, 9541),  # the last save has begun
        (8990, 8500, 9000, 0, 8940),  # at once
    ],
)
def test_a_save_is_due_each_interval_and_before_the_walltime_ends(
    now: float, last: float, end: float | None, longest: float, expected: float
) -> None:
    assert due(now, last, 600, end, longest) == expected
