"""Which ends of a scheduler job another one follows, and how often."""

from __future__ import annotations

import pytest

from hpcgpu.batch.base import JobState
from hpcgpu.scaling.scheduler_restarts import LIMIT, PERIOD, ended_too_early, too_many


@pytest.mark.parametrize("state", JobState)
def test_only_an_end_that_nobody_wanted_is_too_early(state: JobState) -> None:
    early = {"failed", "timeout", "node_fail", "out_of_memory", "preempted"}
    assert ended_too_early(state) == (state.value in early)


def test_restarts_are_limited_in_time() -> None:
    now = 10 * PERIOD
    assert too_many([], now=now) == ""
    assert too_many([now - 1] * (LIMIT - 1), now=now) == ""
    assert too_many([now - 1] * LIMIT, now=now) == "it was restarted 3 times within an hour"
    assert too_many([now - PERIOD - 1] * LIMIT + [now - 1], now=now) == "", "the others were long ago"
