"""What PBS would refuse, or never start, is reported before it is submitted."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_pbs import Site

from hpcgpu import PBSGPUCluster
from hpcgpu.batch.base import JobState
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.batch.pbs.client import PBS
from hpcgpu.batch.pbs.reservations import parse_rstat
from tests.conftest import wait_until

QUEUES = {
    "workq": {"told": {"resources_max.ngpus": "1", "acl_user_enable": "True", "acl_users": getpass.getuser()}},
    "small": {"told": {"resources_max.ngpus": "2", "resources_max.ncpus": "8", "resources_min.walltime": "00:10:00"}},
    "big": {"told": {"resources_min.ngpus": "2", "resources_min.nodect": "2", "resources_max.walltime": "08:00:00"}},
    "members": {"told": {"acl_user_enable": "True", "acl_users": "bob,+carla"}},
    "short": {"told": {"from_route_only": "True", "resources_max.walltime": "00:30:00"}},
    "route": {"told": {"route_destinations": "short,members"}},
    "nowhere": {"told": {"route_destinations": "members"}},
    "off": {"enabled": False},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Two nodes with 16 cores and 2 GPUs each."""
    site = Site(tmp_path / "pbs", LocalQueue(tmp_path / "queue", gpus=4), {})
    site.set(queues=QUEUES, server={"resources_max.walltime": "02:00:00"})
    monkeypatch.setenv("PATH", str(site.bin), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    return site


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "small"}, ""),
        ({"queue": "small", "walltime": "3h"}, "the server's resources_max.walltime = 02:00:00"),
        ({"queue": "small", "walltime": "5m"}, "the queue takes only jobs with at least 00:10:00"),
        ({"queue": "small", "cores": 9}, "cores 9: the queue gives at most 8"),
        (
            {"queue": "small", "nodes_per_job": 2, "gpus_per_node": 2},
            "gpus-per-node 2: the queue gives at most 2 to 2 nodes together (write gpus-per-node: 1)",
        ),
        ({"queue": "big", "nodes_per_job": 2}, ""),
        ({"queue": "big", "nodes_per_job": 2, "walltime": "3h"}, ""),
        ({"queue": "big"}, "gpus-per-node 1: the queue takes only jobs with at least 2"),
        ({"queue": "big", "gpus_per_node": 2}, "nodes-per-job 1: the queue takes only jobs with at least 2 nodes"),
        ({"queue": "members"}, "it is open only to user bob, carla"),
        ({"queue": "short"}, "from_route_only = True"),
        ({"queue": "route", "walltime": "10m"}, ""),
        ({"queue": "route"}, "queue short: resources_max.walltime = 00:30:00"),
        ({"queue": "nowhere"}, "it hands jobs on to members: it is open only to user bob, carla"),
        ({"queue": "off"}, "enabled = False"),
        ({}, ""),
        ({"gpus_per_node": 2}, "gpus-per-node 2: the queue gives at most 1 (write gpus-per-node: 1)"),
        ({"queue": "small", "select_extra": 'gpu_type="v100,h100"'}, "no node has ncpus=1 ngpus=1 mem=4gb gpu_type="),
        ({"queue": "small", "select_extra": 'gpu_type="v100,a100"'}, ""),
        ({"queue": "small", "pbs_shape": "flat", "gpu_type": "h100"}, "no node has"),
    ],
)
def test_plan_reports_what_pbs_would_refuse(site: Site, options: dict[str, Any], said: str) -> None:
    given = {"walltime": "1h", "cores": 1, "scheduler": "local", **options}
    plan = PBSGPUCluster.plan(**given)
    [job] = plan.jobs
    assert said in "; ".join(job.limits) and bool(said) == bool(job.limits), job
    assert ("never" in repr(plan)) == bool(said)


def test_a_reservation_starts_jobs_from_its_start_on_and_ends_them(site: Site) -> None:
    begins, ends = (float(int(time.time()) + hours * 3600) for hours in (2, 4))
    site.set(queues={"workq": {}, "R7": {"started": False}}, reservations={"R7": (begins, ends)}, server={})
    plan = PBSGPUCluster.plan(queue="R7", walltime="1h", cores=1)
    assert {(job.kind, job.start, job.limits) for job in plan.jobs} == {
        ("scheduler", begins, ()),
        ("worker", begins, ()),
    }
    assert "it is a reservation from" in repr(plan) and "never" not in repr(plan)
    site.set(reservations={"R7": (begins - 4 * 3600, begins)}, queues={"workq": {}, "R7": {"enabled": False}})
    [job] = PBSGPUCluster.plan(queue="R7", walltime="1h", cores=1, scheduler="local").jobs
    assert "enabled = False" in job.limits[0], "that is no reservation's own"


def test_a_job_ends_with_its_reservation(site: Site, tmp_path: Path) -> None:
    ends = float(int(time.time()) + 600)
    site.set(queues={"workq": {}, "R7": {}}, reservations={"R7": (ends - 900, ends)})
    pbs, jobs = PBS(), {}
    try:
        for queue, walltime in (("R7", "02:00:00"), ("R7", "00:01:00"), ("workq", "02:00:00"), ("R7", "")):
            script = tmp_path / f"{len(jobs)}.pbs"
            asked = f"#PBS -l walltime={walltime}\n" if walltime else ""
            script.write_text(f"#!/bin/bash\n#PBS -q {queue}\n#PBS -l select=1:ncpus=1\n{asked}exec sleep 600\n")
            jobs[pbs.submit(script, job_name=f"j{len(jobs)}", logs=tmp_path)] = None
        wait_until(lambda: {s.state for s in pbs.poll(jobs).values()} == {JobState.RUNNING}, "they run")
        statuses = pbs.poll(jobs)
        there, short, elsewhere, unlimited = (statuses[job_id] for job_id in jobs)
        assert (there.end, unlimited.end) == (ends, ends)
        assert short.start is not None and short.end == short.start + 60
        assert elsewhere.start is not None and elsewhere.end == elsewhere.start + 7200
        assert len(site.calls("pbs_rstat")) == 1, "not with each poll"
    finally:
        pbs.cancel(jobs)


def test_the_times_of_a_reservation_are_read_as_pbs_prints_them() -> None:
    """As OpenPBS 23.06.06 prints them; some lines are left out."""
    told = (
        "Resv ID: R58.pbs01\nReserve_Name = NULL\nReserve_Owner = alice@pbs01\nreserve_state = RESV_CONFIRMED\n"
        "reserve_start = Mon Nov 23 14:25:37 2026\nreserve_end = Mon Nov 23 14:28:37 2026\nreserve_duration = 180\n"
        "queue = R58\nResource_List.select = 1:ncpus=1:ngpus=1\nctime = Mon Nov 23 14:24:07 2026\nreserve_count = 1\n\n"
        "Resv ID: R59.pbs01\nreserve_start = soon\nqueue = R59\n\n"
    )
    [(queue, found)] = parse_rstat(told).items()
    assert queue == "R58" and found.end - found.start == 180
    assert "from Mon 2026-11-23 14:25 to Mon 2026-11-23 14:28" in str(found)
