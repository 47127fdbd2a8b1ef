"""Scripts that stand alone, on a real Slurm: by their own commands and by plain `sbatch`."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bed import SlurmBed

import hpcgpu
from hpcgpu import SlurmGPUCluster
from hpcgpu.scripts.bundle import make, make_single
from tests.slurm.helpers import A100, run_script
from tests.slurm.strangers import REFUSED, TRY_STRANGERS, other_clusters

pytestmark = pytest.mark.shows("Scripts that stand alone")

Until = Callable[..., None]

SMALL: dict[str, Any] = {k: v for k, v in A100.items() if k not in ("quiet",)} | {
    "gpus_per_node": 2,
    "cores": 1,
    "memory": "1GB",
}
ONE: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("scheduler", "gpu_type")} | {
    "queue": "gpu",
    "walltime": "10m",
}


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=250, cwd="/")


def empty(bed: SlurmBed) -> bool:
    return [job for job in bed.squeue() if job.state != "COMPLETING"] == []


#: What a shell may have for other programs: with it, squeue shows none of our jobs, and scancel cancels few.
OF_A_SHELL = {
    "SBATCH_PARTITION": "urgent",
    "SCANCEL_STATE": "SUSPENDED",
    "SQUEUE_PARTITION": "urgent",
    "SQUEUE_STATES": "COMPLETED",
}


def test_launch_three_jobs_connect_by_the_contact_file_and_stop(
    bed: SlurmBed, home: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OF_A_SHELL.items():
        monkeypatch.setenv(name, value)
    directory = make("slurm", SMALL, home / "demo").path
    done = run(str(directory / "launch.sh"), "3")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "scheduler",
        *["worker"] * 3,
        "Logs:",
        "Connect:",
        "End",
    ]
    with hpcgpu.connect(directory, quiet=True) as client:
        client.wait_for_workers(6)
        assert client.gather(client.map(lambda x: x + 1, range(20))) == list(range(1, 21))
        assert run(str(directory / "launch.sh"), "1").returncode == 0
        client.wait_for_workers(8)
    with SlurmGPUCluster.from_name(directory, shutdown_on_close=False) as cluster:
        cluster.scale(jobs=1)
        cluster.settle()
    until(lambda: len([job for job in bed.squeue() if job.state != "COMPLETING"]) == 2, "three jobs were given up")
    done = run(str(directory / "stop.sh"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "No job of demo is left."), done.stderr
    assert empty(bed)


def test_an_interrupted_launch_leaves_no_job(bed: SlurmBed, home: Path, until: Until) -> None:
    directory = make("slurm", SMALL, home / "half").path
    launch = subprocess.Popen(
        [str(directory / "launch.sh"), "500"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: len(bed.squeue()) >= 2, "the first jobs are submitted")
    launch.send_signal(signal.SIGINT)
    _, words = launch.communicate(timeout=250)
    assert launch.returncode == 130 and "interrupted; what it submitted is cancelled" in words
    bed.wait_empty()
    assert empty(bed)


PROGRAM = """
import os, sys
from distributed import Client
with Client() as client:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    print("answer", client.submit(sum, [1, 2, 3]).result(), "workers", len(workers), flush=True)
    print("schemes", sorted({{address.split(":")[0] for address in (*workers, client.scheduler.address)}}), flush=True)
    {rest}
