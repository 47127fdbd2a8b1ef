"""Two login nodes: a cluster that is taken over from the other one, and login nodes that fail."""

from __future__ import annotations

import re

import pytest
from site_bed import Site, wait_for

from tests.site.programs import SMALL, Program


def names(site: Site) -> list[str]:
    """The names of the jobs in the queue, but of those that are ending. No answer counts only if it comes twice."""
    command = ["squeue", "--noheader", "--format=%T %j"]
    lines = (site.slurm(*command) or site.slurm(*command)).splitlines()
    return sorted(line.split()[1] for line in lines if not line.startswith("COMPLETING"))


@pytest.mark.shows("A cluster taken over from the other login node, with managers on both at once")
def test_the_manager_on_the_other_login_node_takes_over_and_the_first_reports_it(site: Site) -> None:
    first = Program(
        "login1",
        f"""
cluster = SlurmGPUCluster(**{SMALL | {"name": "two", "jobs": 1}!r})
cluster.wait_for_workers(1)
say("up")
listen()
try:
    cluster.scale(jobs=3)
except hpcgpu.ClusterError as error:
    say("not mine:", error)
with cluster.get_client() as client:
    say("its clients work:", client.submit(sum, [1, 2]).result())
cluster.close()
""",
    )
    first.hears("up\n")
    second = Program(
        "login2",
        """
with SlurmGPUCluster.from_name("two") as cluster:
    cluster.scale(jobs=2)
    cluster.wait_for_workers(2)
    say("has", len(cluster.workers))
    listen()
""",
    )
    first.hears(r"ClusterWarning: cluster two was taken over by .*login2")
    second.hears("has 2\n")
    first.send()
    said = first.ends()
    assert "not mine: cluster two was taken over by" in said and "its clients work: 3" in said
    assert names(site) == ["two-0", "two-1", "two-scheduler"], "the first has cancelled none, and submitted none"
    second.send()
    second.ends()
    wait_for(lambda: names(site) == [], "the second ends them all", 60)


@pytest.mark.shows("A login node that is switched off: its jobs end, or the other login node takes them over")
def test_when_the_login_node_is_switched_off_the_cluster_is_taken_over_from_the_other(site: Site) -> None:
    first = Program(
        "login2",
        f"""
cluster = SlurmGPUCluster(**{SMALL | {"name": "left", "jobs": 1, "lease": 120}!r})
cluster.wait_for_workers(1)
with cluster.get_client() as client:
    client.publish_dataset(kept=client.scatter([1, 2, 3]))
say("up")
listen()
""",
    )
    first.hears("up\n")
    site.kill("login2")
    second = Program(
        "login1",
        """
with SlurmGPUCluster.from_name("left") as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    say("data:", client.gather(client.get_dataset("kept")))
""",
    )
    assert "data: [1, 2, 3]" in second.ends()
    assert names(site) == []
    site.boot("login2")


@pytest.mark.shows("A login node that is switched off: its jobs end, or the other login node takes them over")
def test_when_the_login_node_is_switched_off_the_jobs_end_by_themselves(site: Site) -> None:
    program = Program(
        "login2",
        f"""
cluster = SlurmGPUCluster(**{SMALL | {"name": "orphan", "jobs": 1, "lease": 20}!r})
cluster.wait_for_workers(1)
say("up")
listen()
""",
    )
    program.hears("up\n")
    site.kill("login2")
    wait_for(lambda: names(site) == [], "the lease ends", 150)
    site.boot("login2")


@pytest.mark.shows("A login node that is frozen or disconnected for longer than the lease")
@pytest.mark.parametrize("fault", ["paused", pytest.param("cut off", marks=pytest.mark.by_hand)])
def test_a_manager_that_was_away_for_longer_than_its_lease_reports_that_its_cluster_ended(
    site: Site, fault: str
) -> None:
    program = Program(
        "login2",
        f"""
cluster = SlurmGPUCluster(**{SMALL | {"name": "away", "jobs": 1, "lease": 15}!r})
cluster.wait_for_workers(1)
say("up")
until(lambda: cluster.status.name != "running", "it notices")
say("status", cluster.status.name, repr(cluster))
cluster.close()
""",
    )
    program.hears("up\n")
    if fault == "paused":
        site.pause("login2")
    else:
        site.disconnect("login2", "clients")
    wait_for(lambda: names(site) == [], "the lease ends", 150)
    if fault == "paused":
        site.unpause("login2")
    else:
        site.connect("login2", "clients")
    said = program.ends()
    ended = (
        r"the scheduler of cluster away is gone, and its worker jobs are cancelled: scheduler job \d+ "
        r"\(away-scheduler\) completed: it ended by itself; no heartbeat from the cluster's manager for 15 s "
        r"\(option lease\): this scheduler ends\. Log: /home/ada/\.hpcgpu/clusters/away/logs/away-scheduler-\d+\.log\n"
    )
    assert re.search(f"ClusterWarning: {ended}", said), said
    assert re.search(rf"status failed SlurmGPUCluster\('away', status=failed\): {ended}", said), said


@pytest.mark.shows("A login node that is frozen or disconnected for a while")
@pytest.mark.parametrize("fault", [pytest.param("paused", marks=pytest.mark.by_hand), "cut off"])
def test_a_manager_that_was_away_for_a_while_goes_on(site: Site, fault: str) -> None:
    program = Program(
        "login2",
        f"""
cluster = SlurmGPUCluster(**{SMALL | {"name": "back", "jobs": 1}!r})
cluster.wait_for_workers(1)
say("up")
listen()
cluster.scale(jobs=2)
cluster.wait_for_workers(2)
with cluster.get_client() as client:
    say("goes on", client.submit(sum, [1, 2]).result())
cluster.close()
""",
    )
    program.hears("up\n")
    job = next(iter(site.jobs()))
    if fault == "paused":
        site.pause("login2")
    else:
        site.disconnect("login2", "clients")
    # the poll that the manager misses: Slurm's own count of seconds, which no test can hurry
    elapsed = lambda: int(site.slurm("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")[-1])  # noqa: E731
    begin = elapsed()
    wait_for(lambda: (elapsed() - begin) % 60 >= 20, "twenty seconds", 60)
    if fault == "paused":
        site.unpause("login2")
    else:
        site.connect("login2", "clients")
    program.send()
    assert "goes on 3" in program.ends()
    assert names(site) == []
