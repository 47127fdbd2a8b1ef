"""What a running job lacks, and when it is replaced for that."""

from __future__ import annotations

from hpcgpu.scaling.missing_workers import Absence, jobs_that_may_end, observe
from hpcgpu.scaling.replace_failed_jobs import Failures

FOUR = ("demo-0-0", "demo-0-1", "demo-0-2", "demo-0-3")


def test_nothing_is_absent_before_the_first_worker_has_come() -> None:
    assert not observe(Absence(), FOUR, 1, (), now=0.0)


def test_a_lost_worker_is_waited_for_and_then_counts_as_gone() -> None:
    whole = observe(Absence(), FOUR, 1, FOUR, now=0.0)
    assert not whole
    short = observe(whole, FOUR, 1, FOUR[:3], now=100.0)
    assert (
        short.outlook(300, now=112.0) == "lost 1 of 4 workers 12 s ago; replaced if it does not come back within 288 s"
    )
    assert short.seconds_left(300, now=112.0) == 288
    later = observe(short, FOUR, 1, FOUR[:3], now=401.0)
    assert later.seconds_left(300, now=401.0) < 0, "the time runs from the loss"


def test_a_worker_that_its_nanny_restarts_costs_nothing() -> None:
    absence = Absence()
    for now in range(0, 10_000, 10):  # again and again
        absence = observe(absence, FOUR, 1, FOUR if now % 20 else FOUR[1:], now=float(now))
        assert not absence or absence.seconds_left(300, now=float(now)) == 300


def test_each_worker_has_a_time_of_its_own() -> None:
    absence = observe(observe(Absence(), FOUR, 1, FOUR, now=0.0), FOUR, 1, FOUR[1:], now=10.0)
    absence = observe(absence, FOUR, 1, FOUR[:3], now=200.0)  # the first is back, the last is gone
    assert absence.since == {FOUR[3]: 200.0}


def test_workers_that_never_came_are_not_called_lost_and_their_node_is_named() -> None:
    names = ("demo-0-0-0", "demo-0-0-1", "demo-0-1-0", "demo-0-1-1")
    absence = observe(Absence(), names, 2, names[:2], now=5.0)
    assert absence.node == 1
    assert absence.outlook(60, now=15.0) == (
        "2 of 4 workers on its node 1 missing, 10 s after the first connected; replaced if they do not connect "
        "within 50 s"
    )


def test_the_second_job_in_a_row_that_loses_workers_is_a_failure_and_there_is_an_end() -> None:
    failures = Failures(restarts=1)
    failures.workers_lost("n0", within=300, now=0.0)
    assert (failures.failed, failures.paused, failures.excluded) == (0, "", {})
    failures.workers_lost("n0", within=300, now=300.0)
    assert (failures.failed, failures.paused, list(failures.excluded)) == (1, "", ["n0"])
    failures.workers_lost("n0", within=300, now=600.0)
    assert failures.paused == (
        "2 worker jobs failed in a row; they are not replaced until you scale or adapt the group again, "
        "or run `hpcgpu resume` (worker_restarts=1)"
    )
    failures.start_anew()
    failures.workers_lost("n0", within=300, now=601.0)
    assert failures.failed == 0


def test_jobs_that_lose_workers_together_count_once() -> None:
    failures = Failures(restarts=0)
    for i in range(8):
        failures.workers_lost(f"n{i}", within=300, now=100.0 + i)
    assert (failures.short, failures.failed, failures.excluded) == (1, 0, {})


def test_a_job_without_some_workers_works_on_until_another_is_there_and_one_at_a_time_makes_room() -> None:
    assert jobs_that_may_end(8, 0, 8, comes=False) == 0, "nothing takes its place"
    assert jobs_that_may_end(8, 0, 8, comes=True) == 1, "one makes room"
    assert jobs_that_may_end(7, 0, 8, comes=True) == 0, "it has gone, and the next waits for the job that comes"
    assert jobs_that_may_end(7, 1, 8, comes=True) == 1
    assert jobs_that_may_end(7, 4, 8, comes=False) == 3
    assert jobs_that_may_end(1, 7, 8, comes=True) == 1
    assert jobs_that_may_end(2, 3, 4, comes=False) == 1
    assert jobs_that_may_end(3, 0, 0, comes=False) == 3, "nothing is wished for"


def test_a_job_without_any_worker_left_is_waited_for_less_than_one_of_four() -> None:
    whole = observe(Absence(), FOUR, 1, FOUR, now=0.0)
    short = observe(whole, FOUR, 1, FOUR[:1], now=10.0)
    assert not short.none_left and short.seconds_left(300, now=20.0) == 290
    empty = observe(short, FOUR, 1, (), now=20.0)
    assert empty.none_left and empty.seconds_left(300, now=30.0) == 50, "the time runs from the loss of the last"
    assert empty.outlook(300, now=30.0) == (
        "lost 4 of 4 workers 20 s ago; replaced if they do not come back within 50 s"
    )
    assert empty.seconds_left(20, now=30.0) == 0, "never longer than death_timeout"
    late = observe(short, FOUR, 1, (), now=290.0)
    assert late.seconds_left(300, now=300.0) == 10, "what was lost before counts too"
