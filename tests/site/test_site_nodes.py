"""Compute nodes that fail, and what an operator does to jobs and nodes while a cluster runs."""

from __future__ import annotations

import pytest
from site_bed import Site, wait_for

from tests.site.programs import SMALL, Program

ONE = SMALL | {"jobs": 1, "env": {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}}
#: Runs a task that waits, prints on which node, and then that it ended on another.
WORKS = """
from distributed import Event, get_worker
def wait_for_it():
    Event("go").wait()
    return get_worker().name
with SlurmGPUCluster(**{options!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    cluster.settle()
    [first] = cluster.workers
    [job] = [job for job in cluster.jobs if job.kind == "worker"]
    future = client.submit(wait_for_it)
    until(lambda: any(client.processing().values()), "the task runs")
    say("works on", job.node, "as job", job.id)
    until(lambda: cluster.workers and first not in cluster.workers, "another job takes its place", 300)
    cluster.wait_for_workers(1)
    Event("go", client=client).set()
    say("ended elsewhere:", future.result(timeout=150) != first)
    say("jobs:", len([job for job in cluster.jobs if job.kind == "worker"]))
    {then}
"""


def working(name: str, **options: object) -> tuple[Program, str, str]:
    """A program with a task on a node; the node and the id of its job."""
    program = Program("login1", WORKS.format(options=ONE | {"name": name} | options, then="pass"))
    found = program.hears(r"works on (\w+) as job (\d+)")
    return program, found[1], found[2]


@pytest.mark.shows("A compute node that is switched off")
def test_a_node_that_is_switched_off_is_named_and_its_task_runs_elsewhere(site: Site) -> None:
    program, node, job = working("off")
    site.kill(node)
    # Slurm reports after a minute that the node failed; a job without a worker is replaced after a minute too.
    program.hears(rf"worker job {job} .*(node_fail: its node failed|on {node}: lost 1 of 1 worker)", 300)
    program.hears("ended elsewhere: True.*jobs: 2", 300)
    site.boot(node)
    program.ends()


@pytest.mark.shows("A compute node that is frozen")
def test_the_task_of_a_node_that_stands_still_runs_elsewhere_though_its_connections_stay(site: Site) -> None:
    program, node, job = working("frozen")
    site.pause(node)
    program.hears(rf"worker job {job} .*node_fail: its node failed", 300)
    program.hears("ended elsewhere: True.*jobs: 2", 150)
    site.unpause(node)
    program.ends()


@pytest.mark.by_hand
@pytest.mark.shows("A compute node that is disconnected from the workers' network only")
def test_a_worker_that_the_scheduler_cannot_reach_is_replaced_though_slurm_reaches_its_node(site: Site) -> None:
    """The worker starts again and cannot connect, so its job is replaced. Slurm may give its node to the next job too,
    which ends without a worker. Later jobs avoid that node.
    """
    program, node, job = working("cut", interface="eth1", client_interface="eth0", death_timeout="20s")
    site.disconnect(node, "workers")
    program.hears(rf"worker job {job} \(cut-0\) .*another job replaces it.*ended elsewhere: True", 400)
    site.connect(node, "workers")
    program.ends()


#: Prints on which node its worker runs, when that worker is lost, and where it computes afterwards.
COMES_BACK = """
with SlurmGPUCluster(**{options!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    cluster.settle()
    [job] = [job for job in cluster.jobs if job.kind == "worker"]
    say("works on", job.node)
    until(lambda: not client.scheduler_info()["workers"], "its worker is lost", 300)
    say("lost")
    listen()
    cluster.wait_for_workers(1)
    say("computes again:", client.submit(sum, [1, 2]).result(), [job.name for job in cluster.jobs])
"""


@pytest.mark.shows("A compute node that is disconnected for a while")
def test_a_worker_whose_node_was_disconnected_comes_back_in_its_job(site: Site) -> None:
    options = SMALL | {"name": "cable", "jobs": 1, "interface": "eth1", "client_interface": "eth0"}
    program = Program("login1", COMES_BACK.format(options=options))
    node = program.hears(r"works on (\w+)")[1]
    site.disconnect(node, "workers")
    try:
        program.hears("lost\n", 300)
    finally:
        site.connect(node, "workers")
    program.send()
    program.hears(r"computes again: 3 \['cable-scheduler', 'cable-0'\]", 120)
    program.ends()


@pytest.mark.shows("An operator's hold, release, drain, suspend, resume and requeue")
def test_a_held_job_is_reported_as_held_and_runs_when_it_is_released(site: Site) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "held"}!r}) as cluster:
    say("up")
    listen()
    cluster.scale(jobs=1)
    until(lambda: [j for j in cluster.snapshot().jobs if "the system holds it" in j.reason], "the table says so")
    say("held")
    cluster.wait_for_workers(1)
    say("released")
""",
    )
    program.hears("up\n")
    site.slurm("scontrol", "update", "PartitionName=gpu", "State=DOWN", host="ctl")  # so that it waits, and can be held
    try:
        program.send()
        waits = lambda: "PENDING" in site.jobs().values()  # noqa: E731
        wait_for(waits, "the job waits", 60)
        [job] = [job for job, state in site.jobs().items() if state == "PENDING"]
        site.slurm("scontrol", "hold", job, host="ctl")
    finally:
        site.slurm("scontrol", "update", "PartitionName=gpu", "State=UP", host="ctl")
    program.hears("held\n")
    site.slurm("scontrol", "release", job, host="ctl")
    program.hears("released")
    program.ends()


@pytest.mark.shows("An operator's hold, release, drain, suspend, resume and requeue")
def test_a_job_that_is_suspended_and_resumed_goes_on_and_a_drained_node_keeps_it(site: Site) -> None:
    program = Program(
        "login1",
        f"""
with SlurmGPUCluster(**{SMALL | {"name": "pauses", "jobs": 1}!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(1)
    cluster.settle()
    [job] = [job for job in cluster.jobs if job.kind == "worker"]
    say("works on", job.node, "as job", job.id)
    listen()
    future = client.submit(sum, [1, 2])
    say("resumed:", future.result(timeout=150), len(cluster.jobs))
""",
    )
    found = program.hears(r"works on (\w+) as job (\d+)")
    node, job = found[1], found[2]
    site.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test", host="ctl")
    site.slurm("scontrol", "suspend", job, host="ctl")
    wait_for(lambda: site.jobs()[job] == "SUSPENDED", "it is suspended", 60)
    site.slurm("scontrol", "resume", job, host="ctl")
    wait_for(lambda: site.jobs()[job] == "RUNNING", "it runs again", 60)
    program.send()
    program.hears("resumed: 3 2")
    program.ends()
    site.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME", host="ctl")


@pytest.mark.shows("An operator's hold, release, drain, suspend, resume and requeue")
def test_a_job_that_an_operator_requeues_is_not_run_twice(site: Site) -> None:
    """Slurm refuses to requeue it, because of --no-requeue."""
    program, _, job = working("requeued")
    asked = site.exec("ctl", ["scontrol", "requeue", job], "root", check=False)
    assert "disabled" in asked.err, asked
    site.slurm("scancel", job)
    program.hears("ended elsewhere: True.*jobs: 2", 300)
    program.ends()
