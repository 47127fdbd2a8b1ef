"""What the answer of the Dask scheduler reports of the work that a group of workers has."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.dask_scheduler.rpc_types import Load, WaitingWork, WorkerLoad
from hpcgpu.jobs.demand import Supply, demands, jobs_for_holds
from hpcgpu.jobs.worker_group import WorkerGroup
from hpcgpu.options.shared_options_and_defaults import WorkerOptions
from hpcgpu.scaling.policy_data import Demand
from tests.unit.simulated import IDLE


def group_of(*jobs: Any, **options: Any) -> WorkerGroup:
    """Return a group with these jobs, of two GPUs each."""
    requested = WorkerOptions(**{"gpus_per_node": 2} | options)
    return WorkerGroup("default", requested, Path("worker.sbatch"), 2, cluster="demo", jobs_of=lambda _: jobs)


def a_job(workers: dict[str, str], *, draining: bool = False) -> Any:
    return SimpleNamespace(draining=draining, active=not draining, lost_workers=False, workers=workers)


def load(processing: int, occupancy: float, **more: int) -> WorkerLoad:
    return cast(WorkerLoad, {**IDLE, "processing": processing, "occupancy": occupancy, **more})


def test_work_that_no_thread_runs_is_distinguished_from_what_runs() -> None:
    job = a_job({"tls://a": "a-0", "tls://b": "a-1"})
    group = group_of(job)
    answer: Load = {
        "workers": {"a-0": load(3, 30.0), "a-1": load(1, 10.0)},
        "waiting": [{"resources": {}, "tasks": 6, "seconds": 60.0}],
        "holds": [],
    }
    demand = demands(answer, [group], now=0.0)["default"]
    assert demand.seconds == 50.0, "100 s of work on two threads"
    assert demand.waiting == 40.0, "8 tasks of 10 s, two at a time"
    assert demand.task == 10.0
    nothing: Load = {"workers": {"a-0": load(0, 0.0)}, "waiting": [], "holds": []}
    idle = demands(nothing, [group], now=0.0)["default"]
    assert (idle.jobs, idle.waiting, idle.task) == (0, 0.0, 0.0)


def test_the_start_of_a_job_is_learned_apart_from_its_wait_in_the_queue() -> None:
    def job(start: float | None) -> Any:
        return SimpleNamespace(
            submitted=100.0,
            work=SimpleNamespace(wait_known=False, joined_at=430.0),
            queue_status=JobStatus(job_id="7", state=JobState.RUNNING, start=start),
        )

    group = group_of()
    group.learn_wait(job(400.0))
    group.learn_wait(job(None))
    assert group.waits == [330.0, 330.0] and group.startups == [30.0]


def test_full_memory_needs_one_more_job_than_there_are() -> None:
    def demand(tasks: int, **more: int) -> Demand:
        group = group_of(a_job({"tls://a": "a-0", "tls://b": "a-1"}))
        workers = {name: load(0, 0.0, memory_limit=100, **more) for name in ("a-0", "a-1")}
        waiting: list[WaitingWork] = [{"resources": {}, "tasks": tasks, "seconds": 1.0 * tasks}]
        answer: Load = {"workers": workers, "waiting": waiting, "holds": []}
        return demands(answer, [group], now=0.0)["default"]

    assert demand(0, nbytes=85, wanted=85).memory == 2
    assert demand(20, nbytes=85).memory == 2
    assert demand(20, nbytes=50).memory == 0
    assert demand(0, nbytes=85, wanted=42).memory == 0, "without tasks only data counts that another job would hold"
    full = demand(20, nbytes=10, nthreads=0, paused=True)
    assert full.memory == 2, "a paused worker has no room, even if the data is not Dask's"
    assert full.seconds == math.inf, "no thread takes tasks"
    assert demand(0, nbytes=10, nthreads=0, paused=True).memory == 0, "nobody needs room"


HOUR = 3600.0


def highmem(*jobs: Any) -> WorkerGroup:
    """Return an adaptive group with these jobs, whose workers have eight threads, and memory for one large task."""
    group = group_of(*jobs, gpus_per_node=0, cores=8, resources={"MEMORY": 100e9})
    group.adaptive = cast(Any, SimpleNamespace(target_duration=1.0))
    return group


def test_tasks_that_wait_for_resources_of_their_worker_need_as_many_jobs_as_before_it_connected() -> None:
    kind: WaitingWork = {"resources": {"MEMORY": 70e9}, "tasks": 8, "seconds": 8 * HOUR}
    job = a_job({"tls://a": "a"})
    held = load(8, 8 * HOUR, at_once=1, nthreads=1)
    paused = load(8, 8 * HOUR, at_once=1, nthreads=0, paused=True)
    before = demands({"workers": {}, "waiting": [kind], "holds": []}, [highmem()], now=0.0)["default"]
    after, full = (
        demands({"workers": {"a": worker}, "waiting": [], "holds": []}, [highmem(job)], now=0.0)["default"]
        for worker in (held, paused)
    )
    assert before.jobs == after.jobs == full.jobs == 8
    assert (before.waiting, after.waiting, full.waiting) == (8 * HOUR, 7 * HOUR, 8 * HOUR)
    assert after.seconds == 8 * HOUR and after.task == HOUR
    free = load(8, 8 * HOUR, at_once=8, nthreads=8)
    assert demands({"workers": {"a": free}, "waiting": [], "holds": []}, [highmem(job)], now=0.0)["default"].jobs == 1


def test_workers_that_programs_hold_are_those_of_a_group_that_fits() -> None:
    big = {"resources": {"BIG": 1.0}, "workers": 1}
    load: Any = {"workers": {}, "waiting": [], "holds": [{"resources": {}, "workers": 3}, {**big}, {**big}]}
    cpus, gpus, others = group_of(gpus_per_node=0), group_of(), group_of(resources={"BIG": 1.0})
    cpus.name, gpus.name, others.name = "cpus", "gpus", "others"
    found = demands(load, [cpus, gpus, others], now=0.0)
    assert {name: demand.held for name, demand in found.items()} == {"cpus": 0, "gpus": 2, "others": 1}
    assert not any(demand.jobs for demand in found.values()), "they are no tasks"


def test_held_workers_count_for_their_own_group_and_not_if_their_job_must_end() -> None:
    job = a_job({"tls://a": "a-0", "tls://b": "a-1"})
    ending = a_job({"tls://c": "c-0"}, draining=True)
    workers = {name: load(0, 0.0, held=True) for name in ("a-0", "c-0", "started-by-hand")} | {"a-1": load(0, 0.0)}
    first, second = group_of(), group_of(job, ending)
    first.name, second.name = "first", "second"
    answer: Load = {"workers": workers, "waiting": [], "holds": [{"resources": {}, "workers": 1}]}
    found = demands(answer, [first, second], now=0.0)
    assert {name: demand.held for name, demand in found.items()} == {"first": 0, "second": 1}, "a-1 is free"
    full: Load = {**answer, "workers": workers | {"a-1": load(0, 0.0, paused=True)}}
    found = demands(full, [first, second], now=0.0)
    assert {name: demand.held for name, demand in found.items()} == {"first": 1, "second": 1}, "a-1 takes no task"
    answer["holds"] = [{"resources": {}, "workers": 2}]
    found = demands(answer, [first, second], now=0.0)
    assert {name: demand.held for name, demand in found.items()} == {"first": 1, "second": 1}
    answer["holds"] = []
    assert demands(answer, [first, second], now=0.0)["first"].held == 0, "it could serve the program, and does not"


def test_each_kind_of_task_needs_the_workers_that_it_fills() -> None:
    many: WaitingWork = {"resources": {}, "tasks": 80, "seconds": 80.0}
    large: WaitingWork = {"resources": {"MEMORY": 70e9}, "tasks": 3, "seconds": 3.0}
    half: WaitingWork = {"resources": {"MEMORY": 50e9}, "tasks": 3, "seconds": 3.0}

    def jobs(*kinds: WaitingWork) -> int:
        return demands({"workers": {}, "waiting": list(kinds), "holds": []}, [highmem()], now=0.0)["default"].jobs

    assert jobs(many) == 10, "eight threads each"
    assert (jobs(large), jobs(half)) == (3, 2)
    assert jobs(many, large) == 13, "10 for the many, 3 for the large ones"
    assert jobs(*[many] * 3, half, half) == 33


def supply(maximum: int, *, jobs: int = 0, held: int = 0, free: int = 0, fixed: bool = False) -> Supply:
    """Return the supply of a group whose jobs have two workers each, with a GPU."""
    return Supply(
        lambda kind: "CPU" not in kind, 2, jobs=jobs, held_workers=held, free=free, maximum=maximum, fixed=fixed
    )


@pytest.mark.parametrize(
    ("requests", "supplies", "needed"),
    [
        ([6], [supply(1), supply(2)], [1, 2]),
        ([6], [supply(1, jobs=1, free=2), supply(2, jobs=2, free=4)], [1, 2]),
        ([3], [supply(4), supply(4)], [2, 0]),
        ([4], [supply(4), supply(4, jobs=1, free=2)], [1, 1]),
        ([6], [supply(4), supply(2, jobs=2, free=4, fixed=True)], [1, 2]),
        ([6], [supply(4), supply(2, jobs=1, free=1, fixed=True)], [2, 2]),
        ([4], [supply(4), supply(2, jobs=2, held=3, free=1, fixed=True)], [2, 2]),
        ([2, 2, 2], [supply(1), supply(2)], [1, 2]),
        ([9], [supply(1), supply(2)], [3, 2]),
        ([2], [supply(4, jobs=1, held=2), supply(0)], [2, 0]),
        ([2], [supply(4, jobs=1, held=0, free=1)], [2]),
        ([], [supply(4, jobs=2, held=2, free=2)], [1]),
        ([1], [], []),
    ],
    ids=[
        "both groups",
        "the same while their jobs start",
        "the first one can have all",
        "what is there comes first",
        "a fixed group counts",
        "also what it will have",
        "but not what others hold",
        "several requests",
        "more than all can have",
        "beside held ones",
        "a worker of the present job is paused",
        "nothing waits",
        "no group",
    ],
)
def test_what_programs_wait_for_is_spread_over_the_groups(
    requests: list[int], supplies: list[Supply], needed: list[int]
) -> None:
    assert jobs_for_holds([{"resources": {}, "workers": number} for number in requests], supplies) == needed


def test_a_request_that_no_group_serves_needs_no_job() -> None:
    assert jobs_for_holds([{"resources": {"CPU": 1.0}, "workers": 2}], [supply(2)]) == [0]
