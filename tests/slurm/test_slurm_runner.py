"""A cluster of the tasks of one job step, on a real Slurm with real `dask cuda worker`s on pretended GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bed import SlurmBed

from tests.slurm.helpers import run_script
from tests.slurm.strangers import REFUSED, TRY_STRANGERS, other_clusters

pytestmark = pytest.mark.shows("`SlurmGPURunner`")

Until = Callable[..., None]

PROGRAM = """
import os, sys
import hpcgpu
from distributed import Client

with hpcgpu.SlurmGPURunner(protocol={protocol!r}, security={security!r}, quiet=True, **{more!r}) as cluster:
    with Client(cluster) as client:
        client.wait_for_workers({workers})
        workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        print("schemes", sorted({{address.split(":")[0] for address in workers}}), flush=True)
        visible = lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        first = client.run(lambda: (os.environ.get("SLURM_NODEID"), visible()))
        print("gpus", sorted(first.values()), flush=True)
        print("names", len({{worker["name"] for worker in workers.values()}}), "workers", cluster.n_workers, flush=True)
        futures = client.map(lambda x: x + 1, range(100))
        print("answer", client.submit(sum, futures).result(), flush=True)
        {rest}
"""


def srun(home: Path, tasks: str, *, gpus: int, nodes: int, **program: Any) -> tuple[int, str]:
    """Run the program by srun in a job of its own; return exit code and output."""
    (home / "program.py").write_text(
        PROGRAM.format(**{"protocol": "tcp", "security": True, "more": {}, "rest": "", **program})
    )
    script = home / "job.sh"
    gres = f"#SBATCH --gres=gpu:{gpus}\n" if gpus else ""
    script.write_text(
        f"#!/bin/bash\n#SBATCH -p gpu\n#SBATCH -N {nodes}\n#SBATCH --ntasks-per-node=6\n{gres}#SBATCH -t 10\n#SBATCH "
        f"-o {home}/out.log\n"
        f"srun {tasks} {sys.executable} {home}/program.py\n"
    )
    return run_script(script), (home / "out.log").read_text(errors="replace")


def left(bed: SlurmBed, home: Path) -> list[str]:
    """What is left of a run: jobs, credentials, contacts."""
    jobs = [str(job) for job in bed.squeue() if job.state != "COMPLETING"]
    return jobs + [str(path) for pattern in ("*/tls", "*/contact.json") for path in (home / "clusters").glob(pattern)]


#: Holds all workers, and shows the ranks.
HOLD = (
    "with hpcgpu.hold(client, {workers}, quiet=True) as held: "
    "print('held', held.run(lambda: os.environ['RANK']), [worker.local_rank for worker in held], flush=True)"
)
#: Uploads a package, and shows what it has on each worker.
UPLOAD = (
    "; print('uploaded', hpcgpu.upload_package(client, {package!r}), "
    "[*client.run(lambda: __import__('own_runner').VALUE).values()], flush=True)"
)


@pytest.mark.parametrize(("protocol", "gpus"), [("tcp", 4), ("ucx", 2)])
def test_two_nodes_of_four_gpus_compute(bed: SlurmBed, home: Path, protocol: str, gpus: int) -> None:
    package = home / "package" / "own_runner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 5\n")
    workers, tasks = 2 * gpus, gpus + 2
    rest = HOLD.format(workers=workers) + UPLOAD.format(package=str(package))
    task_options = f"--ntasks={2 * tasks} --ntasks-per-node={tasks}"
    code, out = srun(home, task_options, gpus=gpus, nodes=2, workers=workers, protocol=protocol, rest=rest)
    assert code == 0, out
    assert f"schemes ['{'ucx' if protocol == 'ucx' else 'tls'}']" in out
    assert f"gpus {[(str(node), str(gpu)) for node in range(2) for gpu in range(gpus)]}" in out
    assert f"names {workers} workers {workers}\n" in out and "answer 5050\n" in out
    assert "GPUs stay unused" not in out and left(bed, home) == []
    assert f"held {list(map(str, range(workers)))} {2 * list(range(gpus))}\n" in out
    assert f"uploaded ['own_runner'] {workers * [5]}\n" in out
    # Slurm itself sometimes reports a step that ends while a node still starts it.
    assert len([line for line in out.splitlines() if not line.startswith("slurmstepd")]) == 6, out
    assert "Traceback" not in out, out
    logs = {path.name for path in next((home / "clusters").glob("runner-*")).joinpath("logs").iterdir()}
    assert logs == {"scheduler.log", "workers-of-node-0.log", "workers-of-node-1.log"}


@pytest.mark.parametrize(("security", "scheme"), [(True, "tls"), ("authenticated", "authenticated")])
def test_workers_compute_and_strangers_are_refused(
    bed: SlurmBed, home: Path, security: bool | str, scheme: str
) -> None:
    strangers = TRY_STRANGERS.format(address="cluster.scheduler_address", others=list(map(str, other_clusters(home))))
    code, out = srun(home, "--ntasks=4", gpus=2, nodes=1, workers=2, security=security, rest=strangers)
    assert code == 0 and REFUSED in out, out
    assert f"schemes ['{scheme}']" in out and "answer 5050\n" in out
    assert left(bed, home) == []


def test_fewer_worker_tasks_than_gpus_leave_some_idle_and_report_it(bed: SlurmBed, home: Path) -> None:
    code, out = srun(home, "--ntasks=4", gpus=4, nodes=1, workers=2)
    assert code == 0 and "names 2 workers 2\n" in out, out
    assert "hpcgpu: node 0 has 4 GPUs but only 2 worker tasks, so 2 GPUs stay unused" in out
    assert left(bed, home) == []


def test_tasks_that_are_dealt_round_the_nodes_find_their_node(bed: SlurmBed, home: Path) -> None:
    code, out = srun(home, "--ntasks=6 --distribution=cyclic", gpus=2, nodes=2, workers=4)
    assert code == 0 and "gpus [('0', '0'), ('0', '1'), ('1', '0'), ('1', '1')]" in out, out
    assert left(bed, home) == []


def test_a_program_that_fails_ends_all_with_its_exit_code(bed: SlurmBed, home: Path) -> None:
    code, out = srun(home, "--ntasks=3", gpus=1, nodes=1, workers=1, rest="raise SystemExit(7)")
    assert code == 7 and "task 1: Exited with exit code 7" in out and "Traceback" not in out, out
    assert left(bed, home) == []


def test_a_program_that_raises_shows_its_traceback(bed: SlurmBed, home: Path) -> None:
    code, out = srun(home, "--ntasks=3", gpus=1, nodes=1, workers=1, rest="raise ValueError('mine')")
    assert code == 1 and "ValueError: mine" in out, out
    assert left(bed, home) == []


#: Waits for the warning, as one that wants to save its results, and computes on.
WARNED = """
        import signal, subprocess, threading
        warned = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: warned.set())
        subprocess.run(["scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
        print("warned", warned.wait(60), flush=True)
        print("workers", len(client.run(os.getpid)), "answer", client.submit(sum, [40, 2]).result(60), flush=True)
"""


def test_only_the_program_is_warned_before_the_walltime_ends(bed: SlurmBed, home: Path) -> None:
    """By `--signal=USR1@60` Slurm sends the signal to each task of the step, as `scancel --signal` does at once."""
    code, out = srun(home, "--ntasks=4", gpus=1, nodes=1, workers=1, rest=WARNED.strip())
    assert code == 0 and "warned True\nworkers 1 answer 42\n" in out, out
    assert left(bed, home) == []


#: Asks for more workers than there will be, holds as many as there are, and asks for one more.
HOLD_TOO_MANY = """
        def refused(n_workers):
            try:
                with hpcgpu.hold(client, n_workers, resources={resources}, timeout=300, quiet=True):
                    print("held", n_workers, flush=True)
            except hpcgpu.ClusterError as error:
                print("refused:", error, flush=True)

        refused({there} + 1)
        with hpcgpu.hold(client, {there}, resources={resources}):
            refused(1)
"""


@pytest.mark.parametrize(("gpus", "there", "resources"), [(2, 2, None), (0, 3, {"SEAT": 1})])
def test_a_block_reports_when_the_job_ends_and_more_workers_than_the_step_has_are_an_error_at_once(
    bed: SlurmBed, home: Path, gpus: int, there: int, resources: dict[str, int] | None
) -> None:
    """Five tasks on a node: with two GPUs one task for workers is left over, without GPUs each is a worker."""
    more = {"resources": resources} if resources else {}
    rest = HOLD_TOO_MANY.format(there=there, resources=resources).strip()
    code, out = srun(home, "--ntasks=5", gpus=gpus, nodes=1, workers=there, more=more, rest=rest)
    assert code == 0, out
    assert f"names {there} workers {there}\n" in out and "answer 5050\n" in out, out
    assert re.search(rf"hpcgpu: {there} workers held; .*job job.sh\S* ends first, in [0-9]+ min", out), out
    alone, beside = (line for line in out.splitlines() if line.startswith("refused:"))
    assert f"will have only {there} workers, but the program waits for {there + 1}: " in alone, out
    assert f"hold: 1 worker requested, beside {there} that this program holds already: " in beside, out
    assert left(bed, home) == []
