"""Whatever a queue's commands print is data: it is shown escaped and bounded, and nothing that was not asked for is
believed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgpu.batch import system_registry
from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.pbs.client import PBS
from hpcgpu.batch.pbs.nodes import Shortage, parse_pbsnodes
from hpcgpu.batch.reasons import explain
from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.errors import BatchError
from hpcgpu.profiles.draft_profile import draft

COMMANDS = {
    "slurm": ("sbatch", "squeue", "scancel", "sacct", "sinfo"),
    "pbs": ("qsub", "qstat", "qdel", "qselect", "qhold", "qrls", "pbsnodes"),
}
BATCHES = [Slurm(timeout=60, attempts=1), PBS(timeout=60, attempts=1)]
EVIL = "\x1b]0;owned\x07\x1b[2J[/red][link=x]\u202e\x00\x9b31m"
#: What a command prints; what has the name of a command is an answer of its batch system alone.
ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "escapes, markup, NUL": f"7 {EVIL}\n{EVIL}".encode(),
    "not UTF-8": b"\xff\xfe\x80 7\n\xc3(",
    "megabytes": b"x" * 3_000_000,
    "megabytes of words": b"limit would exceed maximum " * 100_000,
    "many lines": b"7|RUNNING|n|1|2|j|r\n" * 20_000,
    "squeue: escapes": f"7|PENDING|n{EVIL}|1|2|demo-0|{EVIL}".encode(),
    "squeue: megabytes": b"7|PENDING|" + b"n" * 1_000_000 + b"|1|2|demo-0|" + b"r" * 1_000_000,
    "squeue: other ids": b"8|RUNNING|n|1|2|demo-0|None\n9|RUNNING|n|1|2|demo-0|None\n7|RUNNING|n|1|2|demo-0|None\n",
    "squeue: ids that are none": (
        "²|RUNNING|n|1|2|demo-0|None\n٧|RUNNING|n|1|2|demo-0|None\n-7|RUNNING|n|²|٣|demo-0|None\n"
    ).encode(),
    "squeue: numbers that are none": "7|RUNNING|n|²|٣|demo-0|None\n".encode(),
    "squeue: huge numbers": b"7|RUNNING|n|"
    + b"9" * 5000
    + b"|"
    + b"9" * 400
    + b"|demo-0|None\n"
    + b"9" * 5000
    + b"|RUNNING|n|1|2|demo-0|r\n",
    "sacct: odd numbers": f"7|FAILED|{'9' * 5000}:1|n|²|2|demo-0\n".encode(),
    "sacct: other ids": b"8|FAILED|1:0|n|1|2|demo-0\n",
    "sbatch: ids that are none": "٧\n²;cluster\nSubmitted batch job ٧\n".encode(),
    "sbatch: a huge id": b"9" * 5000 + b"\n",
    "qsub: ids that are none": "٧.pbs01\n7.pbs\u212a\n7.\x1b[2Ja\n".encode(),
    "qstat: escapes": f"Job Id: 7.pbs\n    job_state = Q\n    comment = {EVIL}\n    exec_host = "
    f"n{EVIL}/0\n    Variable_List = HPCGPU_JOB=demo-0\n\n".encode(),
    "qstat: megabytes": b"Job Id: 7.pbs\n    job_state = Q\n    comment = Not Running: "
    + b"limit " * 300_000
    + b"\n\n",
    "qstat: other ids": b"Job Id: 8.pbs\n    job_state = R\n    Variable_List = HPCGPU_JOB=demo-0\n\nJob "
    b"Id: \xff\n    job_state = R\n\n",
    "qstat: huge numbers": b"Job Id: 7.pbs\n    job_state = F\n    Exit_status = "
    + b"9" * 5000
    + b"\n    stime = Fri Nov 99999999999999999999 21:10:43 9999999999999\n    Resource_List.walltime = "
    + b"9" * 5000
    + b"\n    obittime = Fri Nov 20 99999999999:10:43 2026\n    history_timestamp = "
    + "²".encode()
    + b"\n\n",
    "pbsnodes: huge numbers": b"n\n    queue = q\n    resources_available.ncpus = "
    + b"9" * 5000
    + b"\n    resources_available.ngpus = \xd9\xa7\n\n",
    "sinfo: escapes": f"gpu{EVIL}*|gpu:a100{EVIL}:4|16|64000|{EVIL}|1-00:00:00\n".encode(),
}


class Answers:
    """Makes every command of a queue answer the same."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in (*COMMANDS["slurm"], *COMMANDS["pbs"]):
            script = self.bin / name
            script.write_text(
                f'#!/bin/sh\ncat "{folder}/stdout"\ncat "{folder}/stderr" >&2\nread -r rc < "{folder}/rc"\nexit $rc\n'
            )
            script.chmod(0o755)
        self.folder = folder

    def are(self, stdout: bytes, stderr: bytes = b"", rc: int = 0) -> None:
        for name, content in (("stdout", stdout), ("stderr", stderr), ("rc", f"{rc}\n".encode())):
            (self.folder / name).write_bytes(content)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers(tmp_path)
    monkeypatch.setenv("PATH", str(answers.bin), prepend=os.pathsep)
    return answers


