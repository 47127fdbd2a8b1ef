"""`SlurmGPUCluster.plan` and `hpcgpu plan` ask a real Slurm, which gets no job from them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bed import SlurmBed

from hpcgpu import ClusterError, SlurmGPUCluster
from hpcgpu.batch.slurm.queues import queues
from tests.conftest import wait_until
from tests.helpers import hpcgpu, printed

pytestmark = pytest.mark.shows("`plan`: when a cluster would start")

FULL = "#!/bin/bash\n#SBATCH --nodes=4 --exclusive --output=/dev/null --time=60\nexec sleep 3600\n"


@contextmanager
def full(bed: SlurmBed, home: Path) -> Iterator[None]:
    """All nodes of the partition gpu are taken for an hour."""
    (home / "full.sh").write_text(FULL)
    subprocess.run(["sbatch", "--parsable", "--partition=gpu", "full.sh"], cwd=home, check=True, capture_output=True)
    try:
        wait_until(lambda: [job.state for job in bed.squeue()] == ["RUNNING"], "they are taken")
        yield
    finally:
        bed.cancel_all()
        bed.wait_empty()


def test_a_full_queue_and_a_free_one_are_distinguished(bed: SlurmBed, home: Path) -> None:
    with full(bed, home):
        before = {job.id for job in bed.squeue()}
        plan = SlurmGPUCluster.plan(queue="gpu,shared", jobs=2, gpus_per_node=1, walltime="30m")
        assert {job.id for job in bed.squeue()} == before, "a plan submits nothing"
    start = {(job.queue, job.kind): job.start for job in plan.jobs}
    assert None not in start.values(), plan
    assert plan.gpu_hours == 1.5
    for kind in ("scheduler", "worker"):
        gpu, shared = start["gpu", kind], start["shared", kind]
        assert gpu is not None and shared is not None
        assert shared - plan.at < 60, "s0 is free"
        assert 3000 < gpu - plan.at < 3900, "in an hour, by Slurm's own estimate"
    assert not (home / "clusters").exists()


def test_what_slurm_would_never_start_is_reported_in_its_words(bed: SlurmBed, home: Path) -> None:
    options = ("plan", "--system", "slurm", "--walltime", "2h", "--jobs", "1", "--json")
    done = hpcgpu(*options, "--queue", "gpu,nope", "--gpus-per-node", "9")
    limits = {(job["queue"], job["kind"]): " ".join(job["limits"]) for job in printed("plan", done.stdout)["jobs"]}
    assert limits["gpu", "scheduler"] == ""
    assert "Requested node configuration is not available" in limits["gpu", "worker"]
    assert "check `gpus_per_node`, `gpu_type`" in limits["gpu", "worker"]
    assert "invalid partition" in limits["nope", "worker"] and "Check `queue`" in limits["nope", "worker"]


def test_variables_of_the_user_s_shell_change_no_answer(
    bed: SlurmBed, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone makes a command of Slurm leave out what was asked for, or print it in another way."""
    variables = {
        "SINFO_PARTITION": "urgent",
        "SINFO_FORMAT": "%n",
        "SINFO_SORT": "nonsense",
        "SINFO_FEDERATION": "1",
        "SCONTROL_FUTURE": "1",
        "SQUEUE_PARTITION": "urgent",
        "SQUEUE_STATES": "COMPLETED",
        "SBATCH_PARTITION": "urgent",
        "SLURM_CLUSTERS": "nowhere",
        "SLURM_TIME_FORMAT": "relative",
    }
    before = queues()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        bed.set_partition("shared", "MaxTime=30")
        plan = SlurmGPUCluster.plan(queue="shared", walltime="2h")
    finally:
        bed.set_partition("shared", "MaxTime=INFINITE")
    assert {job.start for job in plan.jobs} == {None}, plan
    assert queues() == before


def test_a_time_limit_that_sbatch_does_not_check_is_reported(bed: SlurmBed, home: Path) -> None:
    try:
        bed.set_partition("shared", "MaxTime=30")
        limited = SlurmGPUCluster.plan(queue="shared", walltime="2h")
        bed.set_partition("shared", "State=DOWN")
        down = SlurmGPUCluster.plan(queue="shared", walltime="10m")
    finally:
        bed.set_partition("shared", "MaxTime=INFINITE")
        bed.set_partition("shared", "State=UP")
    for plan, words in ((limited, "queue shared: MaxTime=00:30:00"), (down, "State=DOWN")):
        assert {job.start for job in plan.jobs} == {None}, f"Slurm would accept the job and never start it: {plan}"
        assert all(words in job.limits[0] for job in plan.jobs)


def test_a_walltime_over_the_limit_ends_the_start_at_once(bed: SlurmBed, home: Path) -> None:
    """Slurm accepts the job, and reports at the first poll why it never starts; no second interval is waited for."""
    options = {"queue": "shared", "walltime": "2h", "gpus_per_node": 0, "cores": 1, "poll_interval": 3600}
    try:
        bed.set_partition("shared", "MaxTime=30")
        # the last one as `hpcgpu start --no-wait` starts it, and leaves it
        for more in ({"jobs": 0}, {"jobs": 1}, {"jobs": 1, "wait": False, "shutdown_on_close": False}):
            with pytest.raises(ClusterError, match=r"will never start: .*shorter `walltime` \[PartitionTimeLimit\]"):
                SlurmGPUCluster(name="long", quiet=True, **options, **more)
    finally:
        bed.set_partition("shared", "MaxTime=INFINITE")
    bed.wait_empty()
