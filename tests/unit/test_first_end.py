"""What is reported before a block: which of its jobs ends first, and why there are not more workers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.client.first_end_of_held_workers import first_end, words
from hpcgpu.client.reported_wait import why_not_more
from hpcgpu.display.job_info import JobInfo

NOW, HOUR = 1_000_000.0, 3600.0


def job(name: str, *, ends: float | None = None, began: float = NOW, margin: float | None = None) -> dict[str, Any]:
    return {"id": name, "name": name, "began": began, "ends": ends, "margin": margin}


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"a": HOUR, "s": HOUR - 10}, "job a drains first, in 55 min, as its walltime ends in 60 min"),
        ({"a": 2 * HOUR, "s": HOUR}, "scheduler job s ends first, in 60 min, and the block with it"),
        ({"a": math.inf, "s": math.inf}, ""),
        ({"a": math.inf, "s": HOUR}, "scheduler job s ends first, in 60 min, and the block with it"),
        ({"a": None, "s": math.inf}, "it is not known when the walltime of a ends"),
        (
            {"a": None, "b": HOUR, "s": math.inf},
            "job b drains first, in 55 min, as its walltime ends in 60 min; "
            "it is not known when the walltime of a ends",
        ),
        ({"a": None, "b": None, "s": None}, "it is not known when the walltime of a, b, s ends"),
    ],
)
def test_the_job_that_ends_first_is_named_with_the_time_for_which_the_set_is_whole(
    ends: dict[str, float | None], said: str
) -> None:
    known = {name: None if end is None else NOW + end for name, end in ends.items()}
    assert words({name: job(name) for name in ends}, known, "s", now=NOW) == said


def test_a_job_drains_its_own_margin_before_its_end() -> None:
    named = {"a": job("a", began=NOW - HOUR, margin=1200.0)}
    assert words(named, {"a": NOW + HOUR}, "", now=NOW).startswith("job a drains first, in 40 min")


def info(name: str, state: str, *, started: float | None = None, time_left: float | None = None) -> JobInfo:
    return JobInfo(
        id=name,
        kind="worker",
        name=name,
        state=state,
        reason="",
        waited=0.0,
        node="",
        workers=1,
        log=Path("log"),
        started=started,
        time_left=time_left,
    )


@pytest.mark.parametrize(
    ("at_first", "after_poll", "answers", "said"),
    [
        (info("a", "pending"), info("a", "running", started=1.0, time_left=2 * HOUR), True, "job a drains first"),
        (info("a", "pending"), info("a", "running", started=1.0), True, ""),
        (info("a", "pending"), info("a", "pending"), False, "it is not known when the walltime of a ends"),
        (info("a", "running", started=1.0), info("a", "running", started=1.0), False, "it is not known when"),
    ],
)
async def test_the_queue_is_polled_once_if_neither_it_nor_the_job_has_reported_the_end(
    at_first: JobInfo, after_poll: JobInfo, answers: bool, said: str
) -> None:
    polled: list[list[str]] = []

    async def jobs() -> list[JobInfo]:
        return [after_poll if polled else at_first]

    async def poll(ids: list[str]) -> bool:
        polled.append(ids)
        return answers

    found = await first_end([job("a")], None, jobs, poll)
    assert found.startswith(said) if said else not found
    assert polled == [["a"]]


def test_a_program_that_has_only_connected_is_shown_what_the_manager_reports_of_the_size() -> None:
    def group(name: str, reason: str, paused: str = "", gpus: int = 4) -> Any:
        resources = {"GPU": 1.0} if gpus else {"CPU": 1.0}
        return {"name": name, "reason": reason, "paused": paused, "gpus_per_node": gpus, "resources": resources}

    def manager(*groups: Any, number: int = 1, present: bool = True) -> Any:
        return {"number": number, "present": present, "groups": list(groups)}

    assert why_not_more(manager(group("default", "the size is set to 1 job")), {}) == "the size is set to 1 job"
    one, cpu = group("default", "maximum is 2"), group("cpu", "no tasks", gpus=0)
    both = why_not_more(manager(one, group("more", "", paused="three jobs have failed")), {})
    assert both == "worker group default: maximum is 2; worker group more: three jobs have failed"
    assert why_not_more(manager(present=False), {}) == "no program manages the cluster, so it submits no more jobs"
    assert not why_not_more(manager(number=0, present=False), {}), "as of SlurmGPURunner"
    assert why_not_more(manager(one, cpu), {}) == "worker group default: maximum is 2", "cpu has no worker to hold"
    assert why_not_more(manager(one, cpu), {"CPU": 1.0}) == "worker group cpu: no tasks"
    assert why_not_more(manager(cpu), {}).startswith("no worker group has workers with a GPU; to hold others, give ")
    assert why_not_more(manager(one), {"FPGA": 1.0}).startswith("no worker group has workers of this kind")


async def test_a_job_has_its_end_before_the_queue_reports_it_and_the_queue_corrects_it() -> None:
    async def never(ids: list[str]) -> bool:
        raise AssertionError("no query of the queue is needed")

    async def early() -> list[JobInfo]:
        return [info("a", "pending")]

    async def late() -> list[JobInfo]:
        return [info("a", "running", started=1.0, time_left=20 * HOUR)]

    own = job("a", began=time.time(), ends=time.time() + HOUR)
    assert "as its walltime ends in 60 min" in await first_end([own], None, early, never)
    assert "as its walltime ends in 20 h 00 min" in await first_end([own], None, late, never)
