"""Time from the constructor to the workers: hpcgpu against dask-jobqueue, on the same Slurm, in the same run,
interleaved.

hpcgpu starts a scheduler job and jobs of four dask-cuda workers on pretended GPUs; dask-jobqueue its scheduler in this
process and jobs of four worker processes. Run it with ``python benchmarks/startup.py``; it starts a Slurm of
its own (tests/slurm/bed.py, as root), which schedules as Slurm does by default. With ``--fast`` it schedules every
second, with ``--workers 8`` jobs have eight workers. With ``--slow 2`` the jobs have their Python environment on a
filesystem that takes 2 ms for each lookup (slowfs.c, which needs gcc and libfuse3-dev).

The line "Slurm alone" is the bound: jobs that only write a file, submitted as hpcgpu submits its jobs.

CPU seconds and memory (PSS, in which shared pages count in parts) are those of all processes of the jobs when all
workers are connected, for each worker: hpcgpu's scheduler job is in them. The scheduler of dask-jobqueue is in this
process, and so is its CPU time.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from dependency import CHANGE
from worker_start import cpu_and_memory, processes

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]
#: Seconds after which a start counts as one that never ends: dask-jobqueue does not replace jobs that ended.
NEVER = 600.0


@dataclass
class Run:
    """What one start cost: seconds, CPU seconds, MiB, and commands of the queue."""

    first: float
    every: float
    cpu: float
    job_cpu: float
    memory: float
    commands: int


#: The head of the table, and how each column is written.
COLUMNS = {
    "first (s)": ">10.1f",
    "all (s)": ">8.1f",
    "client CPU (s)": ">15.2f",
    "CPU/worker (s)": ">15.2f",
    "PSS/worker (MiB)": ">17.0f",
    "commands": ">9.0f",
}


@contextmanager
def slow_environment(milliseconds: float, place: Path) -> Iterator[str]:
    """The Python of this environment on a filesystem with this delay for each lookup."""
    program, mount = place / "slowfs", place / "slow"
    flags = subprocess.run(["pkg-config", "fuse3", "--cflags", "--libs"], check=True, capture_output=True, text=True)
    source = Path(__file__).with_name("slowfs.c")
    subprocess.run(["gcc", "-O2", source, "-o", program, *flags.stdout.split()], check=True)
    mount.mkdir()
    settings = {"SLOWFS_SOURCE": sys.prefix, "SLOWFS_MICROSECONDS": f"{1000 * milliseconds:.0f}"}
    subprocess.run([program, mount], check=True, env=os.environ | settings)
    try:
        yield str(mount / Path(sys.executable).relative_to(sys.prefix))
    finally:
        subprocess.run(["fusermount3", "-u", "-z", mount], check=True)


def count_commands(place: Path) -> Path:
    """Put wrappers of the queue commands on the PATH that write a line for each call; return the file."""
    log = place / "commands"
    bin_directory = place / "bin"
    bin_directory.mkdir()
    for name in ("sbatch", "squeue", "scancel", "sacct", "scontrol"):
        wrapper = bin_directory / name
        wrapper.write_text(f'#!/bin/sh\necho {name} >> "{log}"\nexec {shutil.which(name)} "$@"\n')
        wrapper.chmod(0o755)
    os.environ["PATH"] = f"{bin_directory}:{os.environ['PATH']}"
    log.touch()
    return log


def measure(make: Callable[[int], Any], jobs: int, workers: int, log: Path) -> Run:
    """Start a cluster, wait for the first and for all workers, close it."""
    log.write_text("")
    cpu, started = time.process_time(), time.monotonic()
    with make(jobs) as cluster:
        first = None
        while len(cluster.scheduler_info["workers"]) < jobs * workers:
            if first is None and cluster.scheduler_info["workers"]:
                first = time.monotonic() - started
            if time.monotonic() - started > NEVER:
                return Run(first or math.inf, math.inf, math.nan, math.nan, math.nan, 0)
            time.sleep(0.02)
        every = time.monotonic() - started
        conf = f"SLURM_CONF={os.environ['SLURM_CONF']}"
        own = [process for process in processes(conf) if b"SLURM_JOB_ID=" in (process / "environ").read_bytes()]
        job_cpu, memory = (total / (jobs * workers) for total in cpu_and_memory(own))
    return Run(first or every, every, time.process_time() - cpu, job_cpu, memory, len(log.read_text().splitlines()))


def slurm_alone(place: Path, jobs: int) -> Run:
    """Start jobs that only write a file, as hpcgpu submits its jobs: no program can be faster on this Slurm."""

    def submit(name: str, command: str, *arguments: str) -> str:
        script = place / f"{name}.sh"
        script.write_text(f"#!/bin/bash\ntouch {place}/{name}.begun\n{command}\nsleep 100\n")
        argv = ["sbatch", "--parsable", f"--output={place}/alone.log", "--mem=100", *arguments, str(script)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    started = time.monotonic()
    scheduler = submit("alone-scheduler", CHANGE, "--partition=shared", "--gres=gpu:1")
    names = [f"alone-{number}" for number in range(jobs)]
    ids = [submit(name, "", "--partition=gpu", "--gres=gpu:4", f"--dependency=after:{scheduler}") for name in names]
    begun: dict[Path, float] = {}
    while len(begun) < jobs:
        for path in (place / f"{name}.begun" for name in names):
            if path not in begun and path.exists():
                begun[path] = time.monotonic() - started
        time.sleep(0.02)
    subprocess.run(["scancel", scheduler, *ids], check=True)
    for path in begun:
        path.unlink()
    return Run(min(begun.values()), max(begun.values()), math.nan, math.nan, math.nan, 0)


def ours(workers: int, python: str, jobs: int) -> Any:
    from hpcgpu import SlurmGPUCluster

    visible = ",".join(map(str, range(workers)))
    # the nodes of this Slurm have four GPUs
    more = {"gpu_request": "none", "job_script_prologue": [f"export CUDA_VISIBLE_DEVICES={visible}"]}
    return SlurmGPUCluster(
        jobs=jobs,
        queue="gpu",
        gpus_per_node=workers,
        cores=4,
        memory="4GB",
        python=python,
        scheduler={"queue": "shared", "prefer": "t4"},
        protocol="tcp",
        quiet=True,
        **(more if workers > 4 else {}),
    )


def theirs(workers: int, python: str, place: Path, jobs: int, **more: Any) -> Any:
    from dask_jobqueue import SLURMCluster

    return SLURMCluster(
        n_workers=jobs * workers,
        queue="gpu",
        cores=4,
        processes=workers,
        memory="4GB",
        walltime="01:00:00",
        log_directory=str(place / "theirs"),
        local_directory=str(place / "scratch"),
        python=python,
        **more,
    )


def compare(sides: dict[str, Callable[[int], Any]], jobs: int, workers: int, repeat: int, bed: Any, log: Path) -> None:
    """Measure both with so many jobs, and Slurm alone, by turns; print the medians and the ratio of both."""
    runs: dict[str, list[Run]] = {name: [] for name in (*sides, "Slurm alone")}
    for _ in range(repeat):
        for name, make in sides.items():
            runs[name].append(measure(make, jobs, workers, log))
            bed.wait_empty()
        runs["Slurm alone"].append(slurm_alone(log.parent, jobs))
        bed.wait_empty()
    medians = {
        name: [statistics.median(getattr(run, f.name) for run in runs[name]) for f in fields(Run)] for name in runs
    }
    for name, row in medians.items():
        print(line(jobs, name, row, COLUMNS.values()))
    ratios = [a / b for a, b in zip(*(medians[name] for name in sides), strict=True)]
    print(line(jobs, "ratio", ratios, [f"{column.partition('.')[0]}.2f" for column in COLUMNS.values()]), flush=True)


def line(jobs: int, name: str, values: list[float], columns: Iterable[str]) -> str:
    """One line of the table."""
    return f"{jobs:>4} {name:14}" + "".join(f"{value:{column}}" for value, column in zip(values, columns, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=4, help="workers of a job")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="on a Slurm that schedules every second")
    parser.add_argument("--slow", type=float, metavar="MS", help="milliseconds of each lookup under the environment")
    arguments = parser.parse_args()
    import bed as slurm_bed
    import build

    scheduling = slurm_bed.FAST if arguments.fast else ""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bed = stack.enter_context(slurm_bed.started(place / "slurm", scheduling))
        python = stack.enter_context(slow_environment(arguments.slow, place)) if arguments.slow else sys.executable
        os.environ.update(build.environment(build.build(place / "stub")), STUBNVML_COUNT=str(max(4, arguments.workers)))
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = str(place / "clusters")
        log = count_commands(place)
        import dask

        dask.config.set({"hpcgpu.cluster-directory": str(place / "clusters")})
        print(
            f"{'jobs':>4} {'':14}"
            + "".join(f"{name:>{column[1:].partition('.')[0]}}" for name, column in COLUMNS.items())
        )
        sides = {
            "hpcgpu": partial(ours, arguments.workers, python),
            "dask-jobqueue": partial(theirs, arguments.workers, python, place),
        }
        for make in sides.values():  # not counted: it fills the page cache
            measure(make, 1, arguments.workers, log)
            bed.wait_empty()
        for jobs in arguments.jobs:
            compare(sides, jobs, arguments.workers, arguments.repeat, bed, log)
    print(
        "Commands of hpcgpu: a submit for the scheduler job and each worker job, one scancel for all, one "
        "squeue to see them gone,\none scontrol in the scheduler job, which lets Slurm look at the worker "
        "jobs, and one before that for the name of the queue."
    )


if __name__ == "__main__":
    main()
