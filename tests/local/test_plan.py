"""`hpcgpu plan` and `CLUSTER_CLASS.plan` on the embedded queue: what a user reads before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_pbs import Site

from hpcgpu import BatchError, LocalGPUCluster, OptionError, PBSGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live
from tests.helpers import block_queue, hpcgpu, printed

pytestmark = pytest.mark.shows("`plan`: when a cluster would start")

PLAN = ("plan", "--system", "local", "--jobs", "2", "--walltime", "90m")


def test_jobs_start_at_once_where_gpus_are_free_and_nothing_is_submitted(queue: LocalQueue, home: Path) -> None:
    plan = LocalGPUCluster.plan(gpus_per_node=2, jobs=2, walltime="90m", name="tried")
    assert [(job.kind, job.start is not None and job.start <= plan.at) for job in plan.jobs] == [
        ("scheduler", True),
        ("worker", True),
    ]
    assert plan.gpu_hours == 7.5
    assert live(queue) == []
    assert not (home / "clusters").exists()


def test_jobs_that_would_wait_are_not_promised_a_time(queue: LocalQueue, home: Path) -> None:
    blocker = block_queue(queue, home)
    try:
        done = hpcgpu(*PLAN, "--gpus-per-node", "2")
    finally:
        queue.cancel([blocker])
    assert done.returncode == 0, done.stderr
    assert "not known" in done.stdout
    assert "4 of 4 GPUs are taken, and 0 jobs wait before it" in done.stdout


def test_a_job_that_is_too_large_is_reported_as_never_starting(queue: LocalQueue) -> None:
    plan = printed("plan", hpcgpu(*PLAN, "--gpus-per-node", "9", "--json").stdout)
    of_kind = {job["kind"]: job for job in plan["jobs"]}
    assert of_kind["scheduler"]["limits"] == [] and of_kind["scheduler"]["start"] is not None
    assert "but this machine has 4" in of_kind["worker"]["limits"][0]
    assert of_kind["worker"]["start"] is None
    assert plan["gpu_hours"] == 2 * 9 * 1.5 + 1.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quue": "gpu"}, "unknown option"),
        ({"nodes_per_job": 2}, "the local queue has one node"),
        ({"job_extra_directives": ["--gpus=9"]}, "is set by"),
        ({"interface": "no0"}, "no0"),
    ],
)
def test_what_a_start_refuses_a_plan_refuses(queue: LocalQueue, options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        LocalGPUCluster.plan(**options)


def test_a_plan_of_a_bad_option_ends_with_2(queue: LocalQueue) -> None:
    done = hpcgpu(*PLAN, "--walltime", "soon")
    assert (done.returncode, done.stdout) == (2, "")


def test_pbs_reports_its_limits_and_what_is_free_and_no_time(pbs: Site, home: Path) -> None:
    plan = PBSGPUCluster.plan(queue="gpu,workq,off,nope", jobs=1, walltime="2h", gpus_per_node=2)
    said = {job.queue: (job.limits, job.known) for job in plan.jobs if job.kind == "worker"}
    assert {job.start for job in plan.jobs} == {None}
    assert said["gpu"][0] == (
        "walltime 02:00:00: queue gpu: resources_max.walltime = 01:00:00 (write walltime: '01:00:00' or less)",
    )
    assert said["off"][0] == ("queue off: enabled = False (write queue: workq or gpu)",)
    assert said["nope"][0][0] == "qstat: Unknown queue nope. Check `queue`"
    limits, known = said["workq"]
    assert limits == () and "enough of its nodes' resources are free now" in known
    assert "jobs that wait in its queue: 1" in known
    assert not pbs.alive(), "a plan submits nothing"
    large = PBSGPUCluster.plan(jobs=1, gpus_per_node=9)
    assert "no node of its queue is large enough" in large.jobs[-1].limits[0]


def test_where_qstat_fails_a_plan_has_only_what_was_reported(pbs: Site, home: Path) -> None:
    pbs.fault("qstat", stdout="", stderr="qstat: something odd\n", rc=1, always=True)
    with pytest.raises(BatchError):
        PBSGPUCluster.plan(jobs=1)
