"""What a program receives of its held workers: how the job of a lost one has ended, and what a call has raised."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu import runner
from hpcgpu.client import held_calls, held_set
from hpcgpu.client.held_calls import Answers
from hpcgpu.client.held_set import HeldWorkers
from hpcgpu.client.hold import Hold
from hpcgpu.display.job_info import JobInfo
from hpcgpu.manager.manager import Manager
from tests.unit.simulated import Site

RUNNING = JobInfo(
    id="1", kind="worker", name="a", state="running", reason="", waited=0.0, node="n", workers=2, log=Path("log")
)


class Queue:
    """An own cluster: its jobs are as the queue last reported them."""

    def __init__(self, *answers: JobInfo | None) -> None:
        self.answers = list(answers)
        self.jobs, self.manager = [RUNNING], self

    async def poll(self, job_ids: list[str], *, recent: bool = False) -> bool:
        assert job_ids == ["1"] and not recent
        if (answer := self.answers.pop(0)) is not None:
            self.jobs = [answer]
        return answer is not None

    async def start(self) -> None: ...
    def hold_wait(self, *_: Any) -> Any: ...


def held_of(queue: Queue) -> HeldWorkers:
    async def workers_of_job(job: str) -> list[str]:
        return ["tls://other"]

    held = HeldWorkers.__new__(HeldWorkers)
    held._client = SimpleNamespace(  # type: ignore[assignment]
        cluster=queue, scheduler=SimpleNamespace(hpcgpu_workers_of_job=workers_of_job)
    )
    return held


@pytest.mark.parametrize("manager", [Manager, runner._Manager])
@pytest.mark.parametrize("name", ["start", "poll", "hold_wait"])
def test_each_manager_takes_the_arguments_that_a_block_gives(manager: type, name: str) -> None:
    own, expected = (inspect.signature(getattr(one, name)).parameters for one in (manager, held_set.Manager))
    assert own == expected


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([RUNNING], "its job still runs, so its process has probably crashed. Log: log"),
        ([replace(RUNNING, state="cancelled", reason="cancelled by root")], "cancelled by root. Log: log"),
        ([replace(RUNNING, state="completing"), replace(RUNNING, state="failed", reason="preempted")], "preempted."),
        ([replace(RUNNING, state="completing"), replace(RUNNING, state="completing")], ""),
        ([None], ""),
    ],
)
async def test_a_crash_is_reported_only_if_the_queue_reports_now_that_the_job_of_a_lost_worker_runs(
    monkeypatch: pytest.MonkeyPatch, answers: list[JobInfo | None], said: str
) -> None:
    monkeypatch.setattr(held_set, "_STAYS", 0.0)
    monkeypatch.setattr(held_set, "_ENDED", 0.6)
    looks = itertools.count()  # at the clock: the machine may take its time between two of them
    monkeypatch.setattr(held_set, "time", SimpleNamespace(monotonic=lambda: 0.25 * next(looks)))
    queue = Queue(*answers)
    found = await held_of(queue)._why_lost("1", "a")
    assert found.startswith(said) if said else not found
    assert not queue.answers


async def test_a_worker_is_asked_again_for_a_port_only_while_a_call_that_blocks_it_runs() -> None:
    answers: list[Any] = [OSError("Timed out trying to connect"), {"a": 7}, OSError("refused")]
    calls = [{"w": ["train"]}, dict[str, list[str]]()]

    async def run(*_: object, workers: list[str]) -> Any:
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    async def running(workers: list[str]) -> dict[str, list[str]]:
        return calls.pop(0)

    hold: Any = Hold.__new__(Hold)
    hold.client = SimpleNamespace(run=run, scheduler=SimpleNamespace(hpcgpu_calls=running))
    assert await hold._port("a", "h") == 7
    with pytest.raises(OSError, match="refused"):
        await hold._port("a", "h")


class Stuck:
    """A connection whose peer takes no more data."""

    def __init__(self) -> None:
        self.closes, self.there = asyncio.Event(), True

    async def close(self) -> None:
        self.closes.set()
        await asyncio.Event().wait()

    def abort(self) -> None:
        self.there = False


async def test_a_block_that_is_cancelled_while_it_ends_holds_no_worker_any_more() -> None:
    held, comm = held_of(Queue()), Stuck()
    held._ended, held._lost, held._begun, held._comm = False, asyncio.Event(), set(), comm
    held._scheduler, held._watching = "tls://scheduler", asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[arg-type]
    held_set.blocks[held] = None
    ends = asyncio.ensure_future(held.let_go(None))
    await comm.closes.wait()
    ends.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ends
    assert not comm.there and held not in held_set.blocks and not held.scheduler


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception that takes no notes."""

    code: int


async def test_an_exception_that_takes_no_notes_is_raised_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"job": {}, "node": "n", "host": "h", "rank": 0, "local_rank": 0, "world_size": 1}
    answers = Answers({}, {"a": Frozen(7)}, {})
    held = held_of(Queue())
    held._members = [held_set.member({"address": "a", "name": "w", **place}, 1)]  # type: ignore[typeddict-item]
    held._ended, held._lost, held._begun = False, asyncio.Event(), set()
    held._watching = asyncio.ensure_future(asyncio.sleep(600))  # type: ignore[arg-type]

    async def call(*_: Any) -> Answers:
        return answers

    monkeypatch.setattr(held_calls, "call", call)
    with pytest.raises(Frozen):
        await held._call(len, (), {}, ["a"])
    held._watching.cancel()


async def test_a_second_block_does_not_query_the_queue_for_the_end_of_a_job_that_has_none(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.begin(1)
    manager = Manager.__new__(Manager)
    manager.state, monitor = site.state, site.state.dispatcher.monitor
    manager.options = site.options
    job_id = next(iter(site.registry.active.values())).job_id
    assert job_id is not None
    queried, poll = list[set[str]](), site.queue.poll
    site.queue.poll = lambda ids: (queried.append(set(ids)), poll(ids))[1]  # type: ignore[method-assign]

    assert await manager.poll([job_id], recent=True) and not queried, "the queue has just said that it runs"
    assert await manager.poll([job_id]) and queried == [{job_id}]
    site.now += 3600
    assert await manager.poll([job_id], recent=True) and queried[1:] == [set(monitor.alive())]
    assert await manager.poll([job_id], recent=True) and len(queried) == 2
    await site.scale(2)
    new = next(job.job_id for job in site.registry.active.values() if job.job_id != job_id)
    assert await manager.poll([new], recent=True) and len(queried) == 3, "it has started since the last answer"
    site.queue.silent = True
    site.now += 3600
    assert not await manager.poll([job_id], recent=True)
