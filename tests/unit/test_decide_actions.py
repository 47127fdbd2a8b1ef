"""What the manager does next, for any groups that could be observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.scaling.decide_actions import (
    BUDGET_END,
    Decided,
    DecidedGroup,
    Drain,
    End,
    EndAll,
    Fail,
    ObservedCluster,
    ObservedGroup,
    ObservedJob,
    Submit,
    SubmitScheduler,
    decide,
)
from hpcgpu.scaling.policy_data import Demand, History, Hysteresis, JobView, Limits
from hpcgpu.scaling.scheduler_restarts import DropNext, Lose, ObservedNext, ObservedScheduler, Restart

NOW = 10_000.0


def running(name: str, **known: object) -> ObservedJob:
    view = JobView(name=name, pending=False, submitted=NOW - 1000, workers=1, memory=1e9)
    return replace(ObservedJob(view=view, whole=True, leaves=NOW + 600, end=NOW + 900), **known)


def waiting(name: str, **known: object) -> ObservedJob:
    return replace(ObservedJob(view=JobView(name=name, pending=True, submitted=NOW - 10)), **known)


def fixed(jobs: int, *there: ObservedJob, **known: object) -> ObservedGroup:
    return replace(ObservedGroup(limits=Limits(maximum=jobs, fixed=True), jobs=there), **known)


def decided(*groups: ObservedGroup, **known: bool) -> Sequence[DecidedGroup]:
    answer = decide(replace(ObservedCluster(groups=groups), **known), now=NOW)
    assert answer.cluster is None
    return answer.groups


def done(group: ObservedGroup, *, reachable: bool = True) -> list[Submit | End]:
    return list(decided(group, reachable=reachable)[0].actions)


def test_what_is_missing_is_requested_and_what_waits_is_ended_first() -> None:
    assert done(fixed(3, running("a"))) == [Submit(2)]
    assert done(fixed(1, running("a"), waiting("b"))) == [End(("b",), Drain.UNWANTED)]
    assert done(fixed(2, running("a"), waiting("b"))) == []


def test_why_a_job_ends_reports_what_becomes_of_its_data() -> None:
    assert done(fixed(0, running("a"))) == [End(("a",), Drain.ZERO)]
    assert done(fixed(0, running("a"), deleted=True)) == [End(("a",), Drain.DELETED)]
    spent = fixed(2, running("a"), waiting("b"), history=History(gpu_seconds=100.0))
    spent = replace(spent, limits=replace(spent.limits, gpu_seconds=50.0))
    assert done(spent) == [End(("b", "a"), Drain.BUDGET, NOW + BUDGET_END)]


def test_a_job_whose_walltime_ends_is_replaced_at_once_and_its_tasks_have_most_of_the_time_that_is_left() -> None:
    begins = running("a", leaves=NOW - 1, end=NOW + 99)
    [end, submit] = done(fixed(1, begins))
    assert isinstance(end, End) and end.why is Drain.WALLTIME and "walltime of job a ends soon" in end.log
    assert end.deadline is not None and NOW < end.deadline < NOW + 99
    assert submit == Submit(1)
    assert done(fixed(1, replace(begins, retry_at=NOW + 1))) == [], "its data fitted nowhere a moment ago"
    later = done(fixed(1, replace(begins, retires_at=NOW - 50)))[0]
    assert isinstance(later, End) and later.deadline is not None and later.deadline >= end.deadline - 50


def test_a_job_that_lost_workers_works_until_another_takes_its_place() -> None:
    lost, comes = running("a", lost=True, whole=False), waiting("b")
    lost = replace(lost, view=replace(lost.view, leaves=NOW - 1))
    assert done(fixed(1, lost)) == [Submit(1)]
    there = [lost, running("b")]
    assert [end.jobs for end in done(fixed(1, *there)) if isinstance(end, End)] == [("a",)]
    assert done(fixed(1, *there, history=History(paused="no"))) == [], "nothing would replace it"
    full = fixed(2, *there, history=History(full="QOSMaxSubmitJobPerUserLimit"))
    assert [end.jobs for end in done(full) if isinstance(end, End)] == [("a",)], "no other comes before it ends"
    alone = replace(lost, view=replace(lost.view, workers=0))
    assert [end.jobs for end in done(fixed(1, alone, comes)) if isinstance(end, End)] == [("a",)], "it has no worker"


def test_between_two_schedulers_jobs_end_as_they_should_and_none_comes() -> None:
    between = {"reachable": False, "restarting": True}
    assert decided(fixed(3, running("a")), **between)[0].actions == ()
    assert decided(fixed(1, running("a"), running("b")), reachable=False)[0].actions == (), (
        "nobody knows what they hold"
    )
    [end] = decided(fixed(1, running("a"), running("b")), **between)[0].actions
    assert isinstance(end, End) and len(end.jobs) == 1, "they hold nothing"
    [end] = decided(fixed(1, running("a", leaves=NOW - 1, end=NOW + 99)), **between)[0].actions
    assert isinstance(end, End) and end.why is Drain.WALLTIME, "another job replaces it after the next scheduler"


def test_before_the_next_scheduler_is_decided_on_nothing_is_done_for_worker_jobs() -> None:
    gone = ObservedScheduler(status=JobStatus(job_id="1", state=JobState.FAILED), gone=True, restarts=True)
    cluster = ObservedCluster(groups=[fixed(3, running("a"))], scheduler=gone, reachable=False)
    assert decide(cluster, now=NOW) == Decided(Restart())
    assert decide(replace(cluster, scheduler=replace(gone, restarts=False)), now=NOW) == Decided(Lose())
    [kept] = decide(replace(cluster, restarting=True), now=NOW).groups
    assert kept.actions == (), "they wait for it"
    assert decide(replace(cluster, over=True), now=NOW) == Decided(EndAll()), "the end of the cluster comes first"


def test_what_can_never_start_ends_only_where_perhaps_nobody_reads_why() -> None:
    jobs = [waiting("a", never=True), waiting("b", never=True)]
    assert done(fixed(2, *jobs)) == []
    adaptive = ObservedGroup(
        limits=Limits(minimum=2, maximum=2), jobs=jobs, adaptive=True, history=History(paused="no")
    )
    assert done(adaptive) == [End(("a", "b"), Drain.UNWANTED)]


def test_the_scheduler_job_comes_first() -> None:
    cluster = ObservedCluster(groups=[fixed(2)], submitted=False, unrequested=True)
    assert decide(cluster, now=NOW) == Decided(SubmitScheduler())
    assert decide(replace(cluster, unrequested=False), now=NOW) == Decided(), "its submit is under way"
    assert decide(replace(cluster, over=True), now=NOW) == Decided(EndAll()), "nothing comes after the end"


def test_the_jobs_end_that_the_user_names_and_no_others() -> None:
    named = running("b", released=True)
    assert done(fixed(2, running("a"), named, running("c"))) == [End(("b",), Drain.UNWANTED)]
    assert done(fixed(3, running("a"), named, running("c"))) == [End(("b",), Drain.UNWANTED), Submit(1)]
    adaptive = ObservedGroup(limits=Limits(minimum=2, maximum=2), jobs=[running("a"), named], adaptive=True)
    assert done(adaptive)[0] == End(("b",), Drain.UNWANTED)
    assert done(fixed(1, running("a"), replace(named, retry_at=NOW + 1))) == [], "the queue has refused it a moment ago"
    assert done(fixed(1, running("a"), named), reachable=False) == [], "nobody knows what it holds"
    assert done(fixed(0, waiting("a", released=True)), reachable=False) == [End(("a",), Drain.UNWANTED)]
    [end] = done(fixed(1, running("a"), running("b", released=True, leaves=NOW - 1, end=NOW + 99)))
    assert isinstance(end, End) and end.why is Drain.WALLTIME and end.deadline is not None, "it has to end by then"
    spent = fixed(1, running("a"), named, hysteresis=Hysteresis(over=True))
    spent = replace(spent, limits=replace(spent.limits, gpu_seconds=50.0))
    assert done(spent) == [End(("a", "b"), Drain.BUDGET, NOW + BUDGET_END)], "it has to end now"
    deleted = replace(fixed(0, running("a"), named), deleted=True)
    assert [(set(end.jobs), end.why) for end in done(deleted) if isinstance(end, End)] == [({"a", "b"}, Drain.DELETED)]


def test_nothing_comes_after_a_scheduler_that_ends_as_intended() -> None:
    scheduler = ObservedScheduler(closes=True, restarts=True, next=ObservedNext(held=True))
    assert decide(ObservedCluster(groups=[fixed(2)], scheduler=scheduler), now=NOW) == Decided(DropNext())
    alone = ObservedCluster(groups=[fixed(2)], scheduler=replace(scheduler, next=None, gone=True))
    assert decide(alone, now=NOW) == Decided(), "no scheduler job and no worker job"


_JOBS = st.builds(
    lambda n, pending, draining, workers, tasks, nbytes, retry, lost, never, leaves, submitted, released: ObservedJob(
        view=JobView(
            name=f"j{n}",
            pending=pending,
            submitted=NOW - n,
            draining=draining,
            workers=0 if pending else workers,
            processing=0 if pending else tasks,
            nbytes=0 if pending else nbytes,
            memory=1e9,
            idle_since=None if pending or tasks else NOW - 500,
            leaves=None if pending else leaves,
        ),
        submitted=submitted or not pending,
        retry_at=retry,
        whole=not pending and workers > 0 and not lost,
        lost=lost and not pending,
        never=never and pending,
        released=released,
        leaves=None if pending else leaves,
        end=None if pending or leaves is None else leaves + 100,
    ),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([0, 10**6, 10**9]),
    st.sampled_from([0.0, NOW - 1, NOW + 5]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, NOW - 50.0, NOW + 50.0]),
    st.booleans(),
    st.booleans(),
)


@st.composite
def _groups(draw: st.DrawFn) -> ObservedGroup:
    is_fixed, maximum = draw(st.booleans()), draw(st.integers(0, 6))
    limits = Limits(
        minimum=draw(st.integers(0, maximum)),
        maximum=maximum,
        fixed=is_fixed,
        backlog=draw(st.sampled_from([None, 1, 3])),
        gpu_seconds=draw(st.sampled_from([None, 10.0, 1e6])),
    )
    return ObservedGroup(
        limits=limits,
        jobs=draw(st.lists(_JOBS, max_size=7, unique_by=lambda job: job.name)),
        demand=Demand(jobs=draw(st.integers(0, 8)), seconds=draw(st.sampled_from([0.0, 60.0, 1e5]))),
        history=History(
            paused=draw(st.sampled_from(["", "3 jobs failed in a row"])),
            full=draw(st.sampled_from(["", "QOSMaxJobs"])),
            next_try=draw(st.sampled_from([0.0, NOW + 10])),
            silent=draw(st.booleans()),
            unread=draw(st.booleans()),
            uncounted=draw(st.booleans()),
            gpu_seconds=draw(st.sampled_from([0.0, 20.0])),
        ),
        hysteresis=Hysteresis(),
        adaptive=not is_fixed,
        deleted=is_fixed and not maximum and draw(st.booleans()),
    )


@given(group=_groups(), other=_groups(), scheduler=st.sampled_from(["works", "cannot be reached", "restarts"]))
def test_whatever_is_observed_the_actions_are_sound(group: ObservedGroup, other: ObservedGroup, scheduler: str) -> None:
    known = {"reachable": scheduler == "works", "restarting": scheduler == "restarts"}
    [one, _] = decided(group, other, **known)
    assert [one] == [*decided(group, **known)], "it changes nothing, and groups are independent"
    ends = replace(ObservedCluster(groups=[group, other], over=True), **known)
    assert decide(ends, now=NOW) == Decided(EndAll()), "whatever its jobs do"
    assert decide(replace(ends, retry_at=NOW + 1), now=NOW) == Decided(), "the queue has refused it a moment ago"
    assert decide(replace(ends, failure="its name is lost"), now=NOW) == Decided(EndAll()), "it is lost once"
    lost = replace(ends, over=False, failure="its name is lost", submitted=scheduler == "works")
    assert decide(lost, now=NOW) == Decided(Fail("its name is lost"))
    assert decided(group, submitted=False) == (), "no worker job comes before the scheduler job"
    jobs, ended = {job.name: job for job in group.jobs}, list[str]()
    for action in one.actions:
        if isinstance(action, Submit):
            assert 0 < action.jobs <= group.limits.maximum and not group.history.paused and not group.history.full
            assert group.history.next_try <= NOW and not group.history.uncounted
            assert scheduler != "restarts", "the next scheduler comes first"
            continue
        ended += action.jobs
        for job in (jobs[name] for name in action.jobs):
            assert not job.view.draining and job.retry_at <= NOW
            assert scheduler != "cannot be reached" or job.view.pending, "nobody knows what a running job holds"
            assert action.why is not Drain.BUDGET or group.limits.gpu_seconds is not None
            assert (action.why is Drain.DELETED) <= group.deleted
        assert action.deadline is None or action.deadline > NOW
    assert len(ended) == len(set(ended)), "each job ends once"
