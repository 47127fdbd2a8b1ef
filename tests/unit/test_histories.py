"""Whatever happens to the jobs of a cluster, in whatever order: what must always hold of its manager."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable, ClusterError, OptionError, SubmitLimited, SubmitRefused
from hpcgpu.jobs import scheduler_job
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.jobs.scheduler_job import SchedulerJob
from hpcgpu.manager import draining, restart_scheduler
from hpcgpu.manager.closing import Closing
from hpcgpu.manager.worker_groups import WorkerGroups
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.scheduler_restarts import ended_too_early
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Close, Command, DeleteGroup, Detach, Resume, Scale
from hpcgpu.store.contact import Contact
from tests.unit.simulated import HOUR, Queue, Site, restarts, taken_over

#: A further group of workers.
MORE = "cpu"
#: How the names of scheduler jobs begin.
SCHEDULER = "demo-scheduler"
#: How many new histories are tried, such as 5000; without it forty, always the same ones.
NEW = os.environ.get("HPCGPU_HISTORIES")

_ENDS = [
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
    JobState.OUT_OF_MEMORY,
]
_REFUSALS: list[Callable[[], Exception]] = [
    lambda: SubmitRefused("sbatch: error: invalid partition"),
    lambda: SubmitLimited("sbatch: error: QOSMaxSubmitJobPerUserLimit"),
    lambda: BatchUnavailable("sbatch: error: Unable to contact slurm controller"),
]


class Faulty(Queue):
    """A queue that refuses, is silent, loses its answer, or accepts a job only after the submit has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses_cancels = self.accepts_late = self.holds_back = False
        self.late: dict[str, float] = {}
        self.polls, self.cancelled = 0, set[str]()
        #: Are called before each submit and each cancel: what must hold then.
        self.submits: Callable[[str], None] = lambda name: None
        self.cancels: Callable[[JobStatus], None] = lambda job: None

    def submit(self, script: Path, **arguments: Any) -> str:
        self.submits(arguments["job_name"])
        if self.accepts_late and self.refusal is None:
            self.late[arguments["job_name"]] = 0.0
            raise AmbiguousSubmit(f"it is not known whether job {arguments['job_name']!r} exists")
        return super().submit(script, **arguments)

    def accept(self, seconds: float) -> None:
        """Accept the jobs whose submit has failed before, unless an hour has passed since."""
        self.late = {name: age + seconds for name, age in self.late.items() if age < 3600}
        while self.late and not (self.silent or self.loses_answers or self.holds_back):
            super().submit(Path("worker"), job_name=self.late.popitem()[0])

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        if self.refuses_cancels:
            raise BatchUnavailable("scancel: error: Access/permission denied")
        ids = list(job_ids)
        for job in (self.jobs[job_id] for job_id in ids):
            if job.state is JobState.RUNNING and not only_pending:
                self.cancels(job)
        self.cancelled.update(self.jobs[job_id].name for job_id in ids)
        super().cancel(ids, only_pending=only_pending)

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        self.polls += 1
        return super().poll(job_ids)


