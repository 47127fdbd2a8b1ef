"""Jobs of a real Slurm run an environment that was packed into an archive."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bed import SlurmBed
from distributed import Client

from hpcgpu import SlurmGPUCluster
from tests.packed import Environment
from tests.slurm.helpers import A100, run_script

Until = Callable[..., None]
pytestmark = pytest.mark.slurm


def environments(disk: Path) -> list[Path]:
    return sorted(disk.glob("hpcgpu-environment-*"))


def test_every_task_of_a_job_of_two_nodes_runs_the_packed_environment(
    bed: SlurmBed, home: Path, environment: Environment, until: Until
) -> None:
    disk = home / "disk"
    options = A100 | {"gpus_per_node": 1, "stage": environment.archive("env.tar.gz"), "local_directory": str(disk)}
    with SlurmGPUCluster(**options, nodes_per_job=2, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        (place,) = environments(disk)
        assert set(client.run(lambda: sys.prefix).values()) == {f"{place}/environment"}
    until(lambda: environments(disk) == [], "the last job removes the environment")


def test_one_job_for_all_runs_it_too(bed: SlurmBed, home: Path, environment: Environment, until: Until) -> None:
    disk, program = home / "disk", home / "program.py"
    program.write_text(
        "import sys\nfrom distributed import Client\n"
        "with Client() as client:\n    print('PREFIXES', sys.prefix, *client.run(lambda: sys.prefix).values())\n"
    )
    command = [sys.executable, "-m", "hpcgpu", "render", "slurm", "--single-job", "--nodes", "2", "-o", home / "one"]
    command += ["--queue", A100["queue"], "--gpus-per-node", "1", "--cores", "1", "--memory", "1GB"]
    command += ["--stage", environment.archive("env.tar"), "--local-directory", disk, "--", "python", program]
    subprocess.run(command, check=True, env=os.environ)
    assert run_script(home / "one" / "one.sbatch") == 0
    (line,) = [
        line
        for log in (home / "one").glob("*.log")
        for line in log.read_text().splitlines()
        if line.startswith("PREFIXES")
    ]
    assert len(line.split()) == 4 and len(set(line.split()[1:])) == 1 and f"{disk}/hpcgpu-environment-" in line
    until(lambda: environments(disk) == [], "the job removes the environment")
