"""What the end of a job means, and when to try again."""

from __future__ import annotations

import pytest

from hpcgpu.batch.base import JobState
from hpcgpu.scaling.replace_failed_jobs import ClusterFailures, Failures, Outcome, classify


@pytest.mark.parametrize(
    ("state", "lasted", "outcome"),
    [
        (JobState.TIMEOUT, 60.0, Outcome.EXPECTED),
        (JobState.COMPLETED, 60.0, Outcome.EXPECTED),
        (JobState.PREEMPTED, 60.0, Outcome.PREEMPTED),
        (JobState.PREEMPTED, None, Outcome.PREEMPTED),
        (JobState.CANCELLED, 60.0, Outcome.CANCELLED),
        (JobState.NODE_FAIL, 60.0, Outcome.NODE_FAIL),
        (JobState.OUT_OF_MEMORY, None, Outcome.OUT_OF_MEMORY),
        (JobState.FAILED, 60.0, Outcome.FAILED),
        (JobState.FAILED, None, Outcome.NEVER_CONNECTED),
        (JobState.COMPLETED, None, Outcome.NEVER_CONNECTED),
        (JobState.TIMEOUT, None, Outcome.NEVER_CONNECTED),
        (JobState.COMPLETED, 1.0, Outcome.FAILED),
        (JobState.TIMEOUT, 1.0, Outcome.EXPECTED),
    ],
)
def test_the_end_of_a_job_is_classified(state: JobState, lasted: float | None, outcome: Outcome) -> None:
    assert classify(state, lasted=lasted) is outcome


def test_a_job_that_worked_and_ended_by_itself_without_an_error_did_not_fail() -> None:
    assert classify(JobState.COMPLETED, lasted=1.0, worked=True) is Outcome.EXPECTED
    assert classify(JobState.FAILED, lasted=1.0, worked=True) is Outcome.FAILED
    assert classify(JobState.COMPLETED, lasted=None) is Outcome.NEVER_CONNECTED


def test_jobs_that_fail_in_a_row_are_tried_again_later_and_later_and_then_not_at_all() -> None:
    failures = Failures(restarts=5)
    delays = []
    for _ in range(5):
        failures.job_ended(Outcome.NEVER_CONNECTED, "", now=1000.0)
        delays.append(failures.next_try - 1000.0)
        assert not failures.paused
    assert delays == [0, 10, 30, 60, 300]
    failures.job_ended(Outcome.NEVER_CONNECTED, "", now=1000.0)
    assert failures.paused == (
        "6 worker jobs failed in a row; they are not replaced until you scale or adapt the group again, "
        "or run `hpcgpu resume` (worker_restarts=5)"
    )
    failures.start_anew()
    assert not failures.paused and failures.next_try == 0


def test_the_replacement_of_a_job_whose_workers_never_connected_avoids_its_node() -> None:
    failures = Failures(restarts=5)
    failures.job_ended(Outcome.NEVER_CONNECTED, "n7", now=0.0)
    failures.job_ended(Outcome.FAILED, "n8", now=0.0)
    assert list(failures.excluded) == ["n7"], "the program of the user may have failed on the other"


def test_walltime_and_preemption_are_no_failures() -> None:
    failures = Failures(restarts=0)
    for _ in range(100):
        failures.job_ended(Outcome.EXPECTED, "n0", now=0.0)
        failures.job_ended(Outcome.PREEMPTED, "n0", now=0.0)
    assert (failures.paused, failures.next_try, failures.excluded) == ("", 0.0, {})


def test_nodes_that_fail_are_avoided_a_bounded_number_of_them() -> None:
    failures = Failures(restarts=0)
    for i in range(20):
        failures.job_ended(Outcome.NODE_FAIL, f"n{i}", now=0.0)
    assert list(failures.excluded) == [f"n{i}" for i in range(12, 20)]
    assert not failures.paused