@dataclass
class World:
    """A cluster, its queue, its nodes, and the managers that it has had."""

    site: Site
    path: Path
    queue: Faulty
    full: bool = False
    unwritten: bool = False
    #: All messages of earlier managers.
    said: list[str] = field(default_factory=list)
    #: When submits were tried, and what went wrong when jobs were submitted and cancelled.
    tries: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    #: Worker jobs that the queue had when the scheduler ended.
    kept: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.queue.submits, self.queue.cancels = self.submits, self.cancels

    def submits(self, name: str) -> None:
        """Between two schedulers only a scheduler job is submitted."""
        if self.queue.refusal is not None:
            self.tries.append(self.site.now)
        if self.restarting and not name.startswith(SCHEDULER):
            self.broken.append(f"{name} is submitted, and the cluster has no scheduler")

    def cancels(self, job: JobStatus) -> None:
        """A job that runs is cancelled after its workers have retired, unless the whole cluster ends."""
        client, ends = self.site.client, self.over or self.site.state.cancelling or self.site.directory.closing
        there = {str(worker["name"]) for worker in client.there.values()}
        if job.name in there - client.retired and not ends and not self.restarting:
            self.broken.append(f"{job.name} is cancelled, and its worker works")

    @property
    def live(self) -> list[JobStatus]:
        """The worker jobs that the queue has."""
        return [job for job in self.alive if not job.name.startswith(SCHEDULER)]

    @property
    def alive(self) -> list[JobStatus]:
        """All jobs that the queue has."""
        return [job for job in self.queue.jobs.values() if not job.state.ended]

    @property
    def restarting(self) -> bool:
        """Whether the scheduler has ended, and no other one was reached yet."""
        return self.site.state.phase.restarting

    @property
    def scheduler(self) -> SchedulerJob:
        """The present scheduler job."""
        job = self.site.state.scheduler
        assert isinstance(job, SchedulerJob)
        return job

    @property
    def scheduler_ended(self) -> bool:
        """Whether the queue has not the present scheduler job any more."""
        job_id = self.scheduler.job_id
        return job_id is None or self.queue.jobs[job_id].state.ended

    def pick(self, index: int, state: JobState) -> str | None:
        """The name of a job in a state, if there is one and the manager has it."""
        known = {job.job_id: job.name for job in self.site.registry.worker_jobs}
        names = [known[job.job_id] for job in self.live if job.state is state and job.job_id in known]
        return names[index % len(names)] if names else None

    def nodes(self) -> None:
        """Workers whose job has ended are gone."""
        there = {name: job for name, job in self.site.registry.jobs.items() if job.job_id in self.queue.jobs}
        for worker in list(self.site.client.there.values()):
            job = there.get(str(worker["name"]))
            if job is None or self.queue.jobs[job.job_id or ""].state.ended:
                self.site.loses(str(worker["name"]))

    async def settled(self) -> None:
        self.nodes()
        await self.site.settled()
        made = self.site.reconciler.restarts
        while made is not None and made.tasks and not self.waits_for_scheduler:
            await asyncio.sleep(0.001)
        await self.site.settled()
        self.nodes()

    @property
    def waits_for_scheduler(self) -> bool:
        """Whether the manager waits for the scheduler of a job that may still start."""
        site, job = self.site, self.scheduler
        contact = site.directory.contact()
        known = job.name in site.registry.jobs and (job.job_id or site.state.dispatcher.expects(job.name))
        reached = contact is not None and contact.job_id == job.job_id
        lost = job.ended or site.state.failures.unschedulable([job.name])
        return bool(site.state.managed and known) and not (reached or lost or site.directory.closing)

    # What may happen

    async def order(self, command: Command) -> None:
        over, before = self.over or self.site.directory.closing, self.site.directory.wanted()
        refused = over or (self.full and isinstance(command, Detach))  # without the record, the jobs would end
        if isinstance(command, AddGroup | DeleteGroup):
            refused = refused or (self.full and isinstance(command, AddGroup))
        elif getattr(command, "group", DEFAULT) not in self.site.registry.groups:
            return
        groups = WorkerGroups(self.site.reconciler, self.site.options)
        try:
            if isinstance(command, AddGroup):
                groups.add(command, self.site.options.worker)
            elif isinstance(command, DeleteGroup):
                groups.delete(command)
            else:
                self.site.reconciler.order(command)
        except OptionError:
            assert isinstance(command, AddGroup | DeleteGroup)
            assert (command.group in self.site.registry.groups) == isinstance(command, AddGroup)
        except ClusterError as error:
            assert refused and str(error), f"{command} was refused: {error}"
            assert self.site.directory.wanted() == before, "a command that is refused changes nothing"
        else:
            assert not refused, f"{command} was accepted"
            self.unwritten = self.full

    @property
    def over(self) -> bool:
        """Whether the cluster is lost or closed."""
        return not self.site.state.managed

    async def passes(self, seconds: int) -> None:
        tried = len(self.tries)
        for _ in range(seconds // 5):
            self.site.now += 5
            polls = self.queue.polls
            if not self.site.directory.closing:  # in a closed cluster such a job ends at once
                self.queue.accept(5)
            if self.site.state.cancelling:
                await self.site.reconciler.end_all()
            if not self.over:
                await self.site.reconciler.observe_queue()
                await self.site.reconciler.observe_load()
                self.site.reconciler.decide()
            await self.settled()
            assert self.queue.polls <= polls + 3, "one poll is for all jobs, and one for all that are cancelled"
        assert len(set(self.tries[tried:])) <= 5 + seconds // 20, "what the queue refuses is tried too often"

    async def starts(self, index: int) -> None:
        if name := self.pick(index, JobState.PENDING):
            await self.site.starts(name)

    async def ends(self, index: int, state: JobState) -> None:
        if name := self.pick(index, JobState.RUNNING):
            await self.site.ends(name, state)

    async def cancelled_by_somebody(self, index: int) -> None:
        if name := self.pick(index, JobState.PENDING):
            self.site.says(name, JobState.CANCELLED, end=self.site.now)

    async def requeued(self, index: int) -> None:
        if name := self.pick(index, JobState.RUNNING):
            for address in list(self.site.job(name).workers):
                self.site.loses(address.removeprefix("tls://"))
            self.site.says(name, JobState.PENDING)

    async def loses_worker(self, index: int) -> None:
        workers = sorted(str(worker["name"]) for worker in self.site.client.there.values())
        if workers:
            self.site.loses(workers[index % len(workers)])

    async def silent(self, on: bool) -> None:
        self.queue.silent = on

    async def refuses_cancels(self, on: bool) -> None:
        self.queue.refuses_cancels = on

    async def refuses_submits(self, which: int) -> None:
        self.queue.refusal = _REFUSALS[which]() if which < len(_REFUSALS) else None

    async def loses_answers(self, on: bool) -> None:
        self.queue.loses_answers = on

    async def accepts_late(self, on: bool) -> None:
        self.queue.accepts_late = on

    async def holds_back(self, on: bool) -> None:
        self.queue.holds_back = on

    async def scheduler_is_silent(self, on: bool) -> None:
        self.site.client.listening = not on

    async def data_fits_nowhere(self, on: bool) -> None:
        self.site.client.full = on

    async def scheduler_ends(self, state: JobState) -> None:
        if self.scheduler_ended:
            return
        self.kept = {job.name for job in self.live}
        self.site.says(self.scheduler.name, state, end=self.site.now)
        self.site.client.listening = False
        for worker in list(self.site.client.there.values()):
            self.site.loses(str(worker["name"]))

    async def scheduler_fails(self, state: JobState) -> None:
        """The scheduler ends, and another one should follow."""
        if self.site.reconciler.restarts is not None:
            await self.scheduler_ends(state)

    async def may_restart(self) -> None:
        """The cluster has `on_scheduler_end="restart"`."""
        if self.site.reconciler.restarts is None:
            self.site.reconciler.restarts = restarts(self.site, self.path)
            self.scheduler.restarts = True

    async def walltime_of_scheduler_ends_soon(self) -> None:
        if not self.scheduler_ended:
            self.site.says(self.scheduler.name, JobState.RUNNING, start=self.site.now - HOUR, end=self.site.now + 60)

    async def next_scheduler_starts(self) -> None:
        """The next scheduler listens, and the workers of the jobs that have waited for it connect."""
        if not self.restarting or self.scheduler_ended or self.site.directory.closing:
            return
        job_id, made = self.scheduler.job_id, self.site.reconciler.restarts
        assert job_id is not None and made is not None
        self.site.says(self.scheduler.name, JobState.RUNNING, start=self.site.now, end=self.site.now + 48 * HOUR)
        token = self.site.directory.token()
        if not self.full:
            self.site.directory.publish(Contact(token=token, job_id=job_id, workers="ucx://s", client="tls://s"))
            self.site.client.listening = True
            await made.over()
            known = {job.name for job in self.site.registry.worker_jobs}
            for job in self.live:
                if job.state is JobState.RUNNING and job.name in known:
                    self.site.client.there[f"tls://{job.name}"] = {"name": job.name}
                    self.site.reconciler.worker_joined(f"tls://{job.name}", job.name)

    async def closes(self) -> None:
        if not self.site.state.phase.closing:
            self.site.reconciler.order(Close())
            self.site.state.closes()
            await Closing(self.site.reconciler, quiet=True).cancel()

    async def stop_begins(self) -> None:
        """Another program closes the cluster, and is killed before it cancels a job."""
        if not self.full:
            self.site.directory.begin_close()

    async def disk_is_full(self, on: bool) -> None:
        self.full = on
        for write in ("write", "_append"):
            if on:
                setattr(self.site.directory, write, _no_room)
            else:
                self.site.directory.__dict__.pop(write, None)

    async def taken_over(self) -> None:
        ended = self.scheduler_ended or self.restarting or self.site.directory.closing
        if self.queue.silent or self.over or ended or self.full:  # nothing is taken over then
            return
        before = self.site
        await before.settled()
        self.site = await taken_over(before, self.path)
        self.said += before.logged + before.warned
        self.site.reconciler.drainer.continue_drains()
        jobs = dict(self.queue.jobs)
        with pytest.raises(ClusterError, match="was taken over by"):
            before.reconciler.order(Scale(DEFAULT, 7))
        await before.settled()
        assert self.queue.jobs == jobs, "the earlier manager still acts"

    async def taken_over_in_the_middle(self, command: Command) -> None:
        """Another manager comes while the submits and drains of a command are under way."""
        ended = self.scheduler_ended or self.restarting or self.site.directory.closing
        if self.queue.silent or self.over or ended or self.full:
            return
        before = self.site
        await self.order(command)
        await asyncio.sleep(0)
        self.site = await taken_over(before, self.path)
        self.said += before.logged + before.warned
        self.site.reconciler.drainer.continue_drains()
        await before.settled()
        with pytest.raises(ClusterError, match="was taken over by"):
            before.reconciler.order(Scale(DEFAULT, 7))

    async def healed(self) -> None:
        """Nothing goes wrong any more, and the user asks once more for what is wanted."""
        await self.disk_is_full(False)
        self.queue.silent = self.queue.refuses_cancels = self.queue.loses_answers = self.queue.accepts_late = False
        self.queue.holds_back = False
        self.queue.refusal, self.site.client.full = None, False
        self.site.client.listening = not (self.scheduler_ended or self.restarting)
        for _ in range(4):
            await self.passes(400)
            await self.next_scheduler_starts()
        if self.over or self.site.directory.closing:
            return
        for group in self.site.registry.groups:
            self.site.reconciler.order(Resume(group))
        await self.passes(1500)


def _no_room(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_on = st.booleans()
_index = st.integers(0, 5)
_step = st.one_of(
    st.tuples(st.just("order"), st.integers(0, 4).map(lambda jobs: Scale(DEFAULT, jobs))),
    st.tuples(
        st.just("order"),
        st.tuples(st.integers(0, 2), st.integers(2, 5)).map(
            lambda size: Adapt(DEFAULT, Limits(minimum=size[0], maximum=size[1]), 5.0)
        ),
    ),
    st.tuples(st.just("order"), st.sampled_from([Resume(DEFAULT), Detach()])),
    st.tuples(st.just("order"), st.integers(0, 2).map(lambda jobs: AddGroup(MORE, jobs, script="#!/bin/sh"))),
    st.tuples(st.just("order"), st.sampled_from([DeleteGroup(MORE), Scale(MORE, 2), Scale(MORE, 0)])),
    st.tuples(st.just("walltime_of_scheduler_ends_soon")),
    st.tuples(st.just("next_scheduler_starts")),
    st.tuples(st.just("next_scheduler_starts")),
    st.tuples(st.just("scheduler_fails"), st.sampled_from([one for one in _ENDS if ended_too_early(one)])),
    st.tuples(st.just("passes"), st.sampled_from([5, 20, 100, 400])),
    st.tuples(st.just("starts"), _index),
    st.tuples(st.just("starts"), _index),
    st.tuples(st.just("ends"), _index, st.sampled_from(_ENDS)),
    st.tuples(st.just("cancelled_by_somebody"), _index),
    st.tuples(st.just("requeued"), _index),
    st.tuples(st.just("loses_worker"), _index),
    st.tuples(st.just("silent"), _on),
    st.tuples(st.just("refuses_cancels"), _on),
    st.tuples(st.just("refuses_submits"), st.integers(0, 5)),
    st.tuples(st.just("loses_answers"), _on),
    st.tuples(st.just("accepts_late"), _on),
    st.tuples(st.just("holds_back"), _on),
    st.tuples(st.just("scheduler_is_silent"), _on),
    st.tuples(st.just("data_fits_nowhere"), _on),
    st.tuples(st.just("disk_is_full"), _on),
    st.tuples(st.just("taken_over")),
    st.tuples(st.just("taken_over_in_the_middle"), st.integers(0, 4).map(lambda jobs: Scale(DEFAULT, jobs))),
)
#: Whether another scheduler follows one that has ended.
_begin = st.sampled_from([(), (("may_restart",),)])
#: How the cluster ends, if it does not end with the history.
_end = st.one_of(
    st.just(()),
    st.tuples(st.tuples(st.just("scheduler_ends"), st.sampled_from(_ENDS))),
    st.tuples(st.tuples(st.just("closes"))),
    st.tuples(st.tuples(st.just("stop_begins"))),
)


def check(world: World) -> None:
    """What must hold after each step."""
    site = world.site
    journal = {submit.name: submit for submit in site.directory.submits()}
    names = [job.name for job in world.live]
    assert len(names) == len(set(names)), f"a job is doubled: {names}"
    for job in world.alive:
        assert job.name in journal and journal[job.name].job_id in (job.job_id, None), f"no journal knows {job}"
    for name, (state, _) in site.shown.items():
        assert state != "pending" or not site.registry.jobs[name].workers, f"{name} is shown as pending, and it works"
    assert not world.broken, world.broken
    check_reports(world)
    check_scheduler(world)
    world.unwritten |= world.full  # until the next command
    if not world.unwritten:
        kept = site.directory.wanted()
        assert replace(kept, closing=site.state.wanted.closing) == site.state.wanted
        assert kept.closing or not site.state.wanted.closing, "the close is not recorded"


def check_reports(world: World) -> None:
    """Nothing fails silently."""
    site = world.site
    said = "\n".join([*world.said, *site.logged, *site.warned])
    assert "internal error" not in said, said
    for job in site.registry.worker_jobs:
        phase = job.phase
        if isinstance(phase, Ended) and phase.handled and not (phase.drained or phase.presumed):
            assert f"worker job {job.job_id} ({job.name})" in said, f"nobody reports the end of {job.name}"
    if why := site.state.phase.lost:
        assert any(text.startswith(why) for text in site.warned), "nobody reports that the cluster is lost"


def check_scheduler(world: World) -> None:
    """There is one scheduler, and what waited in the queue for the next one is kept."""
    site = world.site
    unwanted = {submit.name for submit in site.directory.submits() if submit.unwanted or submit.ended}
    schedulers = [job.name for job in world.alive if job.name.startswith(SCHEDULER) and job.name not in unwanted]
    made = site.reconciler.restarts
    waiting = {job.name for job in (made.following, made._replaced) if job is not None} if made is not None else set()
    assert len(set(schedulers) - waiting) <= 1, f"the cluster has several schedulers: {schedulers}, {waiting}"
    if not world.restarting:
        world.kept.clear()
    elif not site.directory.closing:
        ended = {job.name for job in world.queue.jobs.values() if job.state.ended and job.name not in unwanted}
        assert not world.kept & ended & world.queue.cancelled, "a job that waits for the next scheduler is cancelled"


async def history(steps: list[tuple[Any, ...]], path: Path) -> None:
    site = Site(path)
    queue = site.queue = site.state.dispatcher.batch = site.state.dispatcher.monitor.batch = Faulty()
    world = World(site, path, queue)
    await site.begin(2)
    for name, *arguments in steps:
        over = {job.name for job in world.site.registry.worker_jobs if isinstance(job.phase, Ended)}
        await getattr(world, name)(*arguments)
        await world.settled()
        check(world)
        if world.queue.silent and name == "passes":
            ended = {job.name for job in world.site.registry.worker_jobs if isinstance(job.phase, Ended)}
            assert ended <= over, "the queue does not answer, and that ends jobs"
    await world.healed()
    check(world)
    if world.site.directory.closing and not world.over:  # as the next `hpcgpu stop`
        await world.closes()
    if world.over:
        assert not world.live, f"the cluster is over, and jobs are left: {world.live}"
        return
    ours = {job.name for job in world.live if world.queue.find(job.name)}
    for group in world.site.registry.groups.values():
        least = group.limits.maximum if group.limits.fixed else group.limits.minimum
        assert least <= len(ours & {job.name for job in group.jobs}) <= group.limits.maximum
        ours -= {job.name for job in group.jobs}
    assert not ours, "a group that was deleted has jobs"
    await world.closes()
    assert not world.live, f"jobs are left: {world.live}"


@pytest.mark.timeout(0)  # it computes for a minute, and on a busy machine for many
@settings(max_examples=int(NEW or 40), derandomize=not NEW, deadline=None, suppress_health_check=list(HealthCheck))
@given(_begin, st.lists(_step, min_size=3, max_size=30), _end, st.lists(_step, max_size=10))
@example((), [("loses_answers", True), ("order", Scale(DEFAULT, 3)), ("loses_answers", False)], (), [("passes", 100)])
@example((), [("accepts_late", True), ("order", Scale(DEFAULT, 3)), ("taken_over",)], (), [("passes", 100)])
@example(
    (("may_restart",),),
    [
        ("scheduler_fails", JobState.NODE_FAIL),
        ("passes", 20),
        ("order", Scale(DEFAULT, 4)),
        ("passes", 20),
        ("scheduler_fails", JobState.FAILED),
        ("passes", 20),
        ("next_scheduler_starts",),
        ("walltime_of_scheduler_ends_soon",),
        ("passes", 20),
        ("taken_over",),
        ("scheduler_fails", JobState.TIMEOUT),
    ],
    (),
    [("passes", 100), ("next_scheduler_starts",)],
)
@example(
    (),
    [("accepts_late", True), ("holds_back", True), ("order", Scale(DEFAULT, 3)), ("accepts_late", False)],
    (),
    [("passes", 400), ("passes", 400)],
)
def test_whatever_happens_no_job_is_lost_or_doubled_and_the_wanted_size_comes_back(
    begin: tuple[tuple[Any, ...], ...],
    steps: list[tuple[Any, ...]],
    end: tuple[tuple[Any, ...], ...],
    after: list[tuple[Any, ...]],
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(draining, "_FINISHING_INTERVAL", 0.0),
        mock.patch.object(draining, "_STUCK_INTERVAL", 0.0),
        mock.patch.object(restart_scheduler, "_INTERVAL", 0.002),
        mock.patch.multiple(scheduler_job, _PAUSE=0.002, _LAST_PAUSE=0.002),
    ):
        asyncio.run(history([*begin, *steps, *end, *after], Path(folder)))
