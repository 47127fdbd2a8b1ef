"""The node of the scheduler fails, and the worker jobs stay: `on_scheduler_end="restart"`."""

from __future__ import annotations

import pytest
from site_bed import Site

from tests.site.programs import SMALL, Program

RESTART = SMALL | {"jobs": 2, "on_scheduler_end": "restart"}
#: Prints where the scheduler works, computes before and after it is lost, and prints what stayed.
GOES_ON = """
import json, subprocess
def hpcgpu_says(*words):
    done = subprocess.run([sys.executable, "-m", "hpcgpu", *words], capture_output=True, text=True)
    return done.stdout
def worker_jobs():
    return sorted(job.id for job in cluster.jobs if job.kind == "worker" and job.state == "running")
with SlurmGPUCluster(**{options!r}) as cluster, cluster.get_client() as client:
    cluster.wait_for_workers(2)
    cluster.settle()
    before = worker_jobs()
    [scheduler] = [job for job in cluster.jobs if job.kind == "scheduler"]
    say("scheduler on", scheduler.node)
    until(lambda: cluster.status.name != "running", "the loss of the scheduler is noticed", 300)
    say("restarting:", hpcgpu_says("status", cluster.name))
    say("computes again:", client.submit(pow, 2, 10).result(timeout=300))
    cluster.wait_for_workers(2)
    say("same worker jobs:", worker_jobs() == before)
    bill = json.loads(hpcgpu_says("report", cluster.name, "--json"))
    say("billed:", *sorted(job["name"] for job in bill["jobs"]))
"""


@pytest.mark.shows("The scheduler's node is switched off, and the scheduler is restarted on another one")
def test_worker_jobs_stay_when_the_node_of_the_scheduler_is_switched_off(site: Site) -> None:
    program = Program("login1", GOES_ON.format(options=RESTART | {"name": "dark"}))
    node = program.hears(r"scheduler on (\w+)")[1]
    site.kill(node)
    # Slurm reports it by itself after a minute.
    site.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test", host="ctl")
    program.hears("the scheduler of cluster dark is gone and another one is started", 300)
    program.hears("restarting:.*2 worker jobs keep their 2 GPUs and wait for it")
    program.hears("computes again: 1024", 300)
    program.hears("same worker jobs: True")
    program.hears("billed: dark-0 dark-1 dark-scheduler dark-scheduler2")
    site.boot(node)
    program.ends()
