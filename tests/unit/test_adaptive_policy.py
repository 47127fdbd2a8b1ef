"""The policy, on generated histories of a simulated queue, and in examples that show what it does."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgpu.scaling import budget, idle_jobs
from hpcgpu.scaling.adaptive_policy import decide
from hpcgpu.scaling.forecast import expected_wait
from hpcgpu.scaling.policy_data import Decision, Demand, History, Hysteresis, JobView, Limits

settings.register_profile("policy", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("policy")

TICK = 5.0
#: Memory of a simulated job.
MEMORY = 100


@dataclass
class SimulatedJob:
    """A job of the simulated queue: it starts after its wait, and ends with its walltime."""

    name: str
    submitted: float
    wait: float
    walltime: float | None
    started: float | None = None
    idle_since: float | None = None
    busy: bool = False
    calls: int = 0
    computing: int = 0
    draining: bool = False
    ends_at: float | None = None
    wanted: int = 0
    actors: int = 0

    def view(self) -> JobView:
        leaves = self.ends_at - 30.0 if self.ends_at is not None else None
        return JobView(
            name=self.name,
            pending=self.started is None,
            submitted=self.submitted,
            leaves=leaves,
            workers=0 if self.started is None else 1,
            processing=int(self.busy),
            calls=self.calls,
            computing=self.computing,
            wanted=self.wanted,
            actors=self.actors,
            memory=0 if self.started is None else MEMORY,
            idle_since=self.idle_since,
            draining=self.draining,
        )


@dataclass
class Site:
    """A queue, the work that there is, and the group whose size is decided once a tick."""

    limits: Limits
    seed: int
    longest_wait: float
    walltime: float | None = None
    now: float = 1000.0
    jobs: list[SimulatedJob] = field(default_factory=list)
    history: History = field(default_factory=History)
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    submits: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def tick(self, demand: int, seconds: float = 1e6) -> Decision:
        """Let time pass, work be handed out, and the policy decide."""
        self.now += TICK
        running = 0
        for job in list(self.jobs):
            if job.started is None and self.now >= job.submitted + job.wait:
                job.started = self.now
                job.ends_at = self.now + job.walltime if job.walltime is not None else None
                self.history = replace(self.history, waits=(*self.history.waits, self.now - job.submitted))
            if job.ends_at is not None and self.now >= job.ends_at - 30.0:
                if job.wanted and self.running() == [job] and self.now < job.ends_at:
                    continue  # its data fits nowhere else: it stays as long as it can
                self.leave(job)  # its workers have retired
                self.lost += 0 if self.running() else job.wanted
            elif job.started is not None and not job.draining:
                running += 1
                job.busy = running <= demand
                works = job.busy or job.calls or job.computing
                job.idle_since = None if works else (job.idle_since or self.now)
        used = self.limits.gpus_per_job * TICK * sum(job.started is not None for job in self.jobs)
        self.history = replace(self.history, gpu_seconds=self.history.gpu_seconds + used)
        views = [job.view() for job in self.jobs]
        decision = decide(
            views, Demand(jobs=demand, seconds=seconds), self.limits, self.history, self.hysteresis, now=self.now
        )
        self.hysteresis = decision.hysteresis
        self.decisions.append((self.now, decision))
        self.check(views, decision)
        by_name = {job.name: job for job in self.jobs}
        for name in (*decision.cancel, *decision.retire):
            self.leave(by_name[name])
        for _ in range(decision.submit):
            wait = self.random.uniform(0, self.longest_wait)
            self.jobs.append(SimulatedJob(f"j{self.submits}", self.now, wait, self.walltime))
            self.submits += 1
        return decision

    def running(self) -> list[SimulatedJob]:
        return [job for job in self.jobs if job.started is not None and not job.draining]

    def leave(self, job: SimulatedJob) -> None:
        """Let a job go; its data moves to the job that holds least, if there is one."""
        self.jobs.remove(job)
        if job.wanted and (others := self.running()):
            min(others, key=lambda other: other.wanted).wanted += job.wanted

    def produce(self, nbytes: int, actors: int = 0) -> None:
        """Let a job hold more data that is wanted, and actors."""
        if running := self.running():
            job = self.random.choice(running)
            job.wanted, job.actors = job.wanted + nbytes, job.actors + actors

    def works_beside(self, calls: int, computing: int) -> None:
        """Let calls run on the workers of a job, and let its GPU work."""
        if running := self.running():
            job = self.random.choice(running)
            job.calls, job.computing = calls, computing

    def release(self) -> None:
        """Let nobody want anything any more."""
        for job in self.jobs:
            job.wanted = job.actors = 0

    def check(self, views: list[JobView], decision: Decision) -> None:
        """What must hold of every decision."""
        by_name = {view.name: view for view in views}
        chosen = set(decision.cancel) | set(decision.retire)
        staying = [view for view in views if view.name not in chosen and not view.draining]
        wait = expected_wait(self.history.waits, views, self.now) or 0.0
        lasting = [view for view in staying if view.leaves is None or view.leaves - wait > self.now]
        assert decision.submit >= 0 and decision.reason
        assert not (decision.submit and chosen), "it asks for jobs and gives up others at once"
        assert len(lasting) + decision.submit <= max(self.limits.maximum, len(lasting)), "more than the maximum"
        assert all(by_name[name].pending for name in decision.cancel)
        assert not any(by_name[name].pending for name in decision.retire)
        if decision.over:
            return
        if not self.limits.fixed:
            assert not any(by_name[name].busy for name in decision.retire), "a busy job is given up"
            assert not any(by_name[name].actors for name in decision.retire), (
                "a job is given up whose actors cannot move"
            )
            if decision.retire and (wanted := sum(view.wanted for view in views)):
                assert 0.5 * sum(view.memory for view in lasting) >= wanted, (
                    "data is wanted that the jobs that stay cannot hold"
                )
            if self.limits.backlog is not None and decision.submit:
                assert sum(view.pending for view in staying) + decision.submit <= self.limits.backlog
        elif any(by_name[name].works_beside for name in chosen):
            assert all(view.works_beside or view.actors for view in lasting), "a call is cut off, and others stay"
        if decision.retire:
            assert not any(view.pending for view in lasting), "a running job is given up while another waits"
        assert len(staying) + decision.submit >= min(self.limits.minimum, len(views)), "fewer than the minimum"
        if self.history.paused or self.history.full or self.now < self.history.next_try:
            assert decision.submit == 0


limits = st.builds(
    lambda minimum, more, backlog, idle: Limits(
        minimum=minimum, maximum=minimum + more, backlog=backlog, idle_timeout=idle
    ),
    st.integers(0, 4),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.floats(1, 600)),
)
demands = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40)), min_size=1, max_size=12)
sites = st.builds(
    Site,
    limits=limits,
    seed=st.integers(0, 10**6),
    longest_wait=st.sampled_from([0.0, 10.0, 300.0, 3000.0]),
    walltime=st.sampled_from([None, 120.0, 1200.0]),
)


@given(sites, demands)
def test_what_must_hold_holds_in_any_history(site: Site, load: list[tuple[int, int]]) -> None:
    for demand, ticks in load:
        for _ in range(ticks):
            site.tick(demand)


@given(
    sites,
    demands,
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 0, 0, 1]), st.booleans()), min_size=12, max_size=12),
)
def test_adaptive_scaling_never_gives_up_wanted_data(
    site: Site, load: list[tuple[int, int]], data: list[tuple[int, int, bool]]
) -> None:
    site.walltime = None
    for (demand, ticks), (nbytes, actors, released) in zip(load, data, strict=False):
        if released:
            site.release()
        site.produce(nbytes, actors)
        before = sum(job.wanted for job in site.jobs)
        for _ in range(ticks):
            site.tick(demand)
        assert sum(job.wanted for job in site.jobs) == before


beside = st.lists(st.tuples(st.sampled_from([0, 0, 1, 3]), st.sampled_from([0, 0, 1])), min_size=12, max_size=12)


@settings(max_examples=50)
@given(sites, demands, beside)
def test_adaptive_scaling_never_ends_a_call_or_a_gpu_that_works(
    site: Site, load: list[tuple[int, int]], work: list[tuple[int, int]]
) -> None:
    site.walltime = None
    for (demand, ticks), (calls, computing) in zip(load, work, strict=False):
        site.works_beside(calls, computing)
        working = [job for job in site.jobs if job.calls or job.computing]
        for _ in range(ticks):
            decision = site.tick(demand)
            assert all(job in site.jobs for job in working)
            called = sum(bool(job.calls) for job in site.jobs)
            if called > max(demand, site.limits.minimum) and not decision.submit:
                assert "on the workers of" in decision.reason, decision.reason
    for job in site.jobs:
        job.calls = job.computing = 0
    for _ in range(300):
        site.tick(0)
    assert len(site.jobs) == site.limits.minimum, "they go when it has ended"


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(0, 8), beside, st.integers(0, 8), st.integers(0, 10**6))
def test_a_smaller_size_ends_first_the_jobs_on_which_only_tasks_run(
    first: int, then: int, work: list[tuple[int, int]], demand: int, seed: int
) -> None:
    site = Site(Limits(maximum=first, fixed=True), seed, 10.0)
    for _ in range(5):
        site.tick(demand)
    for calls, computing in work[:first]:
        site.works_beside(calls, computing)
    site.limits = Limits(maximum=min(first, then), fixed=True)
    site.tick(demand)
    assert len(site.jobs) == min(first, then)


@settings(max_examples=50)
@given(
    st.integers(0, 4), st.integers(1, 6), st.lists(st.integers(0, 90), min_size=1, max_size=6), st.integers(0, 10**6)
)
def test_without_work_as_few_jobs_stay_as_can_hold_the_data(
    minimum: int, more: int, data: list[int], seed: int
) -> None:
    limits = Limits(minimum=minimum, maximum=minimum + more)
    site = Site(limits, seed, 10.0)
    for _ in range(20):
        site.tick(limits.maximum)
    for nbytes in data:
        site.produce(nbytes)
    for _ in range(100):
        site.tick(0)
    needed = min(limits.maximum, math.ceil(sum(data) / (0.5 * MEMORY)))
    assert len(site.jobs) == max(minimum, needed)
    assert site.submits == limits.maximum, "jobs were asked for again"
    site.release()
    for _ in range(100):
        site.tick(0)
    assert len(site.jobs) == minimum


@settings(max_examples=30)
@given(st.integers(1, 40), st.sampled_from([0.0, 10.0, 25.0]), st.integers(0, 10**6))
def test_a_job_whose_walltime_ends_is_replaced_for_the_data_that_it_holds(
    nbytes: int, longest_wait: float, seed: int
) -> None:
    site = Site(Limits(maximum=2), seed, longest_wait, walltime=600.0)
    while not site.running():
        site.tick(1, seconds=0.0)
    site.produce(nbytes)
    for _ in range(500):
        site.tick(0, seconds=0.0)
    assert not site.lost and sum(job.wanted for job in site.jobs) == nbytes
    assert site.submits <= 6, "one job after the other"


@given(sites, demands, st.lists(st.sampled_from(["pause", "full", "back off", "go on"]), min_size=1, max_size=12))
def test_what_must_hold_holds_with_failures(site: Site, load: list[tuple[int, int]], problems: list[str]) -> None:
    for (demand, ticks), problem in zip(load, problems, strict=False):
        site.history = replace(
            site.history,
            paused="3 jobs failed" if problem == "pause" else "",
            full="QOSMaxJobsPerUserLimit" if problem == "full" else "",
            next_try=site.now + 60 if problem == "back off" else 0.0,
        )
        for _ in range(ticks):
            site.tick(demand)


@given(sites, demands, st.lists(st.floats(-4000.0, 4000.0), min_size=12, max_size=12))
def test_what_must_hold_holds_when_the_clock_steps(site: Site, load: list[tuple[int, int]], steps: list[float]) -> None:
    for (demand, ticks), step in zip(load, steps, strict=False):
        site.now += step
        for _ in range(ticks):
            site.tick(demand)


@settings(max_examples=100)
@given(limits, st.integers(0, 15), st.integers(0, 10**6), st.sampled_from([0.0, 10.0, 300.0]))
def test_under_constant_load_it_comes_to_rest(limits: Limits, demand: int, seed: int, longest_wait: float) -> None:
    site = Site(limits, seed, longest_wait)
    for _ in range(400):
        site.tick(demand)
    assert not any(decision.acts for _, decision in site.decisions[-200:])
    assert len(site.jobs) == max(limits.minimum, min(limits.maximum, demand))


@settings(max_examples=50)
@given(sites, st.lists(st.integers(0, 15), min_size=50, max_size=50))
def test_submits_in_an_hour_are_bounded_whatever_the_load_does(site: Site, load: list[int]) -> None:
    site.limits = replace(site.limits, idle_timeout=None)
    site.walltime = None
    ticks = int(3600 / TICK)
    for i in range(ticks):
        site.tick(load[i % len(load)])
    # A job goes at the next tick at the earliest once it is too many.
    assert site.submits <= site.limits.maximum * 3600 / (2 * TICK)


@settings(max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.floats(0.1, 1.0),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 60.0, 600.0]),
)
def test_the_budget_is_kept_to_within_one_interval(
    gpus: int, maximum: int, hours: float, seed: int, longest_wait: float
) -> None:
    site = Site(Limits(maximum=maximum, gpu_seconds=hours * 3600, gpus_per_job=gpus), seed, longest_wait)
    for _ in range(1000):
        site.tick(10)
    assert site.history.gpu_seconds <= hours * 3600 + gpus * maximum * TICK
    assert not site.jobs or site.history.gpu_seconds < hours * 3600


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 10**6))
def test_a_fixed_size_is_asked_for_and_given_up_at_once(first: int, then: int, seed: int) -> None:
    site = Site(Limits(maximum=first, fixed=True), seed, 100.0)
    site.tick(0)
    assert len(site.jobs) == first
    site.limits = Limits(maximum=then, fixed=True)
    site.tick(0)
    assert len(site.jobs) == then


# Examples


def pending(name: str, submitted: float = 0.0) -> JobView:
    return JobView(name=name, pending=True, submitted=submitted)


def idle(name: str, since: float, **more: float) -> JobView:
    return JobView(name=name, pending=False, submitted=0.0, workers=4, idle_since=since, **more)  # type: ignore[arg-type]


def busy(name: str, **more: float) -> JobView:
    return JobView(name=name, pending=False, submitted=0.0, workers=4, processing=4, **more)  # type: ignore[arg-type]


SIXTEEN = Limits(maximum=16)


def test_the_place_in_the_queue_is_kept_through_the_gaps_that_are_known() -> None:
    waiting = [pending("a"), pending("b")]
    short = Hysteresis((idle_jobs.Gap(earlier=(20.0, 12.0)),) * 2)
    history = History(waits=[120.0], startups=[20.0])
    first = decide(waiting, Demand(), SIXTEEN, history, short, now=100.0)
    assert not first.acts and first.reason.endswith(
        "; job a ends in 25 s if no work comes: a job without work is kept for 25 s, as the last 2 gaps in the work "
        "took up to 20 s"
    )
    again = decide(waiting, Demand(jobs=2, seconds=1e6), SIXTEEN, history, first.hysteresis, now=110.0)
    assert not again.acts
    second = decide(waiting, Demand(), SIXTEEN, history, again.hysteresis, now=200.0)
    assert not second.acts, "the gap is counted anew"
    third = decide(waiting, Demand(), SIXTEEN, history, second.hysteresis, now=226.0)
    assert set(third.cancel) == {"a", "b"}


def test_a_long_tail_gives_back_what_cannot_help() -> None:
    jobs = [busy("a"), busy("b"), *(idle(f"i{n}", since=0.0) for n in range(14))]
    decision = decide(jobs, Demand(jobs=1, seconds=3600.0), SIXTEEN, History(waits=[20.0]), now=100.0)
    assert len(decision.retire) == 14 and not {"a", "b"} & set(decision.retire)


@pytest.mark.parametrize(
    ("earlier", "wait", "keep"),
    [
        ((), 3600.0, 2.0),  # nothing is known: a program may compute for a moment between two pieces of work
        ((8.0, 8.0, 4.0), 40.0, 10.0),  # gaps that are shorter than a start, and a quarter
        ((8.0, 600.0, 8.0), 40.0, 10.0),  # one long one is not waited for
        ((600.0, 500.0, 700.0), 40.0, 1.2),  # a start is cheaper
        ((100.0, 100.0), 1800.0, 125.0),  # on a busy queue it is not
        ((4000.0,), 86400.0, 15.0),  # but no start is worth an hour
        ((1.0,) * 10, 3600.0, 15.0),  # and short gaps do not prove that none is longer
        ((1.0,) * 10, 40.0, 1.25),  # which costs little where a start does
    ],
)
def test_idle_jobs_are_kept_as_long_as_experience_shows_that_it_pays(
    earlier: tuple[float, ...], wait: float, keep: float
) -> None:
    known, history = (
        Hysteresis((idle_jobs.Gap(), idle_jobs.Gap(earlier=earlier))),
        History(waits=[wait], startups=[20.0]),
    )
    jobs, work = [idle("a", since=0.0), busy("b")], Demand(jobs=1, seconds=1e6)
    assert not decide(jobs, work, SIXTEEN, history, known, now=keep - 0.5).acts
    assert decide(jobs, work, SIXTEEN, history, known, now=keep + 0.5).retire == ("a",)


@pytest.mark.parametrize(
    ("earlier", "waited", "keep"),
    [
        ((128.0, 27.0, 27.0, 219.0), (920.0,), 273.75),  # somebody thinks for minutes, and would wait for a quarter
        ((600.0, 500.0, 700.0), (900.0, 900.0, 30.0), 750.0),  # a long pause is still shorter than the wait
        ((600.0, 500.0, 700.0), (40.0,), 3.0),  # a short wait is cheaper
        ((600.0, 500.0, 700.0), (900.0 / 16,), 3.8),  # so is one job of the sixteen for which there is work
        ((4000.0, 4000.0), (86400.0,), 90.0),  # no wait is worth an hour of a job
        ((), (1780.0,), 90.0),  # a first pause is shorter than the wait, but how much is not known
        ((), (20.0,), 2.0),
    ],
)
def test_the_last_job_is_kept_as_long_as_the_wait_for_another_one_is_worth(
    earlier: tuple[float, ...], waited: tuple[float, ...], keep: float
) -> None:
    known = Hysteresis((idle_jobs.Gap(earlier=earlier),), idle_jobs.Standstill(earlier=waited))
    history = History(waits=[86400.0], startups=[20.0])
    assert not decide([idle("a", since=0.0)], Demand(), SIXTEEN, history, known, now=keep - 0.5).acts
    assert decide([idle("a", since=0.0)], Demand(), SIXTEEN, history, known, now=keep + 0.5).retire == ("a",)


def test_the_reason_reports_what_the_last_job_spares() -> None:
    known = Hysteresis((idle_jobs.Gap(earlier=(128.0, 219.0)),), idle_jobs.Standstill(earlier=(920.0, 1400.0)))
    kept = decide([idle("a", since=0.0)], Demand(), SIXTEEN, History(startups=[20.0]), known, now=100.0)
    assert kept.reason == (
        "there is no work; 1 job exists; job a ends in 3 min if no work comes: a job without work is kept for 5 min, "
        "as the last 2 gaps in the work took up to 219 s, and without it all work would be about 1160 s later"
    )
    assert kept.ends == {"a": pytest.approx(273.75)}


def test_the_first_pauses_of_a_person_are_minutes_and_then_they_are_learned() -> None:
    jobs = [idle("a", since=0.0), idle("b", since=0.0)]
    batch, person = Limits(maximum=2), Limits(maximum=2, interactive=True)
    assert set(decide(jobs, Demand(), batch, History(), Hysteresis((idle_jobs.Gap(0.0),) * 2), now=5.0).retire) == {
        "a",
        "b",
    }

    def after(now: float, earlier: tuple[float, ...] = (), limits: Limits = person) -> Decision:
        known = Hysteresis((idle_jobs.Gap(0.0, earlier), idle_jobs.Gap(0.0, earlier)))
        return decide(jobs, Demand(), limits, History(startups=[20.0]), known, now=now)

    waits = after(5.0)
    assert not waits.acts and waits.ends == {"a": 60.0, "b": 300.0}
    assert waits.reason.endswith(
        "; job a ends in 55 s if no work comes: a job without work is kept for 60 s, as you work interactively, and "
        "few of your pauses are known yet"
    )
    assert after(61.0).retire == ("a",) and after(61.0).ends == {"b": 300.0}
    assert after(200.0, (4.0, 5.0)).retire == ("a",), "two short pauses say nothing of the next"
    assert set(after(20.0, (4.0, 5.0, 4.0)).retire) == {"a", "b"}, "three are learned from"
    given = replace(person, idle_timeout=2.0)
    assert set(after(3.0, limits=given).retire) == {"a", "b"}, "what the user gives counts"


def test_how_late_work_is_without_a_job_is_learned() -> None:
    history, limits = History(), Limits(maximum=16)
    work = Demand(jobs=2, seconds=math.inf, waiting=100.0, task=1.0)
    known = decide([], Demand(), limits, history, now=0.0).hysteresis
    known = decide([], work, limits, history, known, now=10.0).hysteresis
    waiting = [pending("a"), pending("b")]
    known = decide(waiting, replace(work, jobs=4), limits, history, known, now=20.0).hysteresis
    assert known.standstill == idle_jobs.Standstill(since=10.0, jobs=4)
    silent = decide(waiting, work, limits, History(silent=True), known, now=30.0).hysteresis
    assert silent.standstill == idle_jobs.Standstill(), "it is not known whether there is work"
    known = decide([busy("a"), pending("b")], work, limits, history, known, now=210.0).hysteresis
    assert known.standstill == idle_jobs.Standstill(earlier=(50.0,)), "one job would have done a quarter of the work"
    known = decide([], work, limits, history, known, now=300.0).hysteresis
    known = decide([], Demand(), limits, history, known, now=400.0).hysteresis
    assert known.standstill == idle_jobs.Standstill(earlier=(50.0,)), "the work was cancelled"
    assert decide([], work, limits, history, known, now=9.0).hysteresis.standstill.since == 9.0
    assert idle_jobs.delay(idle_jobs.Standstill(earlier=(7200.0,)), 20.0) == 20.0, "jobs come sooner by now"
    stepped = idle_jobs.observe_standstill(idle_jobs.Standstill(since=50.0, jobs=1), 1, False, now=20.0)
    assert stepped == idle_jobs.Standstill(since=20.0, jobs=1), "the clock stepped"


def test_on_a_long_queue_jobs_survive_a_pause_that_is_rare() -> None:
    """Gaps of 1 s, and a checkpoint of 8 s in every twentieth iteration: the last ten gaps are all short."""
    history, known, now = History(waits=[3600.0], startups=[20.0]), Hysteresis(), 0.0
    work = Demand(jobs=1, seconds=1e6)
    for iteration in range(1, 101):
        known, began = decide([busy("a")], work, SIXTEEN, history, known, now=now).hysteresis, now
        for _ in range(7 if iteration % 20 == 0 else 1):
            now += 1.0
            decision = decide([idle("a", since=began)], Demand(), SIXTEEN, history, known, now=now)
            assert not decision.acts, f"it is released in iteration {iteration}"
            known = decision.hysteresis
        now += 1.0


def test_gaps_are_learned_for_each_number_of_jobs() -> None:
    seen: tuple[idle_jobs.Gap, ...] = ()
    for now, needed in ((0.0, 3), (10.0, 1), (40.0, 3), (50.0, 0), (55.0, 1), (60.0, 0)):
        seen = idle_jobs.observe(seen, needed, 0, now=now)
    assert seen == (idle_jobs.Gap(60.0, (5.0,)), idle_jobs.Gap(50.0, (30.0,)), idle_jobs.Gap(50.0, (30.0,)))
    assert idle_jobs.observe((idle_jobs.Gap(since=50.0),), 0, 0, now=20.0) == (idle_jobs.Gap(since=20.0),), (
        "the clock stepped"
    )
    for n in range(100):
        seen = idle_jobs.observe(seen, n % 2, 0, now=100.0 + n)
    assert seen[0].earlier == (1.0,) * 10, "old gaps are forgotten"


def test_a_job_whose_workers_start_is_released_when_the_work_is_done() -> None:
    jobs = [JobView(name="starting", pending=False, submitted=0.0)]
    first = decide(jobs, Demand(), SIXTEEN, History(), now=10.0)
    assert not first.acts
    assert decide(jobs, Demand(), SIXTEEN, History(), first.hysteresis, now=13.0).retire == ("starting",)


def test_what_waits_goes_when_the_jobs_that_are_connected_will_have_begun_all_work() -> None:
    history = History(waits=[60.0], startups=[20.0])
    jobs = [busy("a"), pending("b"), pending("c"), pending("d")]
    much = decide(jobs, Demand(jobs=4, seconds=210.0, waiting=200.0, task=10.0), SIXTEEN, history, now=0.0)
    assert not much.acts
    little = Demand(jobs=4, seconds=20.0, waiting=10.0, task=10.0)
    first = decide(jobs, little, SIXTEEN, history, much.hysteresis, now=10.0)
    assert "but when the workers of another job could start, only 1 job would have work" in first.reason
    assert len(decide(jobs, little, SIXTEEN, history, first.hysteresis, now=14.0).cancel) == 3


def test_an_idle_timeout_of_the_user_is_kept_to() -> None:
    limits = Limits(maximum=16, idle_timeout=1800.0)
    assert not decide([idle("a", since=0.0)], Demand(), limits, History(waits=[1.0]), now=1799.0).acts
    assert decide([idle("a", since=0.0)], Demand(), limits, History(waits=[1.0]), now=1800.0).retire == ("a",)


def test_only_jobs_that_would_be_busy_when_their_workers_are_there_are_asked_for() -> None:
    history = History(waits=[600.0], startups=[20.0])
    late = Demand(jobs=4, seconds=300.0, waiting=290.0, task=10.0)
    decision = decide([busy("a")], late, SIXTEEN, history, now=0.0)
    assert decision.submit == 0
    assert "another job could start in 600 s, and by then the present jobs will have begun all work" in decision.reason
    some = replace(late, seconds=680.0, waiting=670.0)
    assert decide([busy("a")], some, SIXTEEN, history, now=0.0).submit == 1, "75 s are left, a job takes 40 s at least"
    nearly = replace(late, seconds=635.0, waiting=625.0)
    decision = decide([busy("a")], nearly, SIXTEEN, history, now=0.0)
    assert decision.submit == 0 and "only 30 s of work would be left then" in decision.reason
    much = replace(late, seconds=3000.0, waiting=2990.0)
    assert decide([busy("a")], much, SIXTEEN, history, now=0.0).submit == 3
    assert decide([busy("a"), pending("b"), pending("c")], some, SIXTEEN, history, now=0.0).submit == 0, "enough wait"
    assert decide([], late, SIXTEEN, history, now=0.0).submit == 4
    assert decide([], replace(late, waiting=1.0), SIXTEEN, history, now=0.0).submit == 1, "nothing at all runs"
    assert decide([busy("a")], late, SIXTEEN, History(), now=0.0).submit == 3, "nothing is known of the queue"


@pytest.mark.parametrize("tasks", [0, 1, 20, 100])
def test_full_memory_brings_another_job_whatever_the_work_is(tasks: int) -> None:
    history = History(waits=[300.0], startups=[20.0])
    demand = Demand(jobs=math.ceil(tasks / 5), seconds=float(tasks), waiting=float(tasks), task=1.0, memory=2)
    decision = decide([busy("a")], demand, SIXTEEN, history, now=0.0)
    assert decision.submit == 1 and "2 jobs needed as the workers' memory is nearly full" in decision.reason
    coming = decide([busy("a"), pending("b")], demand, SIXTEEN, history, decision.hysteresis, now=100.0)
    assert not coming.acts, "it is on its way, and stays"
    assert decide([busy("a")], demand, Limits(maximum=1), history, now=0.0).submit == 0
    assert decide([busy("a")], replace(demand, memory=0), SIXTEEN, history, now=0.0).submit == 0


def test_workers_that_a_program_holds_or_waits_for_bring_jobs_and_keep_them() -> None:
    history = History(waits=[300.0], startups=[20.0])
    decision = decide([busy("a")], Demand(held=3), SIXTEEN, history, now=0.0)
    assert decision.submit == 2 and "3 jobs needed for workers that a program holds" in decision.reason
    assert decide([], Demand(held=3), Limits(maximum=2), history, now=0.0).submit == 2
    kept = decide([idle("a", since=0.0), idle("b", since=0.0)], Demand(held=2), SIXTEEN, history, now=36000.0)
    assert not kept.acts
    assert decide([idle("a", since=0.0)], Demand(), SIXTEEN, history, now=36000.0).retire == ("a",)


def test_paused_workers_do_no_work_that_waits() -> None:
    history = History(waits=[300.0], startups=[20.0])
    demand = Demand(jobs=4, seconds=100.0, waiting=100.0, task=1.0)
    assert decide([busy("a")], demand, SIXTEEN, history, now=0.0).submit == 0, "it does all that in 300 s"
    paused = replace(demand, seconds=math.inf)
    assert decide([busy("a", paused=4)], paused, SIXTEEN, history, now=0.0).submit == 2, "40 s each at least"
    assert decide([busy("a"), busy("b", paused=4)], demand, SIXTEEN, history, now=0.0).submit == 0, "one works"


def test_a_short_task_behind_long_ones_gets_a_job() -> None:
    history = History(waits=[60.0], startups=[20.0])
    behind = Demand(jobs=2, seconds=3650.0, waiting=50.0, task=50.0)
    assert decide([busy("a")], behind, SIXTEEN, history, now=0.0).submit == 1


def test_a_job_that_ends_soon_does_not_run_on_without_work() -> None:
    history = History(waits=[600.0], startups=[20.0])
    ending = [idle("a", since=100.0, leaves=300.0)]
    assert decide(ending, Demand(), SIXTEEN, history, now=104.0).retire == ("a",)
    assert not decide(ending, Demand(jobs=1, seconds=5.0), SIXTEEN, history, now=104.0).retire
    holds = [idle("a", since=100.0, leaves=300.0, wanted=10, memory=100.0), pending("b")]
    assert not decide(holds, Demand(), SIXTEEN, history, now=104.0).acts, "its data has no other place yet"


def test_a_replacement_is_asked_for_early_enough() -> None:
    history = History(waits=[600.0], startups=[20.0])
    jobs = [busy("a", leaves=1000.0)]
    assert decide(jobs, Demand(jobs=1, seconds=1e6), Limits(maximum=1), history, now=399.0).submit == 0
    assert decide(jobs, Demand(jobs=1, seconds=1e6), Limits(maximum=1), history, now=401.0).submit == 1
    assert decide(jobs, Demand(), Limits(maximum=1), history, now=401.0).submit == 0, "there is no work left"


def test_the_minimum_is_kept_when_jobs_end() -> None:
    history = History(waits=[3600.0], startups=[20.0])
    limits = Limits(minimum=2, maximum=4)
    ending = [idle(name, since=900.0, leaves=1500.0) for name in "ab"]
    assert decide(ending, Demand(), limits, history, now=1000.0).submit == 2
    assert decide([*ending, pending("c")], Demand(), limits, history, now=1000.0).submit == 1
    assert not decide([*ending, pending("c"), pending("d")], Demand(), limits, history, now=1000.0).acts


def test_who_goes_first_costs_least() -> None:
    jobs = [
        busy("busy"),
        idle("much data", since=50.0, nbytes=10**9),
        idle("little walltime", since=50.0, leaves=2000.0),
        idle("idle for long", since=10.0, nbytes=10**9),
        pending("old", submitted=1.0),
        pending("young", submitted=2.0),
    ]
    order = []
    for size in (5, 4, 3, 2, 1, 0):
        decision = decide(jobs, Demand(), Limits(maximum=size, fixed=True), History(), now=100.0)
        [gone] = [*decision.cancel, *decision.retire]
        order.append(gone)
        jobs = [job for job in jobs if job.name != gone]
    assert order == ["young", "old", "idle for long", "little walltime", "much data", "busy"]


def test_what_clients_still_want_keeps_as_few_jobs_as_can_hold_it_and_the_reason_reports_it() -> None:
    def holder(name: str, wanted: int, **more: float) -> JobView:
        return idle(name, since=0.0, nbytes=wanted, wanted=wanted, memory=10e9, **more)

    two = [holder("a", 1 * 10**9), holder("b", 10**9)]
    decision = decide(two, Demand(), SIXTEEN, History(), now=100.0)
    assert decision.retire == ("a",) and decision.target == 1
    assert decision.reason.startswith(
        "there is no work; 1 job needed to hold 2 GB of data that clients still need; 2 jobs exist"
    )
    last = decide([holder("b", 2 * 10**9)], Demand(), SIXTEEN, History(), now=100.0)
    assert (
        not last.acts
        and last.reason == "there is no work; 1 job needed to hold 2 GB of data that clients still need; 1 job exists"
    )
    full = [holder("a", 4 * 10**9), holder("b", 4 * 10**9)]
    assert not decide(full, Demand(), SIXTEEN, History(), now=100.0).acts, "one could not hold it"
    assert decide([*full, holder("c", 0)], Demand(), SIXTEEN, History(), now=100.0).retire == ("c",)
    above = decide(full, Demand(), Limits(maximum=1), History(), now=100.0)
    assert not above.acts and "no idle job can end: the others cannot hold its data" in above.reason
    moving = [holder("a", 4 * 10**9, draining=True), holder("b", 0), holder("c", 4 * 10**9)]
    assert not decide(moving, Demand(), SIXTEEN, History(), now=100.0).acts, (
        "what a job that leaves holds needs room too"
    )
    unlimited = [idle(name, since=0.0, wanted=10**12, memory=math.inf) for name in "ab"]
    assert decide(unlimited, Demand(), SIXTEEN, History(), now=100.0).retire == ("a",)
    nobody_wants = [idle("a", since=0.0, nbytes=10**9, memory=10e9)]
    assert decide(nobody_wants, Demand(), SIXTEEN, History(), now=100.0).retire == ("a",)
    budget = Limits(maximum=16, gpu_seconds=3600.0)
    assert decide(two, Demand(), budget, History(gpu_seconds=3600.0), now=100.0).retire == ("a", "b")
    assert decide(two, Demand(), Limits(maximum=0, fixed=True), History(), now=100.0).retire == ("a", "b")


def test_a_job_with_actors_stays_and_others_go() -> None:
    jobs = [idle("a", since=0.0, actors=1, memory=10e9), idle("b", since=50.0, wanted=10, memory=10e9)]
    decision = decide(jobs, Demand(), SIXTEEN, History(), now=100.0)
    assert (
        decision.retire == ("b",)
        and "1 job needed to hold 10 B of data that clients still need and 1 actor" in decision.reason
    )
    assert decide(jobs, Demand(), Limits(maximum=1, fixed=True), History(), now=100.0).retire == ("b",)


def test_the_backlog_bounds_what_waits() -> None:
    limits = Limits(maximum=16, backlog=2)
    assert decide([pending("a")], Demand(jobs=16, seconds=1e6), limits, History(), now=0.0).submit == 1
    full = decide([pending("a"), pending("b")], Demand(jobs=16, seconds=1e6), limits, History(), now=0.0)
    assert full.submit == 0 and "2 jobs already pending (backlog=2)" in full.reason


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        (History(paused="3 worker jobs failed in a row"), "paused: 3 worker jobs failed in a row"),
        (History(next_try=30.0), "next submit in 30 s, after a failure"),
        (History(full="QOSMaxJobsPerUserLimit"), "the site accepts no more jobs now: QOSMaxJobsPerUserLimit"),
    ],
)
def test_why_nothing_is_asked_for_is_reported(history: History, reason: str) -> None:
    decision = decide([], Demand(jobs=2, seconds=1e6), SIXTEEN, history, now=0.0)
    assert decision.submit == 0 and reason in decision.reason


def test_a_budget_that_has_ended_brings_no_job_when_the_jobs_have_ended() -> None:
    limits = Limits(maximum=20, gpu_seconds=100 * 3600.0, gpus_per_job=4)
    demand = Demand(jobs=20, seconds=1e5, waiting=1e5, task=10.0)
    jobs = [busy(f"j{n}") for n in range(20)]
    over = decide(jobs, demand, limits, History(gpu_seconds=100 * 3600.0 - 2399.0), now=0.0)
    assert over.over and len(over.retire) == 20
    after = History(gpu_seconds=100 * 3600.0 - 2000.0)
    ended = decide([], demand, limits, after, over.hysteresis, now=5.0)
    assert ended.over and not ended.submit and "is used up" in ended.reason
    again = decide([], demand, limits, after, ended.hysteresis, now=10.0)
    assert again.over and not again.submit
    assert decide([], demand, limits, after, now=10.0).submit == 1, "limits that the user sets anew begin anew"


@pytest.mark.parametrize(("wanted", "submitted"), [(25, 0), (30, 1)])
def test_a_job_that_ends_is_replaced_if_its_results_would_fill_more_than_half_of_the_memory_of_the_others(
    wanted: int, submitted: int
) -> None:
    stays, ends = (idle("a", 0.0, wanted=wanted, memory=100.0), idle("b", 0.0, wanted=wanted, memory=100.0, leaves=1.0))
    assert decide([stays, ends], Demand(), SIXTEEN, History(), now=100.0).submit == submitted


def test_a_job_that_ends_uses_the_budget_as_long_as_it_runs() -> None:
    limits, jobs = Limits(maximum=2, gpu_seconds=3600.0), [busy("a"), replace(busy("b"), draining=True)]
    assert not decide(jobs[:1], Demand(jobs=1, seconds=1e6), limits, History(gpu_seconds=3555.0), now=0.0).over
    assert decide(jobs, Demand(jobs=1, seconds=1e6), limits, History(gpu_seconds=3555.0), now=0.0).over


def test_a_job_that_could_not_run_for_long_within_the_budget_is_not_asked_for() -> None:
    limits = Limits(maximum=16, gpu_seconds=3600.0, gpus_per_job=4)
    assert decide([], Demand(jobs=16, seconds=1e6), limits, History(), now=0.0).submit == 3  # 300 s of 4 GPUs each
    assert decide([busy("a"), busy("b")], Demand(jobs=16, seconds=1e6), limits, History(), now=0.0).submit == 1
    short = decide([], Demand(jobs=16, seconds=1e6), limits, History(gpu_seconds=3000.0), now=0.0)
    assert short.submit == 0 and "the budget of 1 GPU hour is too small for another job" in short.reason


def test_a_job_on_which_a_call_runs_or_whose_gpu_works_is_kept_and_the_reason_reports_it() -> None:
    def idle(name: str, **more: int) -> JobView:
        since = None if more else 0.0
        return JobView(name=name, pending=False, submitted=0.0, workers=1, memory=MEMORY, idle_since=since, **more)

    limits = Limits(maximum=3, idle_timeout=1.0)
    jobs = [idle("called", calls=1), idle("computes", computing=1), idle("free")]
    decision = decide(jobs, Demand(), limits, History(), now=1000.0)
    assert decision.retire == ("free",)
    assert "1 call runs on the workers of 1 job and job computes is kept, as its GPU works" in decision.reason
    by_hand = decide(
        [jobs[0], idle("tasks", processing=5)], Demand(jobs=2), Limits(maximum=1, fixed=True), History(), now=1000.0
    )
    assert by_hand.retire == ("tasks",), "tasks can run again elsewhere, a call cannot"


def test_a_budget_is_near_its_end_from_80_per_cent_on_and_short_where_work_waits_that_it_cannot_pay() -> None:
    limits = Limits(maximum=1, gpu_seconds=3600.0)
    nothing, work = Demand(), Demand(jobs=1, seconds=1e6)

    def stage(used: float, jobs: list[JobView], demand: Demand) -> tuple[budget.Stage, str]:
        decision = decide(jobs, demand, limits, History(gpu_seconds=used), now=0.0)
        at = budget.stage(limits, used, decision)
        return at, budget.words(at, "cluster demo", limits, used)

    assert stage(2879.0, [busy("a")], work) == (budget.Stage.FREE, "")
    near, words = stage(2880.0, [busy("a")], work)
    assert near is budget.Stage.NEAR and words.startswith("cluster demo has used 80 % of its budget of 1 GPU hour.")
    assert "call adapt with a maximum_gpu_hours above 1, or scale" in words
    assert stage(3400.0, [busy("a")], work)[0] is budget.Stage.NEAR, "a job that runs goes on"
    assert stage(3400.0, [], nothing)[0] is budget.Stage.NEAR, "nobody needs a job"
    short, words = stage(3400.0, [], work)
    assert short is budget.Stage.SHORT and "too small for a job: 0.0556 of 1 GPU hour are left" in words
    spent, words = stage(3590.0, [busy("a")], work)
    assert spent is budget.Stage.SPENT and "has used up its budget of 1 GPU hour (0.997 used)" in words
    assert budget.stage(Limits(maximum=1), 1e9, decide([], work, Limits(maximum=1), History(), now=0.0)) is (
        budget.Stage.FREE
    )


def test_a_large_and_a_small_budget_are_shown_as_the_user_gave_them() -> None:
    for hours, used in (("12345", "12345"), ("0.01", "0.00425")):
        limits, history = Limits(maximum=1, gpu_seconds=3600 * float(hours)), History(gpu_seconds=3600 * float(used))
        over = decide([busy("a")], Demand(), limits, history, now=0.0)
        words = budget.words(budget.stage(limits, history.gpu_seconds, over), "c", limits, history.gpu_seconds)
        assert f"its budget of {hours} GPU hours ({used} used)" in words
        assert f"maximum_gpu_hours above {hours}," in words
        assert over.reason == f"the budget of {hours} GPU hours is used up ({used} used)"


def test_jobs_with_actors_stay_even_if_there_are_more_than_the_user_allows() -> None:
    """An actor cannot move: who lowers the maximum keeps its state until the program has released it."""
    jobs = [idle(name, since=0.0, actors=1, memory=MEMORY) for name in ("a", "b")]
    assert not decide(jobs, Demand(), Limits(maximum=1), History(), now=1e5).retire
    jobs[1] = idle("b", since=0.0, memory=MEMORY)
    assert decide(jobs, Demand(), Limits(maximum=1), History(), now=1e5).retire == ("b",)
