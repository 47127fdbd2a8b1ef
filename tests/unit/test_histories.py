"""Whatever happens to the jobs of a cluster, in whatever order: what must always hold of its managers."""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcgpu.jobs.job_phases import Ended
from hpcgpu.options.shared_options_and_defaults import DEFAULT
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.scheduler_restarts import ended_too_early
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, DeleteGroup, Detach, Resume, Scale
from tests.unit.simulated_machines import Program, Scheduler, machines
from tests.unit.simulated_world import ENDS, World, quietly

#: A further group of workers.
MORE = "cpu"
#: How many new histories are tried, such as 5000; without it sixty, always the same ones.
NEW = os.environ.get("HPCGPU_HISTORIES")

Steps = list[tuple[Any, ...]]


def check(world: World) -> None:
    """What must hold after each step."""
    if world.abandoned:
        assert not world.alive, world.alive
        return
    journal = {submit.name: submit for submit in world.directory.submits()}
    names = [job.name for job in world.alive]
    assert len(names) == len(set(names)), f"a job is doubled: {names}"
    for job in world.alive:
        assert job.name in journal and journal[job.name].job_id in (job.job_id, None), f"no journal knows {job}"
    assert not world.broken, world.broken
    for program in world.programs:
        if not program.dead:
            check_program(world, program)
    serving = [one.job_id for one in world.schedulers.values() if one.alive]
    assert len(serving) <= 1, f"the cluster has several schedulers: {serving}"
    world.unwritten |= world.full  # until the next command
    program, latest = world.present, world.directory.manager()
    if program is None or world.unwritten or not program.started or latest is None:
        return
    if latest.number == program.manager.state.dispatcher.manager:
        kept, wanted = world.directory.wanted(), program.manager.state.wanted
        assert replace(kept, closing=wanted.closing) == wanted


def check_program(world: World, program: Program) -> None:
    """Nothing fails silently, and what is shown is true."""
    made, state = program.manager, program.manager.state
    said = "\n".join(text for one in world.programs for text in one.messages)
    assert "internal error" not in "\n".join(program.messages), "\n".join(program.messages)
    for job, info in zip(list(state.registry.jobs.values()), made.jobs, strict=False):
        assert info.state != "pending" or not job.workers, f"{job.name} is shown as pending, and it works"
    for job in state.registry.worker_jobs:
        phase = job.phase
        if isinstance(phase, Ended) and phase.handled and not (phase.drained or phase.presumed):
            assert f"worker job {job.job_id} ({job.name})" in said, f"nobody reports the end of {job.name}"


def check_kept(world: World, before: set[str]) -> None:
    """What waits in the queue for the next scheduler is kept."""
    program = world.present
    if program is None or not program.manager.state.phase.restarting or world.directory.closing or world.unwritten:
        return  # a full disk does not record which jobs are not wanted any more
    unwanted = {submit.name for submit in world.directory.submits() if submit.unwanted or submit.ended}
    gone = before - {job.name for job in world.live} - unwanted
    assert not gone & world.queue.cancelled, f"a job that waits for the next scheduler is cancelled: {gone}"


async def history(steps: Steps, world: World) -> None:
    """Let it happen, and check the rules after each step."""
    nodes = asyncio.ensure_future(world.nodes_live())
    world.first()
    for name, *arguments in steps:
        before = {job.name for job in world.live}
        await getattr(world, name)(*arguments)
        await asyncio.sleep(0.001)
        check(world)
        check_kept(world, before)
        assert not nodes.done(), nodes.exception()
    await world.healed()
    check(world)
    await ends(world)
    for program in world.programs:
        program.kill()
    await asyncio.sleep(1)
    nodes.cancel()


async def ends(world: World) -> None:
    """The wanted size has come back, or nothing is left; a close leaves nothing."""
    program = world.present
    if program is not None and program.manager.state.managed and not world.directory.closing:
        ours = {job.name for job in world.live}
        for group in program.manager.state.registry.groups.values():
            least = group.limits.maximum if group.limits.fixed else group.limits.minimum
            assert least <= len(ours & {job.name for job in group.jobs}) <= group.limits.maximum
            ours -= {job.name for job in group.jobs}
        assert not ours, f"jobs that no group has: {ours}"
    if program is not None and not program.manager.state.ownership.ends_jobs:  # as `from_name` and a close
        program = world.takes_over()
        await asyncio.sleep(60)
    if program is not None:
        await program.run(quietly(program.manager.close()))
    elif world.directory.closing:  # as the next `hpcgpu stop`
        for job in world.alive:
            world.queue.cancel([job.job_id])
    await asyncio.sleep(600)
    assert not world.alive, f"jobs are left: {world.alive}"


