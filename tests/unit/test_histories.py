"""Whatever happens to the jobs of a cluster, in whatever order: what must always hold of its manager."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.errors import AmbiguousSubmit, BatchUnavailable, ClusterError, SubmitLimited, SubmitRefused
from hpcgpu.jobs.job_phases import Ended
from hpcgpu.manager import draining
from hpcgpu.manager.closing import Closing
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt, Close, Command, Detach, Resume, Scale
from tests.unit.simulated import Queue, Site, taken_over

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

    def submit(self, script: Path, **arguments: Any) -> str:
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
        super().cancel(job_ids, only_pending=only_pending)


@dataclass
class World:
    """A cluster, its queue, its nodes, and the managers that it has had."""

    site: Site
    path: Path
    queue: Faulty
    full: bool = False
    unwritten: bool = False

    @property
    def live(self) -> list[JobStatus]:
        """The worker jobs that the queue has."""
        return [job for job in self.queue.jobs.values() if not job.state.ended and job.job_id != "1"]

    def pick(self, index: int, state: JobState) -> str | None:
        """The name of a job in a state, if there is one and the manager knows it."""
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
        self.nodes()

    # What may happen

    async def order(self, command: Command) -> None:
        over, before = self.over or self.site.directory.closing, self.site.directory.wanted()
        refused = over or (self.full and isinstance(command, Detach))  # without the record, the jobs would end
        try:
            self.site.reconciler.order(command)
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
        for _ in range(seconds // 5):
            self.site.now += 5
            if not self.site.directory.closing:  # in a closed cluster such a job ends at once
                self.queue.accept(5)
            if self.site.state.cancelling:
                await self.site.reconciler.end_all()
            if not self.over:
                await self.site.reconciler.observe_queue()
                await self.site.reconciler.observe_load()
                self.site.reconciler.decide()
            await self.settled()

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
        self.queue.jobs["1"] = replace(self.queue.jobs["1"], state=state, end=self.site.now)
        self.site.client.listening = False

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
        ended = self.queue.jobs["1"].state.ended or self.site.directory.closing
        if self.queue.silent or self.over or ended or self.full:  # nothing is taken over then
            return
        before = self.site
        await before.settled()
        self.site = await taken_over(before, self.path)
        jobs = dict(self.queue.jobs)
        with pytest.raises(ClusterError, match="was taken over by"):
            before.reconciler.order(Scale(DEFAULT, 7))
        await before.settled()
        assert self.queue.jobs == jobs, "the earlier manager still acts"

    async def healed(self) -> None:
        """Nothing goes wrong any more, and the user asks once more for what is wanted."""
        await self.disk_is_full(False)
        self.queue.silent = self.queue.refuses_cancels = self.queue.loses_answers = self.queue.accepts_late = False
        self.queue.holds_back = False
        self.queue.refusal, self.site.client.full = None, False
        self.site.client.listening = not self.queue.jobs["1"].state.ended
        await self.passes(1500)
        if self.over or self.site.directory.closing:
            return
        self.site.reconciler.order(Resume(DEFAULT))
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
)
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
    for job in world.live:
        assert job.name in journal and journal[job.name].job_id in (job.job_id, None), f"no journal knows {job}"
    for name, (state, _) in site.shown.items():
        assert state != "pending" or not site.registry.jobs[name].workers, f"{name} is shown as pending, and it works"
    world.unwritten |= world.full  # until the next command
    if not world.unwritten:
        kept = site.directory.wanted()
        assert replace(kept, closing=site.state.wanted.closing) == site.state.wanted
        assert kept.closing or not site.state.wanted.closing, "the close is not recorded"


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
    limits, ours = world.site.group.limits, [job for job in world.live if world.queue.find(job.name)]
    least = limits.maximum if limits.fixed else limits.minimum
    assert least <= len(ours) <= limits.maximum
    await world.closes()
    assert not world.live, f"jobs are left: {world.live}"


@pytest.mark.timeout(0)  # it computes for a minute, and on a busy machine for many
@settings(max_examples=int(NEW or 40), derandomize=not NEW, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_step, min_size=3, max_size=30), _end, st.lists(_step, max_size=10))
@example([("loses_answers", True), ("order", Scale(DEFAULT, 3)), ("loses_answers", False)], (), [("passes", 100)])
@example([("accepts_late", True), ("order", Scale(DEFAULT, 3)), ("taken_over",)], (), [("passes", 100)])
@example(
    [("accepts_late", True), ("holds_back", True), ("order", Scale(DEFAULT, 3)), ("accepts_late", False)],
    (),
    [("passes", 400), ("passes", 400)],
)
def test_whatever_happens_no_job_is_lost_or_doubled_and_the_wanted_size_comes_back(
    steps: list[tuple[Any, ...]], end: tuple[tuple[Any, ...], ...], after: list[tuple[Any, ...]]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(draining, "_FINISHING_INTERVAL", 0.0),
        mock.patch.object(draining, "_STUCK_INTERVAL", 0.0),
    ):
        asyncio.run(history([*steps, *end, *after], Path(folder)))
