"""The scripts of Grid Engine's jobs, as a user gets them from the commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import PLUGIN, Run


def test_a_script_requests_what_the_user_wants(cli: Run, tmp_path: Path) -> None:
    wanted = "--gpus-per-node 2 --cores 8 --memory 64GiB --walltime 2h --queue gpu.q --account proj"
    done = cli("render", "gridengine", *wanted.split(), "-o", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "demo" / "worker.sge").read_text().splitlines()
    assert [line for line in lines if line.startswith("#$")] == [
        "#$ -N demo",
        f'#$ -o "{tmp_path}/demo/logs/$JOB_NAME-$JOB_ID.log"',
        "#$ -j y",
        "#$ -q gpu.q",
        "#$ -P proj",
        "#$ -l h_rt=2:00:00",
        "#$ -pe smp 8",
        "#$ -l gpu=2",
        "#$ -l h_vmem=8192M",
        "#$ -S /bin/bash",
        "#$ -r n",
        "#$ -w e",
    ]
    check_scripts(tmp_path / "demo")


def check_scripts(folder: Path) -> None:
    if shutil.which("shellcheck"):
        scripts = [str(folder / name) for name in ("worker.sge", "scheduler.sge", "launch.sh", "stop.sh")]
        checked = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nodes-per-job 2", "nodes_environment"),
        ("--gpus-counted slot --gpus-per-node 1 --cores 8", "gpus_counted"),
        ("--qos high", "set queue or account"),
        ("--nodes-per-job 2 --nodes-environment mpi1", "needs gpus_counted='slot' or 'node'"),
        ("--node-type node_f --parallel-environment mpi", "parallel_environment='mpi' has no effect beside node_type"),
        ("--node-type node_f --nodes-environment mpi", "nodes_environment='mpi' has no effect beside node_type"),
        ("--node-type node_f --gpus-counted slot", "gpus_counted='slot' has no effect beside node_type='node_f'"),
        ("--node-type node_f --memory-resource s_vmem", "memory_resource='s_vmem' has no effect beside node_type"),
        ("--node-type node_f --gpu-resource ngpus", "gpu_resource='ngpus' has no effect beside node_type"),
    ],
)
def test_what_grid_engine_cannot_serve_is_refused(cli: Run, tmp_path: Path, options: str, words: str) -> None:
    done = cli("render", "gridengine", *options.split(), "-o", str(tmp_path / "demo"))
    assert done.returncode == 2 and words in done.stderr


def test_a_job_of_several_nodes_counts_the_slots_of_all(cli: Run, tmp_path: Path) -> None:
    options = "--nodes-per-job 3 --nodes-environment mpi4 --cores 4 --gpus-per-node 4 --gpus-counted slot"
    done = cli("render", "gridengine", *options.split(), "-o", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "demo" / "worker.sge").read_text()
    assert "#$ -pe mpi4 12\n" in script and "#$ -l gpu=1\n" in script and 'qrsh" -inherit -nostdin' in script


def test_the_types_of_the_options_are_up_to_date(run: Run) -> None:
    made = run("-m", "hpcgpu.configuration.signatures", "gridengine")
    assert made.stdout == (PLUGIN / "hpcgpu_gridengine" / "typed.py").read_text(), made.stderr


@pytest.mark.parametrize("directive", ["-ar 12", "-wd /scratch/ada", "-l gpu_model=a100", "-p -5", "-g tga-demo"])
def test_a_user_s_own_directive_is_written(cli: Run, tmp_path: Path, directive: str) -> None:
    done = cli("render", "gridengine", f"--job-extra-directives={directive}", "-o", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert f"#$ {directive}\n" in (tmp_path / "demo" / "worker.sge").read_text()


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("-hold_jid 7", "hpcgpu sets it"),
        ("-sync y", "waits for its jobs itself"),
        ("-t 1-4", "job array"),
        ("-pe smp 8", "-pe is set by cores"),
        ("-g tga-demo --account tga-demo --account-as group", "-g is set by account"),
    ],
)
def test_a_directive_that_would_break_the_cluster_is_refused(
    cli: Run, tmp_path: Path, directive: str, words: str
) -> None:
    directive, *more = directive.split(" --")
    options = (f"--job-extra-directives={directive}", "--cores", "4", "-o", str(tmp_path / "demo"))
    options += tuple(word for option in more for word in f"--{option}".split())
    done = cli("render", "gridengine", *options)
    assert done.returncode == 2 and words in done.stderr


def test_its_page_lists_its_options_and_shows_its_scripts(run: Run, tmp_path: Path) -> None:
    trees = str(tmp_path / "trees")
    done = run("-m", "sphinx", "-nWq", "-b", "text", "-d", trees, str(PLUGIN / "docs"), str(tmp_path / "pages"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "pages" / "index.txt").read_text()
    for option in ("parallel_environment", "gpu_resource", "gpus_counted", "memory_resource", "nodes_environment"):
        assert f'"{option}"' in page
    assert "#$ -l gpu=2" in page and "#$ -pe smp 8" in page and "#$ -pe mpi8 16" in page


def test_the_profile_of_tsubame_4_gives_golden_scripts(cli: Run, tmp_path: Path) -> None:
    assert "tsubame4" in cli("profiles", "list").stdout
    shown = yaml.safe_load(cli("profiles", "show", "tsubame4").stdout)
    assert shown["source"].startswith("https://") and "Not tried on the machine" in shown["notes"]
    given = ("--profile", "tsubame4", "--walltime", "2h", "-o", str(tmp_path / "demo"))
    done = cli("render", "gridengine", *given)
    assert done.returncode == 2 and "profile 'tsubame4' needs account" in done.stderr
    done = cli("render", "gridengine", *given, "--account", "tga-demo")
    assert done.returncode == 0, done.stderr
    for kind in ("scheduler", "worker"):
        script = (tmp_path / "demo" / f"{kind}.sge").read_text().replace(str(tmp_path), "/home/me")
        head = script.partition("\n\n")[0] + "\n"
        golden = Path(__file__).parent / "golden" / f"tsubame4-{kind}.sge"
        if "HPCGPU_UPDATE_GOLDEN" in os.environ:
            golden.write_text(head)
        assert head == golden.read_text()
    check_scripts(tmp_path / "demo")


def test_a_job_of_several_nodes_has_as_many_of_their_type(cli: Run, tmp_path: Path) -> None:
    options = "--nodes-per-job 2 --node-type node_f --cores 192 --memory 700GB --gpus-per-node 4"
    done = cli("render", "gridengine", *options.split(), "-o", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "demo" / "worker.sge").read_text()
    assert [line for line in script.splitlines() if line.startswith(("#$ -l", "#$ -pe"))] == ["#$ -l node_f=2"]
    assert "# node_f is all that it requests of a node; the memory that you gave is for Dask alone.\n" in script
