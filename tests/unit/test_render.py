"""Scripts that stand alone: what is written, and what is refused."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.batch.pbs.names import pbs_name
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.scripts.bundle import make, make_single
from hpcgpu.scripts.render import render_bundle, render_single
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.saved_options import read
from tests.helpers import golden

PLACE = Path("/home/me/clusters/demo")
OPTIONS: dict[str, Any] = {
    "name": "demo",
    "cluster_directory": str(PLACE.parent),
    "python": "/opt/env/bin/python",
    "shutdown_on_close": False,
    "lease": 0,
    "idle_timeout": 3600,
    "gpus_per_node": 4,
    "walltime": "2h",
}


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_the_scripts_that_launch_and_stop(system: str) -> None:
    files = render_bundle(system, resolve(system, OPTIONS), PLACE)
    assert set(files) == {
        "launch.sh",
        "stop.sh",
        "README",
        *(f"{k}.{'sbatch' if system == 'slurm' else 'pbs'}" for k in ("scheduler", "worker")),
    }
    for name in ("launch.sh", "stop.sh"):
        golden(f"{system}-{name}", files[name])
    assert "/home/me/clusters/demo" in files["README"]


def test_the_script_of_a_single_job() -> None:
    options = resolve("slurm", OPTIONS | {"nodes_per_job": 4, "cores": 8, "log_directory": "/home/me/train"})
    golden(
        "slurm-single.sbatch",
        render_single("slurm", options, Path("/home/me/train/train"), ["python", "train.py", "--name", "it's 100%"]),
    )


@pytest.mark.parametrize("name", ["demo", "a.cluster-with-a-long-name", "1st", "ends-"])
@pytest.mark.parametrize("end", ["-0", "-12", "-scheduler"])
def test_launch_sh_shortens_names_for_pbs_as_the_cluster_does(name: str, end: str, tmp_path: Path) -> None:
    files = render_bundle("pbs", resolve("pbs", OPTIONS | {"name": name}), PLACE)
    function = files["launch.sh"][files["launch.sh"].index("short_name() {") :].split("\n}\n")[0] + "\n}\n"
    done = subprocess.run(
        ["bash", "-uc", f"name={name}\n{function}short_name {name}{end}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == pbs_name(f"{name}{end}")


def test_values_are_quoted_in_every_script(tmp_path: Path) -> None:
    place = tmp_path / "it's a $(touch pwned) place" / "demo"
    directory = make("slurm", {"gpus_per_node": 1, "env": {"X": "$(touch pwned)"}}, place)
    for name in ("launch.sh", "stop.sh", "scheduler.sbatch", "worker.sbatch"):
        subprocess.run(["bash", "-n", str(directory.path / name)], check=True)
    done = subprocess.run([str(place / "launch.sh"), "none"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "launch.sh: 'none' is not a number of worker jobs: write a whole number, such as 3\n",
    )
    assert not (tmp_path / "pwned").exists()


def test_scripts_that_were_moved_or_have_no_credentials_any_more_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\ntouch submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def fails(directory: Path, name: str) -> str:
        done = subprocess.run([str(directory / name)], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and not (tmp_path / "submitted").exists()
        return done.stderr

    moved = make("slurm", {"gpus_per_node": 1}, tmp_path / "demo").path.rename(tmp_path / "moved")
    assert "moved" in fails(moved, "launch.sh") and "moved" in fails(moved, "stop.sh")
    ended = make("slurm", {"gpus_per_node": 1}, tmp_path / "ended")
    ended.remove_secrets()
    assert "its credentials were removed" in fails(ended.path, "launch.sh")


#: A queue that gives the next number as the id, waits for the interrupt at the 100th, and notes cancelled jobs.
_SBATCH = """#!/bin/sh
echo >> submitted
jobs=$(wc -l < submitted)
while [ "$jobs" -ge 100 ] && [ ! -e interrupted ]; do sleep 0.05; done
echo "$jobs"
"""
_SCANCEL = """#!/bin/sh
echo "$@" > cancelled
"""


@pytest.mark.parametrize("after", range(2, 20, 3))
def test_an_interrupt_at_any_moment_of_a_launch_cancels_what_it_submitted(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    for name, text in (("sbatch", _SBATCH), ("scancel", _SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    directory = make("slurm", {"gpus_per_node": 1}, tmp_path / "demo").path
    launch = subprocess.Popen(
        [str(directory / "launch.sh"), "500"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    submitted = tmp_path / "submitted"
    until(lambda: submitted.exists() and len(submitted.read_text()) >= after, f"{after} jobs are submitted")
    launch.send_signal(signal.SIGINT)
    (tmp_path / "interrupted").touch()
    _, message = launch.communicate(timeout=100)
    assert (launch.returncode, "what it submitted is cancelled" in message) == (130, True), message
    jobs = len(submitted.read_text())
    assert jobs < 501 and (tmp_path / "cancelled").read_text().split() == [str(job + 1) for job in range(jobs)]


def test_a_job_whose_id_cannot_be_written_into_the_journal_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make("slurm", {"gpus_per_node": 1}, tmp_path / "demo").path
    journal = directory / "journal.jsonl"
    for name, text in (("sbatch", f"#!/bin/sh\nrm {journal} && mkdir {journal} && echo 17\n"), ("scancel", _SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = subprocess.run([str(directory / "launch.sh")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "job 17 (demo-scheduler) is cancelled: its id could not be written" in done.stderr
    assert (tmp_path / "cancelled").read_text() == "17\n", "nobody would know of it"


def test_a_bundle_is_a_cluster_directory_that_nobody_else_reads(tmp_path: Path) -> None:
    directory = make("pbs", {"gpus_per_node": 2, "queue": "gpu"}, tmp_path / "demo")
    assert directory.system == "pbs" and directory.detached and not directory.closed
    assert read(directory).options.worker.queue == "gpu" and read(directory).options.cluster.idle_timeout == 3600
    assert {oct(path.stat().st_mode & 0o077) for path in [directory.path, *directory.path.rglob("*")]} == {"0o0"}
    (directory.path / "train.py").write_text("mine")
    again = make("pbs", {"gpus_per_node": 4}, tmp_path / "demo")
    assert read(again).options.worker.gpus_per_node == 4, "one that was never launched is written anew"
    [aside] = tmp_path.glob("demo~*")
    assert (aside / "train.py").read_text() == "mine" and not (aside / "tls").exists(), (
        "and kept aside, without its credentials"
    )
    (again.logs / "demo-scheduler-7.log").touch()
    with pytest.raises(OptionError, match="were launched before"):  # by hand
        make("pbs", {}, tmp_path / "demo")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(OptionError, match="already exists and is not a cluster directory"):
        make("slurm", {}, tmp_path / "mine")
    directory = make("slurm", {}, tmp_path / "run")
    ClusterDirectory(directory.path).intend("run-scheduler", "scheduler")
    with pytest.raises(OptionError, match="were launched before, and their journal and logs are kept"):
        make("slurm", {}, tmp_path / "run")
    made = make_single("slurm", {"env": {"KEY": "secret"}}, tmp_path / "train", ["true"])
    assert made.stat().st_mode & 0o777 == 0o700, "its variables are nobody else's"
    with pytest.raises(OptionError, match=r"train\.sbatch already exists: remove it"):
        make_single("slurm", {}, tmp_path / "train", ["true"])


def test_a_system_without_such_scripts_and_a_path_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no scripts that start a cluster without Python"):
        make("local", {}, tmp_path / "demo")
    with pytest.raises(OptionError, match="scheduler='local' is not needed with a single job"):
        make_single("slurm", {"scheduler": "local"}, tmp_path / "demo", ["true"])
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="file already exists and is not a cluster directory"):
        make("slurm", {}, tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheduler": "local"}, "need a scheduler job"),
        ({"on_scheduler_end": "restart"}, "no program manages their cluster and submits another scheduler job"),
        ({"jobs": 3}, "give the number of worker jobs to launch.sh"),
        ({"cores": 0}, "cores"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        make("slurm", arguments, tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
