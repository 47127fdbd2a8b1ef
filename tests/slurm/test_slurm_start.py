"""How soon worker jobs start behind the scheduler job: on a Slurm with default scheduling, and on one without cycles.

By default Slurm reads its queue in cycles of half a minute, and when a job is submitted, changed or ends. The second
Slurm here does the latter only: a job that nothing but a cycle would start never starts there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bed import SlurmBed

import hpcgpu
from hpcgpu import SlurmGPUCluster
from hpcgpu.scripts.bundle import make
from tests.slurm.helpers import CPU

pytestmark = pytest.mark.shows("Workers start behind the scheduler job with Slurm's default scheduling")

Until = Callable[..., None]
SMALL: dict[str, Any] = CPU | {"walltime": "30m", "scheduler": {"queue": "shared", "gpus_per_node": 0}}

NO_CYCLES = "sched_interval=100000,bf_interval=10000"
both = pytest.mark.parametrize("_slow_bed", ["", NO_CYCLES], ids=["default", "no cycles"], indirect=True)
no_cycles = pytest.mark.parametrize("_slow_bed", [NO_CYCLES], ids=["no cycles"], indirect=True)


def run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=250).stdout


def shown(job_id: str) -> dict[str, str]:
    """What Slurm reports of a job."""
    return dict(word.split("=", 1) for word in run("scontrol", "show", "job", job_id).split() if "=" in word)


@both
def test_worker_jobs_start_behind_the_scheduler_job_without_a_cycle_of_slurm(slow_bed: SlurmBed) -> None:
    started_by = set[str]()
    for _ in range(3):  # a cycle may come just when they start
        with SlurmGPUCluster(**SMALL, jobs=2) as cluster:
            cluster.wait_for_workers(2, timeout=150)
            jobs = [shown(job.id) for job in cluster.jobs]
            assert [job["JobName"] for job in jobs] == [f"{cluster.name}{end}" for end in ("-scheduler", "-0", "-1")]
            started_by = {job["Scheduler"] for job in jobs}
        if started_by == {"Main"}:
            break
    assert started_by == {"Main"}, "the cycle of the backfill scheduler started one"


@no_cycles
def test_they_do_so_behind_one_that_has_waited_and_without_a_manager(
    slow_bed: SlurmBed, home: Path, until: Until
) -> None:
    asked = {name: value for name, value in SMALL.items() if name != "quiet"}
    directory = make("slurm", asked, home / "demo").path
    script = directory / "scheduler.sbatch"
    script.write_text(script.read_text().replace("#SBATCH", "#SBATCH --hold\n#SBATCH", 1))
    run(str(directory / "launch.sh"), "2")
    jobs = {job.name: job.id for job in slow_bed.squeue()}
    assert [shown(jobs[f"demo-{number}"])["Reason"] for number in range(2)] == ["Dependency"] * 2
    run("scontrol", "release", jobs["demo-scheduler"])
    with hpcgpu.connect(directory, quiet=True) as client:
        client.wait_for_workers(2, timeout=150)
    run(str(directory / "stop.sh"))
