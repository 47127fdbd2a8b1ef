"""What is reported fits what happened: the job that it is about, the kind of fault, who did it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import explain
from hpcgpu.batch.scrub_environment import clean_environment
from hpcgpu.batch.slurm.reasons import REASONS
from hpcgpu.cli.status import _print
from hpcgpu.client import connect
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.posix import checked_files
from hpcgpu.posix.full_disk import cannot_be_written
from hpcgpu.runtime.scheduler_connection import no_answer, unreachable
from hpcgpu.store.contact import Contact


def test_a_scheduler_job_that_needs_more_memory_is_shown_its_own_option() -> None:
    killed = JobStatus(job_id="7", state=JobState.OUT_OF_MEMORY, name="", reason="")
    assert explain(killed).endswith("increase `memory`")
    assert explain(killed, kind="scheduler").endswith("increase `scheduler={'memory': ...}`")


def test_options_that_the_scheduler_job_inherits_keep_their_name() -> None:
    late = JobStatus(job_id="7", state=JobState.PENDING, name="", reason="PartitionTimeLimit", words=REASONS)
    assert explain(late, kind="scheduler") == explain(late) and "`walltime`" in explain(late)


def test_too_many_gpus_per_node_are_among_what_is_to_be_checked() -> None:
    words = REASONS.pending("BadConstraints")
    assert words is not None and "`gpus_per_node`" in words[1]
    refused = [hint for pattern, hint in REASONS.refused if "node configuration" in pattern]
    assert refused and "`gpus_per_node`" in refused[0]


@pytest.mark.parametrize("error", [TimeoutError(), OSError(), ConnectionResetError()])
def test_an_error_without_words_still_reports_something(error: OSError) -> None:
    assert no_answer(error).strip()


def test_a_scheduler_that_hangs_is_named_as_a_possible_cause() -> None:
    assert "stopped or stuck" in no_answer(TimeoutError())
    for late in (TimeoutError("after 3 s"), OSError("Timed out trying to connect to tls://n1:8786 after 30 s")):
        assert no_answer(late).startswith(f"{late}. Its process may be stopped or stuck")


def test_a_file_that_cannot_be_read_is_not_a_scheduler_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        checked_files.read(tmp_path / "ucx.key")
    assert unreachable("its scheduler", missing.value) == f"{tmp_path}/ucx.key: No such file or directory"
    assert unreachable("its scheduler", ConnectionRefusedError(111, "refused")).startswith(
        "its scheduler does not answer"
    )


def test_who_connects_to_a_scheduler_that_hangs_reads_that() -> None:
    contact = Contact(token="t", job_id="7", workers="tls://n1:1", client="tls://n1:1")
    assert "may be stopped or stuck" in connect._words(None, contact)
    lost = JobStatus(job_id="7", state=JobState.RUNNING, out_of_reach=True, reason="no contact since 14:00")
    words = "scheduler job 7 running: the batch system has lost contact with its node"
    assert connect._words(lost, contact).startswith(words) and "[no contact since 14:00]" in connect._words(lost)


@pytest.mark.parametrize(
    ("state", "words"), [("unreachable", "scheduler  does not answer"), ("waiting", "scheduler  not running")]
)
def test_status_does_not_report_that_a_silent_scheduler_is_not_running(
    capsys: pytest.CaptureFixture[str], state: str, words: str
) -> None:
    _print(Snapshot(time=0.0, name="demo", system="local", directory="/d", state=state), False, "demo")
    assert words in capsys.readouterr().out


def test_status_does_not_report_that_a_cluster_continues_which_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    for state in ("running", "ended"):
        _print(
            Snapshot(time=0.0, name="demo", system="local", directory="/d", state=state, detached=True), False, "demo"
        )
    running, ended = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cluster")]
    assert "continues without the program that started it" in running and ended == "cluster    demo on local: ended"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOENT, errno.EMFILE])
def test_only_a_lack_of_space_is_answered_by_making_room(number: int) -> None:
    assert "room" not in cannot_be_written("/d", OSError(number, os.strerror(number))) != ""
    for full in (errno.ENOSPC, errno.EDQUOT):
        assert "Make room there" in cannot_be_written("/d", OSError(full, os.strerror(full)))


def test_a_command_whose_output_finds_no_room_names_what_to_do() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "hpcgpu", "profiles", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (1, "Error: No space left on device. Make room there\n")


@pytest.mark.parametrize(
    "name",
    ["SINFO_PARTITION", "SCONTROL_FUTURE", "SPRIO_FORMAT", "SQUEUE_SORT", "SLURM_CLUSTERS", "PBS_SHELL", "QSTATRCHOME"],
)
def test_variables_that_change_answers_do_not_reach_the_commands(name: str, tmp_path: Path) -> None:
    kept = {"PBS_DEFAULT": "server", "SLURM_CONF": str(tmp_path / "slurm.conf"), "SLURM_CONF_SERVER": "c1", "LANG": "C"}
    assert clean_environment({name: "x", **kept}) == kept


@pytest.mark.parametrize(("first", "second"), [("project", "account"), ("account", "project")])
def test_two_names_of_one_option_are_both_named(first: str, second: str) -> None:
    with pytest.raises(OptionError, match=f"^{first} and {second} mean the same"):
        resolve("slurm", {first: "m1", second: "m2"})


def test_commands_name_a_cluster_as_the_user_did(capsys: pytest.CaptureFixture[str]) -> None:
    there = Snapshot(time=0.0, name="demo", system="local", directory="/d", state="running", dashboard="http://n:1")
    _print(there, False, "'/my scratch/demo'")
    assert "hpcgpu dashboard '/my scratch/demo')" in capsys.readouterr().out