def calls(batch: BatchSystem, script: Path) -> dict[str, Callable[[], object]]:
    job_id = "7" if batch.name == "slurm" else "7.pbs"
    return {
        "check": batch.check,
        "version": batch.version,
        "submit": lambda: batch.submit(script, job_name="demo-0"),
        "poll": lambda: batch.poll([job_id]),
        "ended": lambda: batch.ended([job_id]),
        "cancel": lambda: batch.cancel([job_id]),
        "cancel what waits": lambda: batch.cancel([job_id], only_pending=True),
        "find": lambda: batch.find("demo-0"),
        "draft": lambda: draft(system_registry.system(batch.name)),
    }


def is_harmless(text: str) -> None:
    assert text.isprintable() and len(text) < 5000, text[:500]


def meets_the_promise(what: str, call: Callable[[], object], own: str) -> None:
    try:
        result = call()
    except BatchError as error:
        is_harmless(str(error))
        return
    if what in ("poll", "ended"):
        assert isinstance(result, dict) and set(result) <= {own}, (
            f"{what} answers of jobs that it was not asked for: {list(result)[:5]}"
        )
        for status in result.values():
            assert isinstance(status, JobStatus)
            for text in (status.job_id, status.name, status.reason, status.node, explain(status)):
                is_harmless(text)
    ids = [result] if what == "submit" else result if what == "find" else []
    assert isinstance(ids, list)
    for job_id in ids:
        assert isinstance(job_id, str) and job_id.isascii() and len(job_id) < 200 and job_id[0].isdigit()
    if isinstance(result, str):
        assert all(line.isprintable() for line in result.split("\n"))


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(name, batch, id=f"{name}-{batch.name}")
        for name in ANSWERS
        for batch in BATCHES
        if ":" not in name or name.partition(":")[0] in COMMANDS[batch.name]
    ],
)
def test_an_answer_is_data_whatever_is_in_it(name: str, batch: CommandBatch, answers: Answers, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    own = "7" if batch.name == "slurm" else "7.pbs"
    for stdout, stderr, rc in ((ANSWERS[name], b"", 0), (ANSWERS[name], ANSWERS[name], 0), (b"", ANSWERS[name], 1)):
        answers.are(stdout, stderr, rc)
        for what, call in calls(batch, script).items():
            meets_the_promise(what, call, own)


@pytest.mark.parametrize("batch", BATCHES, ids=["slurm", "pbs"])
def test_answers_that_were_damaged_at_random(batch: CommandBatch, answers: Answers, tmp_path: Path) -> None:
    generator = random.Random(8)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    own = "7" if batch.name == "slurm" else "7.pbs"
    pieces = [answer for answer in ANSWERS.values() if len(answer) < 10_000]
    for _ in range(12):
        damaged = bytearray(b"".join(generator.choices(pieces, k=3)) or b"7")
        for _ in range(generator.randrange(30)):
            damaged[generator.randrange(len(damaged))] = generator.choice(b"\x00\x1b\xff7|.=\n\t ")
        answers.are(
            bytes(damaged), bytes(damaged[: generator.randrange(len(damaged) + 1)]), generator.choice((0, 1, 35, 153))
        )
        for what, call in calls(batch, script).items():
            if what in ("poll", "ended", "submit", "find"):
                meets_the_promise(what, call, own)


def test_nodes_with_numbers_that_cannot_be_are_no_reason_for_a_traceback() -> None:
    nodes = parse_pbsnodes("n\n    queue = q\n    resources_available.ncpus = " + "9" * 400 + "\n\n")
    for select in ("1:ncpus=2", f"{'9' * 5000}:ncpus=2", f"1:ncpus={'9' * 400}"):
        Shortage.of({"queue": "q", "Resource_List.select": select}, nodes)
