"""Which ends of a scheduler job another one follows, and how often."""

from __future__ import annotations

import pytest

from hpcgpu.batch.base import JobState
from hpcgpu.scaling.scheduler_restarts import LIMIT, PERIOD, ended_too_early, expected, next_is_due, too_many


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


@pytest.mark.parametrize("state", JobState)
def test_only_a_walltime_is_expected(state: JobState) -> None:
    assert expected(state) == (state is JobState.TIMEOUT)


@pytest.mark.parametrize(
    ("walltime", "waits", "early"),
    [
        (86400, [], 600),
        (86400, [10], 600),
        (86400, [10, 7200, 60], 3 * 3600),
        (86400, [80000], 43200),  # at most half of it: it may start at once, and costs its GPU until then
        (120, [], 60),
        (900, [3600], 450),
    ],
)
def test_the_next_scheduler_job_comes_as_early_as_jobs_have_waited(
    walltime: float, waits: list[float], early: float
) -> None:
    end = 1e9 + walltime
    assert not next_is_due(1e9, end, waits, now=end - early - 1)
    assert next_is_due(1e9, end, waits, now=end - early)
    assert next_is_due(1e9, end, waits, now=end + 1), "also if its walltime was shortened, or the queue ends it late"
    assert not next_is_due(1e9, None, waits, now=end) and not next_is_due(None, end, waits, now=end)
