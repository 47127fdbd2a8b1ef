"""The books of benchmarks/gpu_hours.py: what jobs cost, what tasks used of it, and the ratios."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from distributed import CancelledError, KilledWorker

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_hours() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield __import__("gpu_hours")


@pytest.fixture(scope="module")
def slurm_programs(gpu_hours: ModuleType) -> Any:
    return sys.modules["slurm_programs"]


def line(job: int, name: str, gres: str, start: str, end: str) -> str:
    """A job as squeue prints it; it was submitted at noon."""
    day = "2026-11-26T12:"
    times = [day + minute if minute[0].isdigit() else minute for minute in ("00:00", start, end)]
    return "|".join([str(job), name, "CANCELLED", "4", gres, *times, "1:00:00"])


def outcome(gpu_hours: ModuleType, **more: float) -> Any:
    values = dict.fromkeys(gpu_hours.COLUMNS, 0.0) | {"time": 100.0, "response": 50.0, "finished": True} | more
    return gpu_hours.Outcome(**values)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gres:gpu:a100:4", 4), ("gres/gpu:4", 4), ("gres:gpu=2", 2), ("gpu:t4:1", 1), ("gres:gpu", 1), ("N/A", 0)],
)
def test_the_gpus_of_a_job_are_read_from_what_it_asked_for(slurm_programs: Any, gres: str, gpus: int) -> None:
    job = slurm_programs.parse(line(7, "demo-0", gres, "00:15", "01:15"))
    assert (job.gpus, job.waited, job.seconds) == (gpus, 15, 60)


def test_the_later_rounds_may_have_other_tasks(gpu_hours: ModuleType) -> None:
    work = gpu_hours.Work("many, then few", [1.0] * 3, 2, 4.0, later=[60.0]).scaled(0.5)
    assert (work.of_round(0), work.of_round(1), work.pause) == ([0.5] * 3, [30.0], 2.0)
    assert gpu_hours.Work("the same", [1.0] * 3, 2).scaled(2.0).of_round(1) == [2.0] * 3


def test_a_job_that_did_not_start_costs_nothing(slurm_programs: Any) -> None:
    assert slurm_programs.parse(line(7, "demo-0", "gres:gpu:4", "N/A", "01:15")).seconds == 0


def test_events_are_read_as_written_but_not_the_line_that_is_being_written(slurm_programs: Any, tmp_path: Path) -> None:
    assert slurm_programs.read_events(tmp_path) == []
    with slurm_programs.written_events(tmp_path) as note:
        note("begin", 3)
        note("failed", text="two\nlines")
    with open(tmp_path / "events", "a") as events:
        events.write('[17.0, "e')
    read = slurm_programs.read_events(tmp_path)
    assert [event[1:] for event in read] == [("begin", 3, ""), ("failed", 0, "two\nlines")]


def test_what_is_paid_and_not_used_is_of_worker_jobs_alone(gpu_hours: ModuleType, slurm_programs: Any) -> None:
    jobs = [
        slurm_programs.parse(line(1, "demo-scheduler", "gres:gpu:1", "00:15", "02:15")),
        slurm_programs.parse(line(2, "demo-0", "gres:gpu:a100:4", "00:30", "01:30")),
        slurm_programs.parse(line(3, "demo-1", "gres:gpu:a100:4", "01:00", "01:10")),
    ]
    texts = [(0.0, "start", 0, ""), (20.0, "begin", 0, ""), (50.0, "end", 0, "")]
    texts += [(60.0, "begin", 1, ""), (70.0, "end", 1, "")]
    texts += [(45.0, "result", 0, "30.5")] * 2 + [(65.0, "result", 1, "9.5"), (66.0, "lost", 1, "killed")]
    events = [slurm_programs.Event(*event) for event in texts]
    work = gpu_hours.Work("two rounds of two tasks", [30.0, 30.0], 2, 10.0)
    given = gpu_hours.account(events, jobs, work)
    assert (given.paid, given.scheduler, given.not_used) == (280, 120, 280 - 70.5)
    assert (given.start, given.time, given.response, given.lost, given.finished) == (20, 70, 20, 1, False)
    unfinished = gpu_hours.account(events[:4], jobs, work)
    assert unfinished.time == unfinished.response == math.inf
    assert unfinished.paid == unfinished.not_used == 280
    assert gpu_hours.account([], [], work).time == math.inf, "the program did not start"


def test_a_task_ends_with_its_seconds_or_is_lost_or_fails(gpu_hours: ModuleType) -> None:
    worker: Any = SimpleNamespace(address="tcp://a:1")
    killed = KilledWorker("task-1", worker, 3)
    assert gpu_hours.ended(gpu_hours.task(0.0))[0] == "result"
    assert gpu_hours.ended((KilledWorker, killed, None))[0] == "lost"
    assert gpu_hours.ended((ValueError, ValueError("no"), None)) == ("failed", "ValueError: no")
    assert gpu_hours.ended(CancelledError("task-1"))[0] == "failed", "the scheduler is gone"


def test_ratios_are_of_medians_where_all_runs_finished(gpu_hours: ModuleType) -> None:
    mine = [outcome(gpu_hours, not_used=value) for value in (10.0, 30.0, 90.0)]
    peer = [outcome(gpu_hours, time=200.0, not_used=60.0)]
    assert gpu_hours.ratios(mine, peer) == {"time": "0.50", "response": "1.00", "paid": "-", "not_used": "0.50"}
    assert gpu_hours.ratios(mine, [*peer, outcome(gpu_hours, finished=False)]) == {}


def test_the_table_reports_who_did_not_finish(gpu_hours: ModuleType) -> None:
    never = [outcome(gpu_hours, time=math.inf, response=math.inf, paid=9600.0, finished=False)] * 2
    lost = [outcome(gpu_hours, paid=1200.0, lost=2, finished=False), outcome(gpu_hours, lost=1, finished=False)]
    text = gpu_hours.table({"tail": {"hpcgpu": lost, "dask-jobqueue": never}})
    words = [row.split() for row in text.splitlines()]
    assert words[1:] == [
        ["tail"],
        ["hpcgpu", "0.0", "100.0", "50.0", "600.0", "0.0", "0.0", "3", "0/2"],
        ["dask-jobqueue", "0.0", "did", "not", "finish", "-", "9600.0", "0.0", "0.0", "0", "0/2"],
        ["ratio", *"--------"],
    ]
    assert len({len(row) for row in text.splitlines() if row != "tail"}) == 1


def test_a_short_trial_has_the_same_tasks(gpu_hours: ModuleType) -> None:
    tail = gpu_hours.WORKLOADS["tail"]
    assert (tail.tasks.count(60), tail.tasks.count(2), len(tail.tasks)) == (6, 120, 126)
    pauses = gpu_hours.WORKLOADS["pauses"].scaled(0.5)
    assert (pauses.tasks, pauses.rounds, pauses.pause) == ([1.0] * 64, 5, 10.0)