def happens(restart: bool, steps: Steps) -> World:
    """Let this happen to a new cluster with or without `on_scheduler_end="restart"`; return what is left."""
    schedulers: dict[str, Scheduler] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with machines(schedulers, lambda: world.latency) as runner:
            world = World(Path(folder), schedulers, restart=restart)
            runner.run(history(steps, world))
    return world


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
    st.tuples(st.sampled_from(["another_takes_over", "dies", "detaches"])),
    st.tuples(st.sampled_from(["another_takes_over", "dies"])),
    st.tuples(st.just("scheduler_job_starts")),
    st.tuples(st.just("scheduler_job_starts")),
    st.tuples(st.just("walltime_of_scheduler_ends_soon")),
    st.tuples(st.just("scheduler_ends"), st.sampled_from([one for one in ENDS if ended_too_early(one)])),
    st.tuples(st.just("passes"), st.sampled_from([1, 5, 20, 100, 400])),
    st.tuples(st.just("passes"), st.sampled_from([5, 20, 100])),
    st.tuples(st.just("starts"), _index),
    st.tuples(st.just("starts"), _index),
    st.tuples(st.just("ends"), _index, st.sampled_from(ENDS)),
    st.tuples(st.just("cancelled_by_somebody"), _index),
    st.tuples(st.just("requeued"), _index),
    st.tuples(st.just("loses_worker"), _index, _on),
    st.tuples(st.just("silent"), _on),
    st.tuples(st.just("dies_at"), st.sampled_from(["before a submit", "after a submit"])),
    st.tuples(st.just("hidden"), st.one_of(st.none(), _index)),
    st.tuples(st.just("shown")),
    st.tuples(st.just("slow"), st.sampled_from([0.0, 0.0, 2.0, 20.0])),
    st.tuples(st.just("refuses_cancels"), _on),
    st.tuples(st.just("refuses_submits"), st.integers(0, 5)),
    st.tuples(st.just("loses_answers"), _on),
    st.tuples(st.just("accepts_late"), _on),
    st.tuples(st.just("holds_back"), _on),
    st.tuples(st.just("scheduler_is_silent"), _on),
    st.tuples(st.just("data_fits_nowhere"), _on),
    st.tuples(st.just("disk_is_full"), _on),
)
#: How the cluster begins: most often its scheduler has been reached, and its workers have connected.
_runs = (("passes", 5), ("scheduler_job_starts",), ("starts", 0), ("starts", 0), ("passes", 20))
_begin = st.sampled_from(
    [
        _runs,
        _runs,
        (*_runs, ("order", Detach())),
        (*_runs, ("detaches",), ("passes", 20)),
        (("passes", 5), ("dies",)),
        (("passes", 5), ("order", Detach()), ("dies",)),
        (),
    ]
)
#: How the cluster ends, if it does not end with the history.
_end = st.one_of(
    st.just(()),
    st.tuples(st.tuples(st.just("scheduler_ends"), st.sampled_from(ENDS))),
    st.tuples(st.tuples(st.just("closes"))),
    st.tuples(st.tuples(st.just("stop_begins"))),
)


@pytest.mark.timeout(0)  # it computes for a minute, and on a busy machine for many
@settings(max_examples=int(NEW or 60), derandomize=not NEW, deadline=None, suppress_health_check=list(HealthCheck))
@given(_on, _begin, st.lists(_step, min_size=6, max_size=40), _end, st.lists(_step, max_size=10))
def test_whatever_happens_no_job_is_lost_or_doubled_and_the_wanted_size_comes_back(
    restart: bool,
    begin: tuple[tuple[Any, ...], ...],
    steps: Steps,
    end: tuple[tuple[Any, ...], ...],
    after: Steps,
) -> None:
    happens(restart, [*begin, *steps, *end, *after])
