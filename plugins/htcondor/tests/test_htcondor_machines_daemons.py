"""A pool of two machines: GPUs of two kinds, and machines that are switched off while a cluster works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import htcondor_bed
import pytest
from htcondor_bed import HTCondorBed, Run, wait_for

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gpu_stub"))
import build

pytestmark = pytest.mark.shows("A compute node that is switched off")

Program = Callable[[str], "subprocess.CompletedProcess[str]"]
HEAD = f"""
import subprocess, sys
from hpcgpu_htcondor import HTCondorGPUCluster

SMALL = {{"cores": 1, "gpus_per_node": 0, "protocol": "tcp", "poll_interval": 0.5, "walltime": "10m"}}


def bed(*words):
    subprocess.run([sys.executable, {htcondor_bed.__file__!r}, *words], check=True)


def on(cluster, kind):
    cluster.settle()
    return sorted(job.node for job in cluster.jobs if job.kind == kind and job.state == "running")


"""


@pytest.fixture
def program(run: Run, tmp_path: Path) -> Program:
    """Run a program; its output."""

    def call(body: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        path.write_text(f'{HEAD}if __name__ == "__main__":\n{lines}')
        return run(str(path))

    return call


def test_the_scheduler_has_the_cheaper_gpu_and_workers_those_that_they_need(
    program: Program, small: str, tmp_path: Path
) -> None:
    if reason := build.why_not():
        pytest.skip(reason)
    stubs = build.environment(build.build(tmp_path / "stubs"))
    done = program(f"""
cheaper = {{"gpus_minimum_capability": "7.0", "job_extra_directives": ["rank = 0 - GPUs_Capability"]}}
gpu = {{"gpus_per_node": 1, "gpus_minimum_capability": "8.0", "scheduler": cheaper, "env": {stubs!r}}}
with HTCondorGPUCluster(**SMALL | gpu, jobs=2) as cluster:
    cluster.wait_for_workers(2, timeout=120)
    print(*on(cluster, "scheduler"), {small!r} in on(cluster, "worker"), len(on(cluster, "worker")))
""")
    assert done.stdout.split() == [small, "False", "2"], done.stderr


def test_a_cluster_goes_on_when_a_machine_is_switched_off_while_the_schedd_is_away(
    program: Program, bed: HTCondorBed, small: str
) -> None:
    """Its jobs run on both machines. HTCondor keeps the lost job as running until its lease ends."""
    done = program(f"""
elsewhere = {{"requirements": 'Machine != "{small}"'}}
spread = {{"job_extra_directives": ['rank = Machine == "{small}"'], "cores": 3, "death_timeout": "30s"}}
with HTCondorGPUCluster(**SMALL | spread, scheduler=elsewhere, jobs=2) as cluster:
    cluster.wait_for_workers(2, timeout=120)
    print(on(cluster, "worker").count("{small}"))
    with cluster.get_client() as client:
        slow = client.map(lambda i: __import__("time").sleep(0.5) or i, range(100))
        bed("stop-schedd", {str(bed.directory)!r})
        bed("switch-off", {str(bed.directory)!r}, "small")
        bed("start-schedd", {str(bed.directory)!r})
        print(sum(client.gather(slow)))
        while len(on(cluster, "worker")) < 2 or "{small}" in on(cluster, "worker"):
            pass
        client.wait_for_workers(2, timeout=120)
        print(client.submit(sum, [1, 2]).result())
""")
    assert done.stdout.split() == ["1", "4950", "3"], done.stderr
    assert "small.bed: lost 1 of 1 worker" in done.stderr and "another job replaces it" in done.stderr


def test_a_scheduler_whose_machine_is_switched_off_reports_until_when_htcondor_waits(
    program: Program, bed: HTCondorBed, small: str
) -> None:
    """By default this is 40 minutes. HTCondor keeps the job as running."""
    done = program(f"""