@pytest.mark.parametrize("for_good", [False, True])
def test_a_refused_submit_that_avoided_nodes_is_tried_again_on_all_nodes(for_good: bool) -> None:
    """Slurm refuses a job that excludes all nodes: "Requested node configuration is not available"."""
    failures = Failures(restarts=3)
    for i in range(4):
        failures.job_ended(Outcome.NODE_FAIL, f"n{i}", now=0.0)
    failures.submit_refused("Requested node configuration is not available", for_good=for_good, now=20.0)
    assert failures.excluded == {} and failures.may_submit(now=20.0)
    failures.submit_refused("Requested node configuration is not available", for_good=for_good, now=20.0)
    assert (failures.refused, bool(failures.paused)) == (1, for_good)


def test_a_node_that_has_failed_is_avoided_for_an_hour() -> None:
    failures = Failures(restarts=3)
    failures.job_ended(Outcome.NODE_FAIL, "n0", now=0.0)
    failures.job_ended(Outcome.NODE_FAIL, "n1", now=1000.0)
    failures.time_passed(now=3599.0)
    assert list(failures.excluded) == ["n0", "n1"]
    failures.time_passed(now=3601.0)
    assert list(failures.excluded) == ["n1"]


def test_five_refused_submits_in_a_row_are_enough_and_one_that_is_refused_for_good() -> None:
    failures = Failures(restarts=3)
    for i in range(4):
        failures.submit_refused("busy", for_good=False, now=0.0)
        assert not failures.paused, i
    failures.submit_refused("busy", for_good=False, now=0.0)
    again = "so nothing more is submitted until you scale or adapt the group again, or run `hpcgpu resume`"
    assert failures.paused == f"5 submissions in a row were refused, {again}. The last one: busy"
    failures = Failures(restarts=3)
    failures.submit_refused("Invalid account", for_good=True, now=0.0)
    assert failures.paused == f"a submission was refused, {again}. The last one: Invalid account"


def test_a_group_whose_jobs_were_accepted_tries_for_two_hours() -> None:
    failures, now = Failures(restarts=3), 0.0
    failures.submitted()
    for i in range(29):
        failures.submit_refused("Requested node configuration is not available", for_good=False, now=now)
        assert not failures.paused, i
        now = failures.next_try
    assert now > 7000
    failures.submit_refused("Requested node configuration is not available", for_good=False, now=now)
    assert "30 submissions in a row were refused" in failures.paused


def test_a_full_site_is_tried_again_when_a_job_ends_or_after_a_while() -> None:
    failures = Failures(restarts=3)
    failures.site_is_full("QOSMaxSubmitJobPerUserLimit", now=0.0)
    failures.time_passed(now=299.0)
    assert failures.full == "QOSMaxSubmitJobPerUserLimit"
    failures.time_passed(now=300.0)
    assert failures.full == ""
    failures.site_is_full("QOSMaxSubmitJobPerUserLimit", now=0.0)
    failures.job_ended(Outcome.EXPECTED, "", now=1.0)
    assert failures.full == ""


def test_workers_that_are_lost_days_after_others_are_not_lost_in_a_row() -> None:
    failures = Failures(restarts=0)
    failures.workers_lost("n1", within=60.0, now=0.0)
    failures.jobs_run_well()
    failures.workers_lost("n1", within=60.0, now=2 * 86400.0)
    assert not failures.paused
    failures.workers_lost("n1", within=60.0, now=2 * 86400.0 + 100)
    assert failures.paused.startswith("a worker job failed; it is not replaced")


def test_jobs_that_fail_days_after_others_have_not_failed_in_a_row() -> None:
    failures = Failures(restarts=1)
    for day in range(1, 4):
        failures.job_ended(Outcome.FAILED, "n1", now=day * 86400.0)
        failures.jobs_run_well()
    assert failures.paused == ""


def test_another_size_of_a_group_hides_no_failure_of_another_group_or_of_the_cluster() -> None:
    failures = ClusterFailures()
    failures.add("a job of default failed", "default")
    failures.add("a job of cpu failed", "cpu")
    failures.add("the disk is full")
    failures.requested_anew("default")
    assert failures.report() == "a job of cpu failed\nthe disk is full" and not failures.report()
