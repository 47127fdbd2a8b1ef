"""The scripts of HTCondor's jobs, as a user gets them from the commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from htcondor_bed import Run

PLUGIN = Path(__file__).parents[1]


def commands(script: Path) -> list[str]:
    return [line for line in script.read_text().splitlines() if line.startswith("#HTCONDOR")]


def test_a_description_requests_what_the_user_wants(cli: Run, tmp_path: Path) -> None:
    wanted = (
        "--gpus-per-node 2 --cores 8 --memory 64GiB --walltime 2h --account proj --gpu-type a100 "
        "--gpus-minimum-capability 8 --gpus-minimum-memory 40GiB --concurrency-limits licence:2"
    )
    done = cli(
        *("render", "htcondor", *wanted.split(), "--requirements", 'Site == "x" || Fast', "-o", str(tmp_path / "demo")),
        *("--job-extra-directives", "Rank = Memory", "--job-extra-directives", '+Project = "p $(x)"'),
    )
    assert done.returncode == 0, done.stderr
    script = tmp_path / "demo" / "worker.condor"
    assert commands(script) == [
        "#HTCONDOR batch_name = demo",
        "#HTCONDOR executable = /bin/bash",
        f"#HTCONDOR arguments = \"'{script}'\"",
        f'#HTCONDOR +hpcgpuscript = "{script}"',
        f"#HTCONDOR output = {tmp_path}/demo/logs/$(batch_name)-$(ClusterId).log",
        f"#HTCONDOR error = {tmp_path}/demo/logs/$(batch_name)-$(ClusterId).log",
        "#HTCONDOR should_transfer_files = NO",
        "#HTCONDOR transfer_executable = false",
        "#HTCONDOR getenv = HOME, LANG, LOGNAME, PATH, USER",
        '#HTCONDOR environment = "HPCGPU_JOB_ID=$(ClusterId) HPCGPU_JOB_NAME=$(batch_name)"',
        "#HTCONDOR accounting_group = proj",
        "#HTCONDOR allowed_job_duration = 7200",
        "#HTCONDOR request_cpus = 8",
        "#HTCONDOR request_memory = 65536",
        "#HTCONDOR request_gpus = 2",
        '#HTCONDOR require_gpus = regexp("a100", DeviceName, "i")',
        "#HTCONDOR gpus_minimum_capability = 8.0",
        "#HTCONDOR gpus_minimum_memory = 40960",
        "#HTCONDOR concurrency_limits = licence:2",
        '#HTCONDOR requirements = (Site == "x" || Fast) && (NumShadowStarts ?: 0) == 0',
        "#HTCONDOR periodic_remove = (NumShadowStarts ?: 0) > 0 && (JobStatus == 1 || JobStatus == 5)",
        "#HTCONDOR rank = Memory",
        '#HTCONDOR +project = "p $(x)"',
    ]
    if shutil.which("shellcheck"):
        names = ("worker.condor", "scheduler.condor", "launch.sh", "stop.sh")
        checked = subprocess.run(
            ["shellcheck", *(str(tmp_path / "demo" / name) for name in names)], capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout


def test_a_site_s_own_command_holds_the_walltime(cli: Run, tmp_path: Path) -> None:
    done = cli(
        *("render", "htcondor", "--walltime", "1h", "--walltime-command", "+MaxRuntime", "-o", str(tmp_path / "demo"))
    )
    assert done.returncode == 0, done.stderr
    assert "#HTCONDOR +maxruntime = 3600" in commands(tmp_path / "demo" / "worker.condor")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes-per-job", "2"), "has one node"),
        (("--queue", "gpu"), "has no queues"),
        (("--qos", "high"), "set account"),
        (("--gpus-minimum-capability", "a100"), "not a compute capability"),
        (("--job-extra-directives", "--exclusive"), "not an assignment"),
        (("--job-extra-directives", "x = 1\\"), "not an assignment"),
        (("--job-extra-directives", "queue = 3"), "cannot be a job array"),
        (("--job-extra-directives", "Request_GPUs = 3"), "is set by gpus_per_node"),
        (("--job-extra-directives", "+HpcgpuScript = 3"), "is set by hpcgpu"),
    ],
)
def test_what_htcondor_cannot_serve_is_refused(cli: Run, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = cli("render", "htcondor", *options, "-o", str(tmp_path / "demo"))
    assert done.returncode == 2 and words in done.stderr


def test_a_command_of_the_description_can_be_left_out(cli: Run, tmp_path: Path) -> None:
    skipped = ("--job-directives-skip", "should_transfer_files")
    done = cli("render", "htcondor", *skipped, "-o", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert "should_transfer" not in "".join(commands(tmp_path / "demo" / "worker.condor"))


def test_the_types_of_htcondor_s_options_are_up_to_date(run: Run) -> None:
    made = run("-m", "hpcgpu.configuration.signatures", "htcondor")
    assert made.stdout == (PLUGIN / "hpcgpu_htcondor" / "typed.py").read_text(), made.stderr


def test_its_page_lists_its_options_and_shows_its_script(run: Run, tmp_path: Path) -> None:
    trees = str(tmp_path / "trees")
    done = run("-m", "sphinx", "-nWq", "-b", "text", "-d", trees, str(PLUGIN / "docs"), str(tmp_path / "pages"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "pages" / "index.txt").read_text()
    for option in ("requirements", "gpus_minimum_capability", "gpus_minimum_memory", "concurrency_limits"):
        assert f'"{option}"' in page
    assert '"walltime_command"' in page and "#HTCONDOR request_gpus = 2" in page
