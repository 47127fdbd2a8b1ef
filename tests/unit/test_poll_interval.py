"""How often the queue is polled: checked with a clock of its own, for days at once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpcgpu.options.shared_options_and_defaults import ClusterOptions
from hpcgpu.polling.poll_interval import Cadence, pause


def polls(
    cadence: Cadence, states: dict[str, str], *, begin: float, seconds: float, waiting: bool = True
) -> list[float]:
    """Poll whenever it is due, with these states as the answer; return when."""
    times, now = [], max(begin, cadence.next_poll)
    while now < begin + seconds:
        assert cadence.due(now=now)
        cadence.answered(states, now=now, waiting=waiting)
        times.append(now)
        now = cadence.next_poll
    return times


def steady(poll_interval: float = 10.0) -> Cadence:
    return Cadence(poll_interval, chance=lambda: 0.5)


def test_the_first_poll_is_due_at_once() -> None:
    assert Cadence().due(now=0.0)


def test_the_default_interval_is_the_default_of_the_option() -> None:
    """The code that runs inside jobs imports no options, so the default is written twice."""
    assert Cadence().poll_interval == ClusterOptions().poll_interval


def test_a_job_that_waits_long_is_asked_about_less_often_and_never_less_than_every_fourth_interval() -> None:
    times = polls(steady(), {"1": "pending"}, begin=0.0, seconds=86400.0)
    gaps = [round(later - earlier, 3) for earlier, later in pairwise(times)]
    assert gaps[:9] == [10.0] * 9
    assert gaps == sorted(gaps)
    assert max(gaps) == 40.0
    assert len(times) < 86400 / 40 + 60


def test_a_job_that_changes_its_state_brings_the_user_s_interval_back() -> None:
    cadence = steady()
    polls(cadence, {"1": "pending"}, begin=0.0, seconds=3600.0)
    now = cadence.next_poll
    cadence.answered({"1": "running", "2": "pending"}, now=now, waiting=True)
    assert cadence.next_poll == now + 10.0


def test_while_nobody_waits_for_a_change_the_queue_is_polled_four_times_less_often() -> None:
    times = polls(steady(), {"1": "running"}, begin=0.0, seconds=400.0, waiting=False)
    assert times == [float(second) for second in range(0, 400, 40)]


def test_a_queue_that_does_not_answer_is_asked_ever_less_often_up_to_a_limit_and_as_before_once_it_answers() -> None:
    cadence, now, gaps = steady(), 0.0, []
    for _ in range(2000):
        cadence.failed(now=now)
        gaps.append(cadence.next_poll - now)
        now = cadence.next_poll
    assert gaps[:4] == [20.0, 40.0, 80.0, 80.0]
    assert max(gaps) == 80.0
    cadence.answered({"1": "pending"}, now=now, waiting=True)
    assert cadence.next_poll == now + 10.0


def test_what_was_just_submitted_is_asked_about_soon() -> None:
    cadence = steady()
    cadence.answered({}, now=0.0, waiting=False)
    cadence.soon(now=3.0)
    assert cadence.next_poll == 4.0
    quick = steady(0.25)
    quick.answered({}, now=0.0, waiting=False)
    quick.soon(now=0.5)
    assert quick.next_poll == 0.75


def test_the_queue_is_polled_again_until_it_shows_what_just_happened_and_not_for_ever() -> None:
    cadence = steady()
    cadence.answered({"1": "running"}, now=0.0, waiting=False)
    cadence.soon(now=20.0)
    assert polls(cadence, {"1": "running"}, begin=20.0, seconds=200.0, waiting=False) == [
        *[21.0, 23.0, 29.0, 39.0, 49.0, 59.0],
        *[69.0, 109.0, 149.0, 189.0],
    ]


def test_events_without_end_cost_the_queue_a_few_polls_more() -> None:
    cadence, times = steady(), []
    for second in range(600):
        cadence.soon(now=float(second))
        if cadence.due(now=float(second)):
            times.append(second)
            cadence.answered({"1": str(second)}, now=float(second), waiting=True)
    assert 60 < len(times) <= 600 / 10 * 4


def test_a_queue_that_does_not_answer_is_asked_no_sooner_whatever_happens() -> None:
    cadence = steady()
    cadence.failed(now=0.0)
    cadence.soon(now=1.0)
    assert cadence.next_poll == 20.0


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_chance_moves_a_poll_by_a_tenth_at_most(chance: float) -> None:
    assert 9.0 <= pause(10.0, waiting=True, unchanged=0.0, failures=0, chance=chance) <= 11.0
    assert 72.0 <= pause(10.0, waiting=True, unchanged=0.0, failures=99, chance=chance) <= 88.0


def test_programs_that_begin_together_do_not_poll_together() -> None:
    clusters = [Cadence() for _ in range(20)]
    for cadence in clusters:
        cadence.answered({"1": "pending"}, now=0.0, waiting=True)
    assert len({cadence.next_poll for cadence in clusters}) > 15
