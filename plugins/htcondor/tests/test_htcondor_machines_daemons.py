"""A pool of two machines: GPUs of two kinds, and a machine that is switched off while a cluster works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import htcondor_bed
import pytest
from htcondor_bed import HTCondorBed, Run

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gpu_stub"))
import build

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
