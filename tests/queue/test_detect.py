"""One function decides which batch system a machine has: the one that answers, not the one whose commands are
installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_pbs import Site as PBSSite
from fake_slurm import Site

from hpcgpu.batch import slurm
from hpcgpu.batch.detect import Detected, detect
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.batch.slurm.client import Slurm
from hpcgpu.cli.start_and_run import chosen_system
from hpcgpu.errors import BatchError, BatchUnavailable
from tests.conftest import live

#: What Slurm's commands print where they are installed and no controller is known [probe].
NO_CONTROLLER = (
    "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsqueue: error: fetch_config: DNS SRV "
    "lookup failed\n"
    "squeue: error: _establish_config_source: failed to fetch config\nsqueue: fatal: Could not establish a "
    "configuration source\n"
)


def silence(site: Site) -> None:
    for command in ("sbatch", "squeue"):
        site.fault(command, stdout="", stderr=NO_CONTROLLER.replace("squeue", command), rc=1, always=True)


def test_a_slurm_that_answers_is_taken(site: Site) -> None:
    assert detect() == Detected(slurm.system, [])
    assert chosen_system("auto") == "slurm"


def test_a_slurm_that_is_only_installed_is_reported_and_a_pbs_that_answers_is_taken(
    pbs: PBSSite, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    silence(site)
    assert chosen_system("auto") == "pbs"
    assert "`sbatch` is installed, but Slurm cannot be used: `squeue` failed" in capsys.readouterr().err


def test_where_a_package_supports_the_batch_system_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condor_submit = tmp_path / "condor_submit"
    condor_submit.write_text("#!/bin/sh\n")
    condor_submit.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hpcgpu.batch.detect.names", lambda: ["local", "pbs", "slurm"])
    words = "`condor_submit` is here, but hpcgpu does not know its batch system: for htcondor, run: pip install hpcgpu-"
    with pytest.raises(BatchError, match=re.escape(words)):
        chosen_system("auto")
    monkeypatch.setattr("hpcgpu.batch.detect.names", lambda: ["htcondor", "local", "pbs", "slurm"])
    assert not detect().silent


def test_when_none_answers_each_is_named_with_its_words_and_the_way_out(pbs: PBSSite, site: Site) -> None:
    silence(site)
    pbs.set(down=True)
    with pytest.raises(BatchError) as caught:
        chosen_system("auto")
    for words in (
        "`sbatch` is installed",
        "DNS SRV lookup failed",
        "`qsub` is installed",
        "cannot connect to server",
        "--system local",
    ):
        assert words in str(caught.value)


def test_where_nothing_is_installed_the_embedded_queue_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chosen_system("auto") == "local"
    assert "the queue embedded in hpcgpu" in capsys.readouterr().err


def test_what_was_asked_for_is_taken_without_a_question(site: Site) -> None:
    silence(site)
    assert chosen_system("slurm") == "slurm"
    assert chosen_system("local") == "local"
    assert not site.calls("squeue")


def test_a_slurm_of_which_a_command_is_missing_is_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.remove("scancel", monkeypatch)
    [sentence] = detect().silent
    assert "`scancel` was not found" in sentence


def test_start_does_not_take_a_slurm_that_does_not_answer(site: Site, queue: LocalQueue, home: Path) -> None:
    silence(site)
    done = subprocess.run(
        [sys.executable, "-m", "hpcgpu", "start", "lost"], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert done.returncode == 1
    assert "Slurm cannot be used" in done.stderr and "--system local" in done.stderr
    assert not site.calls("sbatch") and not live(queue) and not (home / "clusters" / "lost").exists()


@pytest.mark.parametrize(
    "words",
    [
        NO_CONTROLLER.replace("squeue", "sbatch"),
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
        "sbatch: error: s_p_parse_file: unable to status file /etc/slurm/slurm.conf: No such file or directory, "
        "retrying in 1sec up to 60sec\n",
        "sbatch: error: If munged is up, restart with --num-threads=10\nsbatch: error: "
        'Munge encode failed: Failed to access "/run/munge/munge.'
        'socket.2": No such file or directory\nsbatch: error: Batch job submission '
        "failed: Invalid authentication credential\n",
        "sbatch: error: Batch job submission failed: Protocol authentication error\n",
        "sbatch: error: get_addr_info: getaddrinfo() failed: Name or service not "
        'known\nsbatch: error: Unable to resolve "slurmctl"\n',
        "sbatch: error: slurm_persist_conn_open_without_init: failed to open persistent connection: No route to host\n",
    ],
    ids=lambda words: words.splitlines()[-1][-50:],
)
def test_a_controller_that_cannot_be_reached_has_not_refused_the_job(slurm: Slurm, site: Site, words: str) -> None:
    site.fault("sbatch", stdout="", stderr=words, rc=1, lost=True, always=True)
    with pytest.raises(BatchUnavailable, match=r"Slurm did not accept job 'ada-w1'"):
        slurm.submit(site.script, job_name="ada-w1")
    assert len(site.calls("sbatch")) == 4


@pytest.mark.parametrize(
    "words", ["Unable to open file job.sbatch", "Requested node configuration is not available", "Invalid account"]
)
def test_a_refusal_is_not_taken_for_a_controller_that_is_away(slurm: Slurm, site: Site, words: str) -> None:
    site.fault("sbatch", stdout="", stderr=f"sbatch: error: {words}\n", rc=1, lost=True)
    with pytest.raises(BatchError, match=f"Slurm refused job 'ada-w1': .*{words}"):
        slurm.submit(site.script, job_name="ada-w1")
