"""Time from the end of a scheduler to all workers of the next one, with ``on_scheduler_end="restart"``, on real Slurm.

``python benchmarks/restart_times.py`` starts a Slurm of its own (tests/slurm/bed.py, as root) whose queue is free, and
another one whose queue takes 300 s: its submit filter sets the begin time of each job. A run makes a cluster of three
worker jobs with one pretended GPU each, and lets its scheduler end:

- free: it is killed; the queue is free.
- walltime: its walltime ends, and the next scheduler job runs already, which was submitted 6 minutes before.
- walltime, detached: the same, after `detach`.
- held: it is killed after `detach`. The next scheduler job is held in the queue, and its begin time has passed.
- held, waits anew: the same, but its begin time is set to 300 s after the end, as in a queue in which a held job gains
  no priority.
- killed: it is killed, the program is there, and no next scheduler job is in the queue.

The other side is a new cluster of the same size from nothing on the same queue: each run begins with that. The runs of
the slow queue go on at the same time, and begin 30 s apart: they mostly wait.

- first, all: seconds until the first worker, and the last one, is connected.
- result: seconds until the first result of a task.
- workers, schedulers (GPU s): what the jobs cost until all workers are connected, and a next scheduler job that waits
  in itself before the end. Slurm shows whole seconds.
- kept: worker jobs that ran before the end and in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.client import FutureCancelledError
from slurm_programs import ROOT, Job, Recorder, end, exit_on_sigterm, heading, listed

sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]

JOBS = 3
SLOW = ("walltime", "walltime, detached", "held", "held, waits anew", "killed")
#: Seconds after which a run is stopped.
LIMIT = 2400.0
COLUMNS = ("first", "all", "result", "workers", "schedulers", "kept")


def run(case: str, queue_seconds: int, place: Path) -> dict[str, dict[str, float]]:
    """Make a cluster, let its scheduler end, and return what both cost."""
    from hpcgpu import SlurmGPUCluster, connect

    warnings.simplefilter("ignore")
    recorder, name = Recorder(place), place.name
    options = {"queue": "shared"} | ({"walltime": "00:12:00"} if case.startswith("walltime") else {})
    try:
        began = time.time()
        cluster = SlurmGPUCluster(
            name=name,
            jobs=JOBS,
            queue="gpu",
            gpus_per_node=1,
            gpu_request="none",
            job_script_prologue=["export CUDA_VISIBLE_DEVICES=0"],
            cores=1,
            memory="1GB",
            walltime="02:00:00",
            scheduler=options,
            protocol="tcp",
            quiet=True,
            on_scheduler_end="restart",
            cluster_directory=place / "clusters",
        )
        directory = cluster.directory.path
        with connect(directory, quiet=True) as client:
            new = until_complete(client, began)
            time.sleep(10)
            before = running(name)
            pid = client.run_on_scheduler(os.getpid)
            if case not in ("free", "walltime", "killed"):
                cluster.detach()
            end_scheduler(case, name, queue_seconds, pid)
            ended = time.time()
            print(f"{time.strftime('%T')} {case}: the scheduler has ended", flush=True)
            next_one = until_complete(client, ended)
            after = running(name)
            recorder.record()
            jobs = [job for job in recorder.jobs.values() if job.name.startswith(f"{name}-")]
            new |= cost(jobs, began, began + new["all"])
            next_one |= cost(jobs, ended, ended + next_one["all"])
            next_one["kept"] = len(before & after)
            for job in jobs:  # one that waited in itself
                start, stop = job.times
                if job.is_scheduler and job.name != f"{name}-scheduler" and 0 < start < ended:
                    next_one["schedulers"] += min(stop, ended) - start
            show(jobs, ended)
        return {"a new cluster": new, "the next scheduler": next_one}
    finally:
        subprocess.run([sys.executable, "-m", "hpcgpu", "stop", str(place / "clusters" / name)])
        recorder.end()


def show(jobs: list[Job], ended: float) -> None:
    """Print the jobs of a cluster, with their times from the end of its scheduler."""
    for job in sorted(jobs):
        times = ", ".join(f"{at - ended:.0f}" for at in job.times)
        print(f"  {job.id} {job.name} {job.state}, submit {job.submit[-8:]}, from the end: {times}", flush=True)


def end_scheduler(case: str, name: str, queue_seconds: int, pid: int) -> None:
    """Let the scheduler of a cluster end as in this case, and wait until its process has ended."""
    if case.startswith("held"):
        wait_for_held(name, queue_seconds)
    if case == "held, waits anew":
        [held] = [job.id for job in listed() if job.name.startswith(f"{name}-s") and job.state == "PENDING"]
        subprocess.run(["scontrol", "update", f"JobId={held}", f"StartTime=now+{queue_seconds}"], check=True)
    if not case.startswith("walltime"):
        os.kill(pid, signal.SIGKILL)
    while lives(pid):
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_complete(client: Client, since: float) -> dict[str, float]:
    """Wait for a result and for all workers; return the seconds that they took."""
    while True:
        try:
            client.submit(pow, 2, 5, pure=False).result(timeout=LIMIT)
            break
        except FutureCancelledError:  # it was submitted before the client had noticed the end
            time.sleep(0.1)
    result = time.time() - since
    client.wait_for_workers(JOBS, timeout=LIMIT)
    added = sorted(at for at, event in client.get_events("all") if event.get("action") == "add-worker")
    return {"first": added[0] - since, "all": added[JOBS - 1] - since, "result": result}


def running(name: str) -> set[str]:
    """Return the names of the worker jobs of a cluster that run."""
    return {job.name for job in listed() if job.name.startswith(f"{name}-") and job.state == "RUNNING"} - {
        job.name for job in listed() if job.is_scheduler
    }


def wait_for_held(name: str, queue_seconds: int) -> None:
    """Wait until the next scheduler job has been in the queue for longer than the queue takes."""
    since: float | None = None
    while since is None or time.time() - since < queue_seconds + 10:
        if since is None and any(job.name == f"{name}-scheduler2" for job in listed()):
            since = time.time()
        time.sleep(1)


def cost(jobs: Iterable[Job], since: float, until: float) -> dict[str, float]:
    """Return the GPU seconds of worker jobs and scheduler jobs in this time: each job has one GPU."""
    paid = {"workers": 0.0, "schedulers": 0.0}
    for job in jobs:
        start, stop = job.times
        if start:
            paid["schedulers" if job.is_scheduler else "workers"] += max(0.0, min(stop, until) - max(start, since))
    return paid


def measure(case: str, queue_seconds: int, place: Path) -> subprocess.Popen[bytes]:
    """Begin a run in a program of its own."""
    place.mkdir()
    argv = [sys.executable, __file__, f"--program={case}", f"--place={place}", f"--queue-seconds={queue_seconds}"]
    return subprocess.Popen(argv)


def table(found: dict[str, list[dict[str, dict[str, float]]]], note: str) -> str:
    """Return the medians of each case, and their ratio."""
    lines = [f"{note:40}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'runs':>6}"]
    for case, runs in found.items():
        if not runs:
            lines.append(f"{case}: no run was complete")
            continue
        for side in runs[0]:
            cells = ""
            for column in COLUMNS:
                values = [one[side][column] for one in runs if column in one[side]]
                cells += f"{statistics.median(values):12.{0 if column == 'kept' else 1}f}" if values else f"{'-':>12}"
            lines.append(f"{f'{case}: {side}':40}{cells}{len(runs):6}")
    return "\n".join(lines)


def all_of(cases: list[str], queue_seconds: int, repeats: int, place: Path) -> dict[str, list[Any]]:
    """Do the runs on one Slurm: by turns if the queue is free, and else at the same time."""
    import bed as slurm_bed

    found: dict[str, list[Any]] = {case: [] for case in cases}
    with slurm_bed.started(place / "slurm", slurm_bed.FAST, queue_seconds):
        programs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        try:
            for number, case in enumerate(cases * repeats):
                at = place / f"r{number}"
                programs.append((case, at, program := measure(case, queue_seconds, at)))
                if queue_seconds:
                    time.sleep(30)
                else:
                    program.wait(LIMIT)
            for case, at, program in programs:
                program.wait(LIMIT)
                if (at / "result").exists():
                    found[case].append(json.loads((at / "result").read_text()))
        finally:
            for _, _, program in programs:
                end(program)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("free", *SLOW), default=["free", *SLOW])
    parser.add_argument("--repeats", type=int, default=5, help="on the free queue")
    parser.add_argument("--slow-repeats", type=int, default=1, help="on the queue that takes time")
    parser.add_argument("--queue-seconds", type=int, default=300)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    exit_on_sigterm()
    if chosen.program:
        result = run(chosen.program, chosen.queue_seconds, chosen.place)
        (chosen.place / "result").write_text(json.dumps(result))
        return
    import build

    text = heading(("distributed", "dask-cuda"))
    with tempfile.TemporaryDirectory(prefix="hpcgpu-restart-times-") as temporary:
        place = Path(temporary)
        os.environ |= build.environment(build.build(place / "stub")) | {"STUBNVML_COUNT": "1"}
        os.environ["DASK_TEMPORARY_DIRECTORY"] = str(place / "dask")
        for note, seconds, repeats in (
            ("free queue", 0, chosen.repeats),
            (f"queue of {chosen.queue_seconds} s", chosen.queue_seconds, chosen.slow_repeats),
        ):
            if cases := [case for case in chosen.cases if (case in SLOW) == bool(seconds)]:
                (within := place / f"q{seconds}").mkdir()
                text += f"\n{table(all_of(cases, seconds, repeats, within), note)}\n"
                print(text, flush=True)
    if chosen.output:
        chosen.output.write_text(text)


if __name__ == "__main__":
    main()
