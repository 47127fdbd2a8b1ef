"""Time from the constructor to the workers: hpcgpu against dask-jobqueue, on the same Slurm, in the same run,
interleaved.

hpcgpu starts a scheduler job and jobs of four dask-cuda workers on pretended GPUs; dask-jobqueue its scheduler in this
process and jobs of four worker processes. Run it with ``python benchmarks/startup.py``; it starts a Slurm of its own
(tests/slurm/bed.py, as root), which schedules as Slurm does by default. With ``--fast`` it schedules every second.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]
WORKERS_PER_JOB = 4
#: Seconds after which a start counts as one that never ends: dask-jobqueue does not replace jobs that ended.
NEVER = 600.0


@dataclass
class Run:
    """What one start cost."""

    first: float
    every: float
    cpu: float
    commands: int


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


def measure(make: Callable[[int], Any], jobs: int, log: Path) -> Run:
    """Start a cluster, wait for the first and for all workers, close it."""
    log.write_text("")
    cpu, started = time.process_time(), time.monotonic()
    with make(jobs) as cluster:
        first = None
        while len(cluster.scheduler_info["workers"]) < jobs * WORKERS_PER_JOB:
            if first is None and cluster.scheduler_info["workers"]:
                first = time.monotonic() - started
            if time.monotonic() - started > NEVER:
                return Run(first or math.inf, math.inf, math.nan, 0)
            time.sleep(0.02)
        every = time.monotonic() - started
    return Run(first or every, every, time.process_time() - cpu, len(log.read_text().splitlines()))


def ours(jobs: int) -> Any:
    from hpcgpu import SlurmGPUCluster

    return SlurmGPUCluster(
        jobs=jobs,
        queue="gpu",
        gpus_per_node=WORKERS_PER_JOB,
        cores=4,
        memory="4GB",
        scheduler={"queue": "shared", "prefer": "t4"},
        protocol="tcp",
        quiet=True,
    )


def theirs(place: Path, jobs: int) -> Any:
    from dask_jobqueue import SLURMCluster

    return SLURMCluster(
        n_workers=jobs * WORKERS_PER_JOB,
        queue="gpu",
        cores=4,
        processes=WORKERS_PER_JOB,
        memory="4GB",
        walltime="01:00:00",
        log_directory=str(place / "theirs"),
        local_directory=str(place / "scratch"),
        python=sys.executable,
    )


def compare(jobs: int, repeat: int, bed: Any, place: Path, log: Path) -> None:
    """Measure both with so many jobs, by turns; print the medians and their ratio."""
    runs: dict[str, list[Run]] = {"hpcgpu": [], "dask-jobqueue": []}
    for _ in range(repeat):
        runs["hpcgpu"].append(measure(ours, jobs, log))
        bed.wait_empty()
        runs["dask-jobqueue"].append(measure(partial(theirs, place), jobs, log))
        bed.wait_empty()
    fields = ("first", "every", "cpu", "commands")
    medians = {
        name: [statistics.median(getattr(run, f) for run in done) for f in fields] for name, done in runs.items()
    }
    for name, (first, every, cpu, commands) in medians.items():
        print(f"{jobs:>4} {name:14} {first:>10.1f} {every:>8.1f} {cpu:>15.2f} {commands:>15.0f}")
    first, every, cpu, commands = (a / b for a, b in zip(medians["hpcgpu"], medians["dask-jobqueue"], strict=True))
    print(f"{jobs:>4} {'ratio':14} {first:>10.2f} {every:>8.2f} {cpu:>15.2f} {commands:>15.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="on a Slurm that schedules every second")
    arguments = parser.parse_args()
    import bed as slurm_bed
    import build

    scheduling = slurm_bed.FAST if arguments.fast else ""
    with tempfile.TemporaryDirectory() as temporary, slurm_bed.started(Path(temporary) / "slurm", scheduling) as bed:
        place = Path(temporary)
        os.environ.update(build.environment(build.build(place / "stub")))
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = str(place / "clusters")
        log = count_commands(place)
        import dask

        dask.config.set({"hpcgpu.cluster-directory": str(place / "clusters")})
        print(f"{'jobs':>4} {'':14} {'first (s)':>10} {'all (s)':>8} {'client CPU (s)':>15} {'queue commands':>15}")
        for make in (ours, partial(theirs, place)):  # not counted: it fills the page cache
            measure(make, 1, log)
            bed.wait_empty()
        for jobs in arguments.jobs:
            compare(jobs, arguments.repeat, bed, place, log)
    print(
        "Commands of hpcgpu: a submit for the scheduler job and each worker job, one scancel for all, one "
        "squeue to see them gone,\none scontrol in the scheduler job, which lets Slurm look at the worker "
        "jobs, and one before that for the name of the queue."
    )


if __name__ == "__main__":
    main()
