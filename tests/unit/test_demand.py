"""What the answer of the Dask scheduler says of the work that a group of workers has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.cluster.groups import WorkerGroup, demands
from hpcgpu.options.common import WorkerOptions
from hpcgpu.runtime.wire import Load, WorkerLoad


def group_of(*jobs: Any) -> WorkerGroup:
    """Return a group with these jobs, of two GPUs each."""
    registry: Any = SimpleNamespace(worker_jobs=list(jobs))
    group = WorkerGroup("default", WorkerOptions(gpus_per_node=2), Path("worker.sbatch"), 2, registry)
    for job in jobs:
        job.group = group
    return group


def load(processing: int, occupancy: float) -> WorkerLoad:
    return cast(
        WorkerLoad,
        {
            "processing": processing,
            "occupancy": occupancy,
            "nbytes": 0,
            "wanted": 0,
            "actors": 0,
            "nthreads": 1,
            "memory_limit": 0,
        },
    )


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
