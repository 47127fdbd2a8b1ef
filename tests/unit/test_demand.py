"""What the answer of the Dask scheduler says of the work that a group of workers has."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.cluster.groups import WorkerGroup, demands
from hpcgpu.options.common import WorkerOptions
from hpcgpu.runtime.wire import Load, WorkerLoad
from hpcgpu.scaling.model import Demand


def group_of(*jobs: Any) -> WorkerGroup:
    """Return a group with these jobs, of two GPUs each."""
    registry: Any = SimpleNamespace(worker_jobs=list(jobs))
    group = WorkerGroup("default", WorkerOptions(gpus_per_node=2), Path("worker.sbatch"), 2, registry)
    for job in jobs:
        job.group = group
    return group


def load(processing: int, occupancy: float, **more: int) -> WorkerLoad:
    nothing = {"nbytes": 0, "wanted": 0, "actors": 0, "nthreads": 1, "paused": False, "memory_limit": 0}
    return cast(WorkerLoad, {"processing": processing, "occupancy": occupancy, **nothing, **more})


def test_work_that_no_thread_runs_is_told_apart_from_what_runs() -> None:
    job = SimpleNamespace(draining=False, workers={"tls://a": "a-0", "tls://b": "a-1"})
    group = group_of(job)
    answer: Load = {
        "workers": {"a-0": load(3, 30.0), "a-1": load(1, 10.0)},
        "waiting": [{"resources": {}, "tasks": 6, "seconds": 60.0}],
    }
    demand = demands(answer, [group])["default"]
    assert demand.seconds == 50.0, "100 s of work on two threads"
    assert demand.waiting == 40.0, "8 tasks of 10 s, two at a time"
    assert demand.task == 10.0
    nothing: Load = {"workers": {"a-0": load(0, 0.0)}, "waiting": []}
    idle = demands(nothing, [group])["default"]
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
        group = group_of(SimpleNamespace(draining=False, workers={"tls://a": "a-0", "tls://b": "a-1"}))
        workers = {name: load(0, 0.0, memory_limit=100, **more) for name in ("a-0", "a-1")}
        answer: Load = {"workers": workers, "waiting": [{"resources": {}, "tasks": tasks, "seconds": 1.0 * tasks}]}
        return demands(answer, [group])["default"]

    assert demand(0, nbytes=85, wanted=85).memory == 2
    assert demand(20, nbytes=85).memory == 2
    assert demand(20, nbytes=50).memory == 0
    assert demand(0, nbytes=85, wanted=42).memory == 0, "without tasks only data counts that another job would hold"
    full = demand(20, nbytes=10, nthreads=0, paused=True)
    assert full.memory == 2, "a paused worker has no room, even if the data is not Dask's"
    assert full.seconds == math.inf, "no thread takes tasks"
    assert demand(0, nbytes=10, nthreads=0, paused=True).memory == 0, "nobody needs room"
