"""A program takes a cluster over while its scheduler is gone, and the next one has not come yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from distributed.security import Security

from hpcgpu.batch.base import JobState
from hpcgpu.errors import ClusterError
from hpcgpu.manager import start_cluster
from hpcgpu.scaling.scheduler_restarts import LIMIT
from tests.unit.simulated import Site
from tests.unit.simulated_world import World
from tests.unit.test_histories import Steps, happens

_RUNS: Steps = [("passes", 5), ("scheduler_job_starts",), ("starts", 0), ("starts", 1), ("passes", 20)]
_GONE: Steps = [*_RUNS, ("dies",), ("scheduler_ends", JobState.NODE_FAIL)]
#: Nothing has ended the worker jobs before the history ends with a close.
_KEPT = {"demo-0", "demo-1"}
#: A program has taken the cluster over, and connects to its scheduler.
_CONNECTS: Steps = [
    *[("passes", 7), ("dies",), ("another_takes_over",), ("passes", 1), ("scheduler_job_starts",)],
    *[("passes", 1), ("scheduler_is_silent", True)] * 10,  # the program finds the contact meanwhile
]


def kept(world: World) -> set[str]:
    """The worker jobs that the cluster has had; a job that was replaced has another name."""
    return {job.name for job in world.queue.jobs.values()} - {
        job.name for job in world.queue.jobs.values() if "scheduler" in job.name
    }


def reached(world: World) -> bool:
    """Whether the last program that took the cluster over has reached a scheduler of it."""
    start = world.programs[-1].start
    return start is not None and start.done() and not start.cancelled() and start.exception() is None


@pytest.mark.parametrize("refusal", [0, 1, 2])
def test_a_submit_of_the_next_scheduler_that_is_refused_is_tried_again(refusal: int) -> None:
    world = happens(True, [*_GONE, ("refuses_submits", refusal), ("another_takes_over",), ("passes", 20)])
    assert reached(world) and len(world.programs) == 2, "the program that took it over has not given up"
    assert kept(world) == _KEPT


def test_the_next_program_restarts_a_scheduler_whose_end_the_last_one_recorded() -> None:
    steps = [*_GONE, ("refuses_submits", 0), ("another_takes_over",), ("passes", 20), ("dies",), ("passes", 20)]
    world = happens(True, [*steps, ("refuses_submits", 5), ("another_takes_over",), ("passes", 100)])
    assert reached(world) and kept(world) == _KEPT


@pytest.mark.parametrize("moment", ["before a submit", "after a submit"])
def test_a_program_that_is_killed_while_it_submits_the_next_scheduler_blocks_no_other_one(moment: str) -> None:
    steps = [*_GONE, ("dies_at", moment), ("another_takes_over",), ("passes", 5), ("another_takes_over",)]
    world = happens(True, [*steps, ("passes", 400)])
    assert reached(world) and len(world.programs) == 3 and kept(world) == _KEPT
    schedulers = [job for job in world.queue.jobs.values() if "scheduler" in job.name]
    assert len(schedulers) == 2, "the job that the killed program submitted is used"


def test_a_submit_of_the_next_scheduler_without_an_answer_is_looked_up() -> None:
    steps = [*_GONE, ("accepts_late", True), ("another_takes_over",), ("passes", 20)]
    world = happens(True, steps)
    assert reached(world) and len(world.programs) == 2 and kept(world) == _KEPT


def test_a_scheduler_that_fails_again_and_again_is_not_restarted_for_ever_by_programs_that_take_over() -> None:
    again: Steps = [("another_takes_over",), ("passes", 5), ("scheduler_job_starts",), ("passes", 20), ("dies",)]
    fails: Steps = [*again, ("scheduler_ends", JobState.FAILED)]
    world = happens(True, [*_GONE, *fails * LIMIT, ("another_takes_over",), ("passes", 60)])
    assert "it was restarted 3 times within an hour" in "\n".join(world.programs[-1].messages)


def test_without_restart_a_cluster_ends_with_its_scheduler() -> None:
    world = happens(False, [*_GONE, ("another_takes_over",), ("passes", 60)])
    assert not reached(world) and "node_fail: its node failed" in str(world.programs[-1].start)


def test_a_program_that_connects_to_a_scheduler_whose_node_fails_waits_for_the_next_one() -> None:
    world = happens(True, [*_CONNECTS, ("scheduler_ends", JobState.NODE_FAIL), ("passes", 100)])
    assert reached(world) and len(world.programs) == 2, "the program that took it over has not given up"
    assert kept(world) == _KEPT


def test_a_program_whose_connection_breaks_before_the_queue_knows_of_it_waits_for_the_next_one() -> None:
    dies: Steps = [("scheduler_dies",), ("passes", 45), ("scheduler_ends", JobState.NODE_FAIL), ("passes", 100)]
    world = happens(True, [*_CONNECTS, *dies])
    assert reached(world) and len(world.programs) == 2, "the program that took it over has not given up"
    assert kept(world) == _KEPT


def test_a_program_that_cannot_connect_to_a_scheduler_that_runs_on_reports_that() -> None:
    world = happens(True, [*_CONNECTS, ("scheduler_dies",), ("passes", 200)])
    start = world.programs[1].start
    assert start is not None and "cannot be taken over" in str(start.exception())


@pytest.mark.parametrize("ended", [True, False])
async def test_a_wait_for_a_scheduler_ends_with_the_one_that_has_followed_it_meanwhile(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`decide` runs beside the wait: it may have brought the next one when the end of the first one is known here."""
    state = SimpleNamespace(
        ownership=SimpleNamespace(attached=True),
        dispatcher=SimpleNamespace(directory=SimpleNamespace(wanted=lambda: None)),
        phase=SimpleNamespace(lost="", superseded=False, not_ours="", restarting=False),
        failures=SimpleNamespace(report=lambda: ""),
        registry=SimpleNamespace(jobs={}),
        check_schedulable=lambda entries: None,
        tasks=(),
        client=None,
        managed=True,
    )

    first = SimpleNamespace(entries=[])

    async def followed() -> None:
        state.scheduler = SimpleNamespace(entries=[])
        if ended:
            raise ClusterError("scheduler job 1 failed")

    def decide() -> None:
        if state.scheduler is not first:
            state.client = "the client of the next scheduler"

    first.wait_until_reachable, state.scheduler = followed, first
    nothing = MagicMock()
    parts = {"restarts": nothing, "restore": nothing, "drainer": nothing, "submitter": nothing, "decide": decide}
    reconciler = SimpleNamespace(state=state, scheduler_gone=False, **parts)
    monkeypatch.setattr(start_cluster, "attach", AsyncMock(return_value=None))
    options = SimpleNamespace(cluster=SimpleNamespace(wait=True))
    starter = start_cluster.Starter(cast(Any, reconciler), cast(Any, nothing), cast(Any, options), cast(Any, nothing))
    async with asyncio.timeout(60):
        await starter.start(AsyncMock())
    assert state.client


async def test_a_program_that_leaves_the_cluster_while_it_waits_for_the_next_scheduler_reports_that(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.state.starts()
    starter = start_cluster.Starter(site.reconciler, cast(Any, None), site.options, Security())
    waits = asyncio.ensure_future(starter._wait_for_next())
    await asyncio.sleep(0)
    site.state.detaches()
    with pytest.raises(ClusterError, match="this program has left cluster demo, which has no scheduler yet"):
        await waits