"""


def single(home: Path, name: str, rest: str, **options: Any) -> Path:
    """Write a script whose program computes on four workers of two nodes, then does the rest."""
    (home / f"{name}.py").write_text(PROGRAM.format(rest=rest))
    return make_single(
        "slurm",
        ONE | {"nodes_per_job": 2} | options,
        home / name,
        [options.get("python", _python()), str(home / f"{name}.py")],
    )


def _python() -> str:
    import sys

    return sys.executable


def log(script: Path) -> str:
    [path] = script.parent.glob("*.log")
    return path.read_text(errors="replace")


@pytest.mark.parametrize(
    ("protocol", "security", "code"), [("tcp", True, 0), ("ucx", True, 7), ("tcp", "authenticated", 0)]
)
def test_a_single_job_ends_with_the_program_s_exit_code(
    bed: SlurmBed, home: Path, protocol: str, security: bool | str, code: int
) -> None:
    strangers = TRY_STRANGERS.format(address="client.scheduler.address", others=list(map(str, other_clusters(home))))
    script = single(home, "train", f"{strangers}; sys.exit({code})", protocol=protocol, security=security)
    assert run_script(script) == code, log(script)
    assert "answer 6 workers 4\n" in log(script) and REFUSED in log(script)
    assert "schemes ['authenticated']" in log(script) or security is True
    [directory] = [path for path in script.parent.iterdir() if path.is_dir()]
    assert "Traceback" not in log(script) and "srun" not in log(script) and "distributed" not in log(script)
    said = f"hpcgpu: the program ended with exit code {code}; scheduler and workers wrote to {directory}/logs\n"
    assert log(script).endswith(said) and len(log(script).splitlines()) <= 6, log(script)
    assert {path.name for path in (directory / "logs").iterdir()} == {"scheduler.log", "workers.log"}
    assert not (directory / "tls").exists() and not (directory / "contact.json").exists()
    assert empty(bed)


def test_a_single_job_whose_workers_die_ends_its_program(bed: SlurmBed, home: Path) -> None:
    script = single(home, "dies", "client.shutdown(); import time; time.sleep(1000)")
    assert run_script(script) == 1
    assert "ended: the program was stopped too" in log(script)


def test_a_single_job_without_workers_fails_and_reports_why(bed: SlurmBed, home: Path) -> None:
    script = single(home, "none", "", worker_extra_args=["--no-such-option"])
    assert run_script(script) == 1
    assert "the workers ended too early: the program was not started. The end of " in log(script)
    assert "logs/workers.log:" in log(script) and "--no-such-option" in log(script)


def test_a_single_job_at_its_walltime_ends_its_program_first(bed: SlurmBed, home: Path, until: Until) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), "
        "sys.exit(0))); print('ready', flush=True); time.sleep(1000)"
    )
    script = single(home, "slow", program)
    job = run("sbatch", "--parsable", str(script)).stdout.strip()
    until(lambda: list(script.parent.glob("*.log")) and "ready" in log(script), "the program runs", timeout=250)
    run("scancel", "--signal=USR1", "--batch", job)  # as Slurm does 60 s before the end, by --signal
    until(lambda: empty(bed), "all is torn down", timeout=250)
    assert "saved" in log(
        script
    ) and "SIGUSR1 arrived, at the end of the walltime or from scancel: the program was stopped" in log(script)
    assert "#SBATCH --signal=B:USR1@60" in script.read_text()


#: Computes until Slurm has warned, and until the time when the workers of a job of a cluster would long have retired.
COMPUTES = """
    import signal, subprocess, time
    warned = []
    signal.signal(signal.SIGTERM, lambda *_: warned.append(time.time()))
    asks = "SLURM_TIME_FORMAT=%s squeue --noheader --jobs=$SLURM_JOB_ID --format=%e"
    end = int(subprocess.run(asks, shell=True, check=True, capture_output=True).stdout)
    while not warned or time.time() < end - 25:
        client.submit(time.sleep, 0.2, pure=False).result()
        open("computed", "a").write(f"{end - time.time():.1f}\\n")
    print(f"warned {end - warned[0]:.0f} s before the end", flush=True)
"""


def test_the_workers_of_a_single_job_compute_to_its_end(bed: SlurmBed, home: Path) -> None:
    """Elsewhere workers leave half of `walltime_margin` before the end. Slurm sends its signal up to 30 s too early."""
    script = single(home, "long", COMPUTES.strip(), walltime="2m", walltime_margin="1m")
    assert run_script(script, "--signal=B:USR1@12", f"--chdir={home}") == 128 + signal.SIGUSR1, log(script)
    assert "SIGUSR1 arrived, at the end of the walltime or from scancel: the program was stopped" in log(script)
    found = re.search(r"warned (\d+) s before the end", log(script))
    assert found and 10 <= int(found[1]) <= 45, log(script)
    computed = [float(line) for line in (home / "computed").read_text().splitlines()]
    assert computed[-1] < 26, "its results are there, to the last"
    [directory] = [path for path in script.parent.iterdir() if path.is_dir()]
    assert "retire" not in (directory / "logs" / "workers.log").read_text()
