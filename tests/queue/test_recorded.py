"""What real releases of Slurm printed in each situation, read by the real client: state, outlook and reason in words.

The files of tests/recorded/slurm-RELEASE are recorded by tests/site/record.py; their first lines record where and when.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpcgpu.batch.base import JobState, JobStatus, Outlook
from hpcgpu.batch.reasons import explain, outlook
from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.errors import BatchError, SubmitLimited, SubmitRefused

FILES = sorted((Path(__file__).parents[1] / "recorded").glob("slurm-*/*.txt"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")

#: By situation: the state, and what a user reads.
WAIT, LIMIT, NEVER, SITE = Outlook.WAIT, Outlook.LIMIT, Outlook.NEVER, Outlook.SITE
PENDING: dict[str, tuple[Outlook, str]] = {
    "resources": (WAIT, r"no free node has the resources that it requests \[Resources\]"),
    "priority": (WAIT, r"other jobs have a higher priority \[Priority\]"),
    "dependency": (WAIT, r"it starts once the scheduler job has started \[Dependency\]"),
    "dependency-never-satisfied": (NEVER, "the job that it depends on did not succeed: cancel this job"),
    "begin-time": (WAIT, "its earliest start time is in the future"),
    "held-by-the-user": (NEVER, "you hold it: release it with `scontrol release`"),
    "held-by-the-administrator": (NEVER, "the system holds it: ask the site's support"),
    "requeued": (WAIT, "after a requeue Slurm waits two minutes"),
    "requeued-and-held": (NEVER, "the system requeued it and holds it"),
    "partition-time-limit": (NEVER, "its walltime is above the queue's limit: request a shorter `walltime`"),
    "partition-down": (SITE, r"its nodes or its queue are out of service \[PartitionDown\]"),
    "partition-inactive": (SITE, r"its nodes or its queue are out of service \[PartitionInactive\]"),
    "node-drained": (SITE, "its nodes are reserved or down"),
    "node-down": (SITE, "its nodes are reserved or down"),
    "preempted-and-requeued": (WAIT, "after a requeue Slurm waits two minutes"),
    "qos-max-jobs-per-user": (LIMIT, r"you have reached your limit: other jobs of yours must .*QOSMaxJobsPerUserLimit"),
    "qos-gpus-per-user": (
        LIMIT,
        r"you have reached your limit: other jobs of yours must end first \[QOSMaxGRESPerUser\]",
    ),
    "qos-gpus-per-job": (NEVER, r"it requests more than the limit for a single job: request less \[QOSMaxGRESPerJob\]"),
    "qos-walltime-per-job": (NEVER, "its walltime is above your limit: request a shorter `walltime`"),
    "qos-group-gpus": (LIMIT, r"your group has reached its limit: other jobs must end first \[QOSGrpGRES\]"),
    "qos-group-jobs": (LIMIT, r"your group has reached its limit: other jobs must end first \[QOSGrpJobsLimit\]"),
    "qos-group-running-gpu-minutes": (LIMIT, "your group has reached its limit: other jobs must end first"),
    "qos-group-gpu-minutes": (
        LIMIT,
        "it may use more than is left of your group's budget: request a shorter `walltime`",
    ),
    "account-max-jobs": (
        LIMIT,
        r"you have reached your limit: other jobs of yours must end first \[AssocMaxJobsLimit\]",
    ),
    "account-group-jobs": (LIMIT, r"your group has reached its limit: other jobs must end first \[AssocGrpJobsLimit\]"),
    "account-group-gpus": (LIMIT, r"your group has reached its limit: other jobs must end first \[AssocGrpGRES\]"),
    "account-walltime-per-job": (NEVER, "its walltime is above your limit: request a shorter `walltime`"),
    "account-gpus-per-job": (NEVER, "it requests more than the limit for a single job: request less"),
    "maintenance-ahead": (SITE, "a shorter `walltime` may let it start earlier"),
}
ALIVE: dict[str, tuple[JobState, str]] = {
    "running": (JobState.RUNNING, ""),
    "suspended": (JobState.RUNNING, "the batch system has suspended it: nothing in it runs until"),
}
ENDED: dict[str, tuple[JobState, str]] = {
    "completed": (JobState.COMPLETED, "it ended by itself"),
    "failed": (JobState.FAILED, r"its script failed \[NonZeroExitCode\]"),
    "ended-by-a-signal": (JobState.FAILED, r"\[(RaisedSignal|JobLaunchFailure)"),
    "log-cannot-be-written": (
        JobState.FAILED,
        r"its node could not start it \(often .*log cannot be written\).*: check `log_directory`",
    ),
    "cancelled-while-pending": (JobState.CANCELLED, "a user or the batch system cancelled it"),
    "cancelled-while-running": (JobState.CANCELLED, "a user or the batch system cancelled it"),
    "walltime": (JobState.TIMEOUT, r"it reached the end of its walltime \[TimeLimit\]"),
    "deadline": (JobState.TIMEOUT, r"\[DeadLine\]"),
    "node-failed": (JobState.NODE_FAIL, "its node failed"),
    "memory-kill-without-cgroups": (JobState.FAILED, "or the node killed it because it used too much memory"),
    "memory-kill": (
        JobState.OUT_OF_MEMORY,
        r"it used more memory than it requested: increase `memory` \[OutOfMemory\]",
    ),
    "memory-kill-of-a-child": (JobState.OUT_OF_MEMORY, "it used more memory than it requested: increase `memory`"),
    "preempted": (JobState.PREEMPTED, "a job of higher priority preempted it"),
    "preempted-by-partition": (JobState.PREEMPTED, "a job of higher priority preempted it"),
}
REFUSED: dict[str, tuple[type[BatchError], str]] = {
    "unknown-partition": (SubmitRefused, "invalid partition specified: nope.*Check `queue`"),
    "too-many-gpus": (SubmitRefused, "Requested node configuration is not available.*check `gpus_per_node`"),
    "unknown-feature": (SubmitRefused, "Invalid feature specification"),
    "unknown-account": (SubmitRefused, "Invalid account.*Check `account`, and whether it may use `queue`"),
    "account-of-others": (SubmitRefused, "Invalid account.*Check `account`, and whether it may use `queue`"),
    "unknown-qos": (SubmitRefused, "Invalid qos specification. Check `qos`"),
    "refused-by-the-filter": (SubmitRefused, "The P100 nodes were switched off in March: ask for --constraint=a100"),
    "qos-too-many-submitted": (SubmitLimited, "QOSMaxSubmitJobPerUserLimit"),
    "account-too-many-submitted": (SubmitLimited, "AssocMaxSubmitJobLimit"),
    "qos-refuses-over-its-limit": (SubmitRefused, "QOSMaxWallDurationPerJobLimit.*Request a shorter `walltime`"),
    "partition-takes-no-jobs": (SubmitRefused, "inactive or drain.*choose another `queue`"),
}


every_job = pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in REFUSED], ids=lambda path: f"{path.parent.name}/{path.stem}"
)


@dataclass
class Command:
    """One command of a recording: its arguments, what it printed, how it ended."""

    argv: list[str]
    out: str = ""
    err: str = ""
    status: int = 0


@dataclass
class Recording:
    """All commands of one recording by their name, as programs that print it again."""

    commands: dict[str, Command] = field(default_factory=dict)

    @property
    def job(self) -> str:
        return self.commands["sbatch"].out.strip()

    def replay(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put programs on the PATH that print what was recorded, and write down how they were called."""
        for name, command in self.commands.items():
            for kind, text in (("out", command.out), ("err", command.err)):
                (folder / f"{name}.{kind}").write_text(text)
            program = folder / name
            lines = [f'printf "%s\\n" "$@" > {folder}/{name}.called', f"cat {folder}/{name}.out"]
            program.write_text(
                "\n".join(["#!/bin/sh", *lines, f"cat {folder}/{name}.err >&2", f"exit {command.status}"])
            )
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def read(path: Path) -> Recording:
    recording = Recording()
    command = Command([])
    for line in path.read_text().splitlines():
        mark, text = line[0], line[2:]
        if mark == "$":
            command = Command(shlex.split(text))
            recording.commands[command.argv[0]] = command
        elif mark == ">":
            command.out += text + "\n"
        elif mark == "!":
            command.err += text + "\n"
        elif mark == "=":
            command.status = int(text)
    return recording


