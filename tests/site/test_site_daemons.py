"""Slurm's own daemons that are away for a while: the controller, and the accounting."""

from __future__ import annotations

import re
import time

import pytest
from site_bed import NODES, Site, wait_for

from tests.site.programs import SMALL, Program

AWAY = 120.0  # seconds


@pytest.mark.by_hand
@pytest.mark.shows("Slurm's controller does not answer for two minutes")
def test_a_controller_that_is_away_for_minutes_costs_no_job_and_no_work_and_doubles_none(site: Site) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "waits", "jobs": 1}!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    say("up")
    listen()
    cluster.scale(jobs=2)
    try:
        cluster.wait_for_workers(2, timeout=60)
    except TimeoutError as error:
        say("told:", error, *error.__notes__)
    say("during:", client.submit(sum, [1, 2]).result(timeout=60))
    listen()
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    say("after:", len(cluster.workers))
    listen()
""",
    )
    program.hears("up\n")
    before = site.jobs()
    site.stop_controller()
    until = time.monotonic() + AWAY
    program.send()
    program.hears(r"told: .*the queue does not answer: .*during: 3\n")
    wait_for(lambda: time.monotonic() > until, "it is away", 2 * AWAY)
    site.start_controller()
    program.send()
    program.hears("after: 2\n")
    assert set(before) < set(site.jobs()) and len(site.jobs()) == 3, "the scheduler and two workers"
    program.send()
    program.ends()


@pytest.mark.shows("Slurm's controller is restarted while a cluster grows, and is away when it ends")
def test_a_cluster_grows_over_a_restart_of_the_controller_and_its_jobs_end_without_one(site: Site) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "again"}!r}) as cluster:
    say("up")
    listen()
    cluster.scale(jobs=2)
    until(lambda: len(cluster.jobs) == 3, "they are submitted")
    say("submitted")
    cluster.wait_for_workers(2)
    say("grew")
    listen()
""",
    )
    program.hears("up\n")
    program.send()
    program.hears("submitted\n")
    site.stop_controller()
    site.start_controller()
    program.hears("grew\n")
    site.stop_controller()
    program.send()
    said = program.ends()
    assert re.search(r"these jobs of cluster again may still be in the queue: .*hpcgpu stop again", said)
    runs = lambda: [n for n in NODES if site.exec(n, "pgrep -u ada -f '[h]pcgpu.runtime'", check=False).out]  # noqa: E731
    wait_for(lambda: not runs(), "no process of the jobs is left", 60)
    site.start_controller()
    wait_for(lambda: not site.jobs(), "no job stays", 120)


@pytest.mark.shows("Slurm's accounting does not answer while a cluster starts, scales and ends")
def test_a_cluster_starts_scales_and_ends_while_the_accounting_is_away(site: Site) -> None:
    site.stop_accounting()
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "unaccounted", "jobs": 1}!r}) as cluster:
    cluster.wait_for_workers(1)
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    cluster.scale(jobs=0)
    until(lambda: not cluster.scheduler_info["workers"], "they go")
    say("fine")
""",
    )
    assert "fine" in program.ends()
    site.start_accounting()
