"""A home and clocks that are not the same everywhere."""

from __future__ import annotations

import pytest
from site_bed import NODES, Site

from tests.site.programs import SMALL, Program

pytestmark = pytest.mark.usefixtures("site")

#: The clocks of these hosts, in seconds beside the truth.
CLOCKS = dict.fromkeys(NODES, 120) | {"s0": -120}


@pytest.mark.shows("Logs and contact that appear late, on a home filesystem with caches")
def test_the_log_of_a_job_that_failed_is_in_the_message_although_it_appears_late() -> None:
    broken = 'if [ "$SLURM_JOB_PARTITION" = gpu ]; then echo "no such module: cuda/99" >&2; exit 3; fi'
    options = SMALL | {"job_script_prologue": [broken], "worker_restarts": 0, "jobs": 1, "name": "fails"}
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{options!r}) as cluster:
    until(lambda: "a worker job failed; it is not replaced" in repr(cluster), "it fails")
    try:
        cluster.wait_for_workers(1)
    except hpcgpu.ClusterError as error:
        say("error:", error)
""",
    )
    said = program.ends()
    assert "its script failed" in said and "none of its workers had connected" in said
    assert "no such module: cuda/99" in said


@pytest.fixture
def other_clocks(site: Site) -> None:
    """The clocks of the compute nodes are two minutes off; Slurm's own daemons there keep the time that they had."""
    for host, seconds in CLOCKS.items():
        library = "$(ls /usr/lib/*/faketime/libfaketimeMT.so.1)"
        site.exec(host, f"echo {seconds:+d} > /etc/faketimerc; echo {library} > /etc/ld.so.preload", "root")


@pytest.mark.shows("Clocks of nodes that are two minutes off")
def test_a_cluster_works_on_nodes_whose_clocks_are_two_minutes_off(site: Site, other_clocks: None) -> None:
    options = SMALL | {"name": "clocks", "jobs": 2, "env": {"DONT_FAKE_MONOTONIC": "1"}}
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{options!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(2)
    off = [round(other - time.time(), -1) for other in client.run(time.time).values()]
    say("workers are off by", *off, "the scheduler by", round(client.run_on_scheduler(time.time) - time.time(), -1))
    say("works:", sum(client.gather(client.map(abs, range(100)))))
    cluster.scale(jobs=1)
    until(lambda: len(cluster.scheduler_info["workers"]) == 1, "one drains")
    say("works on:", client.submit(sum, [1, 2], pure=False).result())
""",
    )
    program.hears(r"workers are off by 120\.0 120\.0 the scheduler by -120\.0")
    said = program.ends()
    assert "works: 4950" in said and "works on: 3" in said
    assert "Warning" not in said, "nothing is reported that is not so"
