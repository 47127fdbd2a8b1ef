"""How many commands a cluster sends to a real Slurm, which is a service that many share."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from bed import SlurmBed

from hpcgpu import SlurmGPUCluster
from hpcgpu.runtime.scheduler_connection import FIRST_POLL
from tests.slurm.helpers import CPU

pytestmark = pytest.mark.shows("How many commands hpcgpu sends to the queue")

JOBS = 3
#: One poll_interval: no start is so slow that the manager polls.
LONG = 3600.0

WRAPPER = """#!/bin/bash
job=$(tr '\\0' '\\n' < /proc/$PPID/environ | sed -n 's/^SLURM_JOB_ID=//p')
echo "$job|$(date +%s.%N)|{name} $*" >> '{log}'
exec {command} "$@"
"""


class Command(NamedTuple):
    """A command to the queue: the job that ran it, empty for the user's program; when; its line."""

    job: str
    time: float
    line: str

    @property
    def name(self) -> str:
        return self.line.split()[0]


class Commands:
    """The commands of the queue that this program and the jobs of its clusters run, by wrappers on the PATH."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.log, commands = place / "commands.log", place / "commands"
        commands.mkdir()
        for name in ("sbatch", "squeue", "scancel", "sacct", "scontrol", "sinfo"):
            text = WRAPPER.format(name=name, log=self.log, command=shutil.which(name))
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        patch.setenv("PATH", str(commands), prepend=os.pathsep)

    def all(self) -> list[Command]:
        lines = (line.split("|", 2) for line in self.log.read_text().splitlines())
        return [Command(job, float(at), line) for job, at, line in lines]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


def started(job_id: str) -> float:
    """When a job started, epoch seconds."""
    shown = subprocess.run(
        ["squeue", "--noheader", "--states=all", "--format=%S", f"--jobs={job_id}"],
        env=os.environ | {"SLURM_TIME_FORMAT": "%s"},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    return float(shown.stdout)


def test_a_start_needs_one_submit_for_each_job_and_a_stop_one_cancel(bed: SlurmBed, commands: Commands) -> None:
    with SlurmGPUCluster(**CPU | {"walltime": "2h", "poll_interval": LONG}, jobs=JOBS) as cluster:
        cluster.wait_for_workers(JOBS)
        start = commands.all()
        scheduler, *workers = (job.id for job in cluster.jobs)
        stopped = time.time()
    stop, ended = commands.all()[len(start) :], time.time()

    program = [command for command in start if not command.job]
    commands_of_start = Counter(command.name for command in program)
    assert commands_of_start.pop("squeue", 0) <= 1, "one poll for all jobs, after the last submit"
    assert commands_of_start == {"sbatch": JOBS + 1, "scontrol": 1}
    assert [command.line for command in program if command.name == "scontrol"] == ["scontrol show config"], (
        "which queue this is, once for the cluster: two systems may share a home directory"
    )
    assert [command.line.split(" JobName=")[0] for command in start if command.job == scheduler] == [
        f"scontrol update JobId={scheduler}"
    ], "Slurm looks at the worker jobs now, and not in its next cycle"
    for command in start:
        if command.job in workers:  # on a slow machine
            assert command.name == "squeue"
            assert command.time - started(command.job) >= FIRST_POLL, "no job asks the queue when many start"

    polls = [command for command in stop if command.name == "squeue" and not command.job]
    pauses = itertools.takewhile(
        lambda after: after <= ended - stopped, itertools.accumulate(itertools.chain([1.0, 1.0], itertools.repeat(2.0)))
    )
    ids = sorted([scheduler, *workers])
    assert [command.line for command in stop if command.name == "scancel"] == [f"scancel {' '.join(ids)}"]
    assert 1 <= len(polls) <= len(list(pauses)), "one a second at first, until no job is left"
    assert polls[0].line.endswith(f"--jobs={','.join(ids)} --states=all"), "one poll for all"
    assert {command.name for command in stop if not command.job} == {"scancel", "squeue"}