pinned = {{"requirements": 'Machine != "{small}"', "scheduler": {{"requirements": 'Machine == "{small}"'}}}}
with HTCondorGPUCluster(name="demo", **SMALL | pinned, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    client = cluster.get_client()
    future = client.submit(__import__("time").sleep, 1000)
    bed("switch-off", {str(bed.directory)!r}, "small")
    while not (reason := next(job.reason for job in cluster.jobs if job.kind == "scheduler")):
        __import__("time").sleep(0.1)
    print("table:", reason)
    for what in (lambda: future.result(timeout=200), lambda: cluster.wait_for_workers(1, timeout=1)):
        try:
            what()
        except Exception as error:
            print("error:", type(error).__name__, error, *getattr(error, "__notes__", []))
    for command in (["-m", "hpcgpu", "status", "demo"], ["-c", "import hpcgpu; hpcgpu.connect('demo', timeout=1)"]):
        answer = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        print("command:", answer.stdout, answer.stderr)
""")
    words = "the batch system has lost contact with its node: wait until the node is back, or stop the cluster"
    until = r"\[no contact with its machine since [-0-9]+ [0-9:]+; HTCondor waits for it until [-0-9]+ [0-9:]+ \(job_l"
    shown = re.split("(?:table|error|command): ", " ".join(done.stdout.split()))[1:]
    assert len(shown) == 5 and all(words in part and re.search(until, part) for part in shown), (
        done.stdout + done.stderr
    )
    assert "the scheduler of cluster demo does not answer: scheduler job" in shown[1]
    assert "WorkerStartTimeoutError" in shown[2]


@pytest.mark.parametrize("way", ["the lease ends", "the worker job has not waited for it", "the user removes the job"])
def test_a_scheduler_whose_machine_is_switched_off_comes_up_on_another_one(
    program: Program, bed: HTCondorBed, small: str, way: str
) -> None:
    """The worker job stays. By default the lease is 40 minutes: until then, only the user sees that it is off."""
    lease = [] if way == "the user removes the job" else ["job_lease_duration = 20"]
    wait = {"restart_wait": "3s"} if way == "the worker job has not waited for it" else {}
    prefers = {"requirements": "true", "job_extra_directives": [f'rank = Machine == "{small}"', *lease]}
    done = program(f"""
workers = {{"requirements": 'Machine != "{small}"', "scheduler": {prefers!r}, "on_scheduler_end": "restart"}}
with HTCondorGPUCluster(**SMALL | workers | {wait!r}, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    worker = [job.id for job in cluster.jobs if job.kind == "worker"]
    [lost] = [job for job in cluster.jobs if job.kind == "scheduler"]
    print(lost.node == "{small}")
    client = cluster.get_client()
    with cluster.replay():
        future = client.submit(lambda: __import__("time").sleep(1) or 6)
        bed("switch-off", {str(bed.directory)!r}, "small")
        while lost.id in [job.id for job in cluster.jobs if job.kind == "scheduler" and not job.reason]:
            __import__("time").sleep(0.1)
        if not {lease!r}:
            print(lost.id, [job.reason for job in cluster.jobs if job.id == lost.id], file=sys.stderr)
            subprocess.run(["condor_rm", lost.id], check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["condor_rm", "-forcex", lost.id], check=True, stdout=subprocess.DEVNULL)
        print(future.result(timeout=200))
    print(client.submit(sum, [4, 5]).result(timeout=100))
    print(worker == [job.id for job in cluster.jobs if job.kind == "worker"])
    print("{small}" in on(cluster, "scheduler"))
""")
    assert done.stdout.split() == ["True", "6", "9", str(not wait), "False"], done.stdout + done.stderr
    assert "is gone and another one is started" in done.stderr and "node_fail" in done.stderr.lower(), done.stderr


def test_a_job_that_stays_because_its_machine_is_off_is_reported_by_close_and_by_stop(
    program: Program, bed: HTCondorBed, small: str, cli: Run
) -> None:
    done = program(f"""
where = {{"requirements": 'Machine == "{small}"', "scheduler": {{"requirements": 'Machine != "{small}"'}}}}
with HTCondorGPUCluster(name="demo", **SMALL | where, jobs=1) as cluster:
    cluster.wait_for_workers(1, timeout=120)
    [lost] = [job.id for job in cluster.jobs if job.kind == "worker"]
    bed("switch-off", {str(bed.directory)!r}, "small")
    while not any(job.id == lost and "no contact" in job.reason for job in cluster.jobs):
        __import__("time").sleep(0.1)
    print(lost)
""")
    lost = done.stdout.strip()
    told = (
        rf"job {lost} \(demo-0\) is cancelled, but stays in the queue: the batch system has lost contact with its node "
        r"\[no contact with its machine since [-0-9]+ [0-9:]+; HTCondor waits for it until [-0-9]+ [0-9:]+ "
        rf"\(job_lease_duration\)\]\. If its machine is off, `condor_rm -forcex {lost}` removes it at once"
    )
    assert re.search(f"cluster demo: {told}", " ".join(done.stderr.split())), done.stderr
    assert "may still be in the queue" not in done.stderr
    stopped = cli("stop", "demo")
    assert stopped.returncode == 1 and re.search(f"demo: {told}", stopped.stderr), stopped.stderr
    bed.call("rm", "-forcex", lost)
    wait_for(lambda: not bed.jobs(), "no job is left")
    stopped = cli("stop", "demo")
    assert stopped.returncode == 0 and cli("list", "--json").stdout.strip() == "[]", stopped.stdout + stopped.stderr