@pytest.fixture
def recording(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = read(path)
    recording.replay(tmp_path, monkeypatch)
    return recording


def test_there_are_recordings_of_every_situation() -> None:
    assert {path.stem for path in FILES} == {*PENDING, *ALIVE, *ENDED, *REFUSED}


@every_file
def test_the_state_and_the_reason_are_read_as_slurm_prints_them(
    path: Path, recording: Recording, tmp_path: Path
) -> None:
    slurm = Slurm(sleep=lambda seconds: None)
    if path.stem in REFUSED:
        script = tmp_path / "script"
        script.touch()
        kind, words = REFUSED[path.stem]
        with pytest.raises(kind, match=re.compile(words, re.DOTALL)):
            slurm.submit(script, job_name="ada-1")
        return
    status = slurm.poll([recording.job])[recording.job]
    assert (tmp_path / "squeue.called").read_text().split("\n")[:-1] == recording.commands["squeue"].argv[1:]
    if path.stem in PENDING:
        expected, words = PENDING[path.stem]
        assert (status.state, outlook(status)) == (JobState.PENDING, expected)
    else:
        state, words = (ALIVE | ENDED)[path.stem]
        assert status.state is state
    assert re.search(words, explain(status)), explain(status)
    times_are_plausible(status)


def times_are_plausible(status: JobStatus) -> None:
    assert (status.start is None) is (status.state is JobState.PENDING)
    if status.start is not None and not status.suspended:
        assert status.end is not None and status.end >= status.start > 1.7e9


@every_job
def test_the_accounting_gives_the_same_state_for_a_job_that_the_queue_has_forgotten(
    path: Path, recording: Recording, tmp_path: Path
) -> None:
    slurm = Slurm(sleep=lambda seconds: None)
    recorded = slurm.ended([recording.job])
    assert (tmp_path / "sacct.called").read_text().split("\n")[:-1] == recording.commands["sacct"].argv[1:]
    if "Slurm accounting storage is disabled" in recording.commands["sacct"].err:
        assert recorded == {}
    else:
        told = recorded[recording.job]
        assert told.state is slurm.poll([recording.job])[recording.job].state
        assert told.exit_code == {"failed": 3, "ended-by-a-signal": 137}.get(path.stem, told.exit_code)
        if path.stem in ENDED:
            assert "253" not in explain(told), "0:125 is Slurm's mark of a memory kill"
