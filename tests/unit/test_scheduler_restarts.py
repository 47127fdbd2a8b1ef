"""Which ends of a scheduler job another one follows, when, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.scaling.scheduler_restarts import (
    LIMIT,
    PERIOD,
    CancelEnded,
    DropNext,
    DropReplaced,
    KnownScheduler,
    Lose,
    ObservedNext,
    ObservedScheduler,
    Restart,
    SubmitNext,
    Tries,
    decide,
    ended_too_early,
    expected,
    next_is_due,
    roles,
    too_many,
)

NOW = 1e6
#: A scheduler whose walltime ends soon, one that has ended, and one that has worked for a moment.
NEAR = ObservedScheduler(
    status=JobStatus(job_id="1", state=JobState.RUNNING, start=NOW - 9000, end=NOW + 60), restarts=True
)
GONE = ObservedScheduler(status=JobStatus(job_id="1", state=JobState.NODE_FAIL), gone=True, restarts=True)
FRESH = replace(NEAR, status=JobStatus(job_id="1", state=JobState.RUNNING, start=NOW, end=NOW + 9000))


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


@pytest.mark.parametrize(
    ("scheduler", "action"),
    [
        (GONE, Restart()),
        (replace(GONE, restarts=False), Lose()),
        (replace(GONE, certain=False), CancelEnded()),  # the queue may be wrong
        (replace(GONE, certain=False, tries=Tries(again_at=NOW + 1)), None),
        (replace(GONE, coming=True, removed=True), None),  # that attempt ends by itself
        (replace(GONE, tries=Tries(failed=2, again_at=NOW + 1)), None),
        (replace(GONE, tries=Tries(failed=2, again_at=NOW)), Restart()),
        (replace(GONE, next=ObservedNext(lost="it failed")), Restart()),
        (replace(GONE, certain=False, stopped=True), Lose("another program has stopped the cluster")),
        (replace(GONE, removed=True), Lose("its directory was removed")),
        (replace(GONE, final="the next one has ended, too"), Lose("the next one has ended, too")),
        (replace(GONE, restarted=[NOW - 1] * LIMIT), Lose("it was restarted 3 times within an hour")),
        (replace(GONE, restarted=[NOW - PERIOD] * LIMIT), Restart()),
        (replace(GONE, tries=Tries(refused=10)), Restart()),
        (replace(GONE, tries=Tries(refused=11, again_at=NOW + 1)), Lose("the queue has not accepted it 11 times")),
    ],
)
def test_another_scheduler_follows_until_that_has_no_sense(scheduler: ObservedScheduler, action: object) -> None:
    assert decide(scheduler, now=NOW) == action


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.COMPLETED])
def test_none_follows_one_that_was_ended_on_purpose(state: JobState) -> None:
    ended = replace(GONE, status=JobStatus(job_id="1", state=state))
    assert decide(ended, now=NOW) == Lose("it has ended as intended, or was cancelled")
    without_keys = replace(ended, final="the next one has taken over and ended, too")
    assert decide(without_keys, now=NOW) == decide(ended, now=NOW), "it has removed them itself: there is no next one"
    assert decide(replace(without_keys, removed=True), now=NOW) == Lose("its directory was removed")
    unreached = replace(ended, cancelled=True, tries=Tries(failed=1))
    assert decide(unreached, now=NOW) == Restart(), "hpcgpu has cancelled it, because nobody reached its scheduler"


def test_a_walltime_is_no_failure_unless_nobody_reached_the_scheduler() -> None:
    over = replace(GONE, status=JobStatus(job_id="1", state=JobState.TIMEOUT), restarted=[NOW - 1] * LIMIT)
    assert decide(over, now=NOW) == Restart()
    assert isinstance(decide(replace(over, reached=False), now=NOW), Lose)


@pytest.mark.parametrize(
    ("scheduler", "action"),
    [
        (NEAR, SubmitNext(held=False)),
        (FRESH, None),
        (replace(NEAR, restarts=False), None),
        (replace(NEAR, coming=True), None),
        (replace(NEAR, reached=False), None),
        (replace(NEAR, stopped=True), None),
        (replace(NEAR, stopped=None), None),
        (replace(NEAR, next_tries=Tries(refused=1, again_at=NOW + 1)), None),
        (replace(NEAR, next=ObservedNext()), None),
        (replace(NEAR, next=ObservedNext(held=True)), SubmitNext(held=False)),  # it gains no priority in the queue
        (replace(NEAR, next=ObservedNext(replaces=True)), DropReplaced()),
        (replace(NEAR, next=ObservedNext(replaces=True, accepted=False)), None),  # its submit got no answer
        (replace(NEAR, next=ObservedNext(lost="it was cancelled")), DropNext("it was cancelled")),
        (replace(FRESH, unattended=True), SubmitNext(held=True)),
        (replace(FRESH, unattended=True, next=ObservedNext(held=True)), None),
        (replace(NEAR, leaving=True), None),
        (replace(NEAR, leaving=True, unattended=True, next_tries=Tries(again_at=NOW + 9)), SubmitNext(held=True)),
    ],
)
def test_the_next_one_comes_when_it_is_time_to(scheduler: ObservedScheduler, action: object) -> None:
    assert decide(scheduler, now=NOW) == action


def test_a_program_that_leaves_tries_once_at_once_and_then_with_pauses() -> None:
    leaves = replace(NEAR, leaving=True, unattended=True, next_tries=Tries(refused=1, again_at=NOW + 9))
    assert decide(leaves, now=NOW) == SubmitNext(held=True)
    tried = replace(leaves, tried_at_leaving=True)
    assert decide(tried, now=NOW) is None and decide(tried, now=NOW + 9) == SubmitNext(held=True)


def test_what_is_refused_is_tried_more_and_more_seldom() -> None:
    tries, pauses = Tries(), list[float]()
    for _ in range(12):
        tries = tries.after_refusal(now=NOW)
        pauses.append(tries.again_at - NOW)
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300, 300, 300, 3600, 3600] and tries.exhausted
    assert Tries().after_failure(now=NOW) == Tries(failed=1, again_at=NOW), "the first other job comes at once"
    assert Tries(failed=9).after_failure(now=NOW).again_at == NOW + 240
    assert Tries(refused=9).after_loss(NOW - 3601, now=NOW).refused == 1, "it was there for an hour"
    assert (
        Tries(refused=9).after_loss(NOW - 3599, now=NOW).refused == Tries(refused=9).after_loss(None, now=NOW).refused
    )


_OBSERVED = st.builds(
    ObservedScheduler,
    status=st.builds(
        JobStatus,
        job_id=st.just("1"),
        state=st.sampled_from(JobState),
        start=st.just(NOW - 9000),
        end=st.sampled_from([None, NOW]),
    ),
    reached=st.booleans(),
    gone=st.booleans(),
    certain=st.booleans(),
    cancelled=st.booleans(),
    restarts=st.booleans(),
    coming=st.booleans(),
    stopped=st.sampled_from([False, True, None]),
    removed=st.booleans(),
    final=st.sampled_from(["", "the next one has taken over and ended, too"]),
    restarted=st.lists(st.just(NOW - 1), max_size=LIMIT),
    tries=st.builds(Tries, refused=st.sampled_from([0, 11]), again_at=st.sampled_from([0.0, NOW + 1])),
    next=st.none() | st.builds(ObservedNext, lost=st.sampled_from(["", "it failed"])),
    next_tries=st.builds(Tries, again_at=st.sampled_from([0.0, NOW + 1])),
    unattended=st.booleans(),
    leaving=st.booleans(),
    tried_at_leaving=st.booleans(),
)


@given(_OBSERVED)
def test_whatever_is_observed_there_is_one_scheduler_and_an_end_of_the_tries(scheduler: ObservedScheduler) -> None:
    action = decide(scheduler, now=NOW)
    assert action is None or not scheduler.coming, "one at a time"
    if isinstance(action, Restart | CancelEnded):
        assert scheduler.gone and scheduler.restarts and scheduler.stopped is False
        assert scheduler.tries.again_at <= NOW, "the queue is a shared service"
    if isinstance(action, Restart):
        assert scheduler.certain, "the last one may still live"
        assert not scheduler.removed and not scheduler.final and not scheduler.tries.exhausted
    if isinstance(action, SubmitNext):
        assert scheduler.restarts and not scheduler.gone and scheduler.stopped is False
        assert scheduler.next is None or (scheduler.next.held and not action.held)
    if scheduler.gone and not scheduler.coming and scheduler.stopped is not None:
        settled = decide(replace(scheduler, certain=True), now=scheduler.tries.again_at)
        assert isinstance(settled, Restart | Lose), "it is never left as it is"


def known(job_id: str, **other: bool) -> KnownScheduler:
    return KnownScheduler(name=f"demo-scheduler{job_id}", job_id=job_id, **other)


@pytest.mark.parametrize(
    ("jobs", "served", "present", "following"),
    [
        ([], None, None, None),
        ([known("1"), known("2")], "1", "1", "2"),
        ([known("1"), known("2")], "2", "2", "1"),
        ([known("1", alive=False), known("2")], "1", "1", "2"),  # nobody has noticed its end
        ([known("2", alive=False), known("3")], "1", "3", None),  # the journal has the end of that of the contact
        ([known("2", alive=False)], "1", "2", None),
        ([known("1", alive=False), known("2")], None, "1", "2"),  # it has removed its contact, because it ends
        ([known("1"), known("2", wanted=False)], "1", "1", None),
        ([known("1", wanted=False)], "1", "1", None),
        ([known("1"), known("2", alive=False)], "1", "1", None),
        ([known("1", wanted=False), known("2", wanted=False)], None, "2", None),
        ([known("1"), KnownScheduler(name="without an answer")], "1", "1", "without an answer"),
        ([known("1"), KnownScheduler(name="without an answer"), known("3")], "1", "1", "3"),
    ],
)
def test_a_program_that_takes_a_cluster_over_keeps_one_scheduler_and_one_that_follows(
    jobs: list[KnownScheduler], served: str | None, present: str | None, following: str | None
) -> None:
    kept = [(one.job_id or one.name) if one is not None else None for one in roles(jobs, served)[:2]]
    assert kept == [present, following]


@given(
    st.lists(
        st.builds(KnownScheduler, name=st.just(""), job_id=st.just(""), alive=st.booleans(), wanted=st.booleans()),
        max_size=5,
    ),
    st.sampled_from([None, "0", "1", "2", "9"]),
    st.integers(0, 5),
)
def test_whatever_another_program_finds_no_scheduler_job_is_left_without_a_role(
    jobs: list[KnownScheduler], served: str | None, unanswered: int
) -> None:
    jobs = [
        replace(job, name=f"s{n}", job_id=None if n == unanswered else str(n), alive=job.alive and n != unanswered)
        for n, job in enumerate(jobs)
    ]
    present, following, surplus = roles(jobs, served)
    assert following is None or (following.alive and following.wanted)
    assert present is None or present.job_id is not None
    assert (present is None) == all(job.job_id is None for job in jobs)
    with_role = [job for job in (present, following, *surplus) if job is not None]
    assert len({job.name for job in with_role}) == len(with_role), "each has one role"
    assert {job.name for job in jobs if job.alive} <= {job.name for job in with_role}, "none is forgotten"
