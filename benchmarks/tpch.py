"""TPC-H on CPUs: LocalCluster, dask-jobqueue and hpcgpu on the same Slurm, in the same run, by turns.

``python benchmarks/tpch.py --scale 1`` makes the data, starts a Slurm of its own (tests/slurm/bed.py, as root), and
gives each side the same workers. A run is a new program: it computes query 6 on a cold queue, waits for all workers,
and computes the 22 queries, so often that they last longer than ``--short`` minutes (``--rounds``). Each answer is
compared with DuckDB's. A query fails if it raises, if its answer differs, or if it has no answer after ``--limit``
seconds for the whole run.

There are three kinds of runs (``--kinds``). Undisturbed ones. In the second kind one worker job has a walltime of
``--short`` minutes, and in query 2 another is cancelled. In the third the process of the scheduler is killed in
query 11: it is the program itself but for hpcgpu. A query whose results its scheduler took along is computed again, as
a user would do it. The sides:

- LocalCluster is one job with the cores of all worker jobs, so that the loss of this job is the end.
- dask-jobqueue as it is used most: ``scale``. It does not replace a job that ended.
- dask-jobqueue as its pages advise for walltimes: ``adapt`` from N to N jobs, and workers with ``--lifetime``.
- hpcgpu: ``jobs=N``, and the same with ``on_scheduler_end="restart"``.

Core hours are those of all jobs: hpcgpu's scheduler job is in them, and the program of LocalCluster. The scheduler of
dask-jobqueue runs outside of the jobs.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_programs import (
    ROOT,
    Event,
    Recorder,
    exit_on_sigterm,
    read_events,
    run_program,
    written_events,
)
from slurm_programs import heading as common_heading

sys.path[:0] = [str(ROOT / "tests" / "slurm")]
#: Seconds before the end of a walltime at which workers end by themselves.
MARGIN = 30
WALLTIME = "01:00:00"
LOCAL = "LocalCluster"


# The program of one side


def local(chosen: argparse.Namespace, place: Path) -> Any:
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=chosen.jobs,
        threads_per_worker=chosen.cores,
        memory_limit=chosen.memory,
        dashboard_address=None,
        local_directory=str(place),
    )


def jobqueue(chosen: argparse.Namespace, place: Path, **more: Any) -> Any:
    from dask_jobqueue import SLURMCluster

    return SLURMCluster(
        queue="gpu",
        cores=chosen.cores,
        processes=1,
        memory=chosen.memory,
        walltime=WALLTIME,
        log_directory=str(place),
        local_directory=str(place),
        **more,
    )


def jobqueue_scale(chosen: argparse.Namespace, place: Path) -> Any:
    return jobqueue(chosen, place, n_workers=chosen.jobs)


def jobqueue_adapt(chosen: argparse.Namespace, place: Path) -> Any:
    lifetime = f'$(( $(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s) - $(date +%s) - {MARGIN} ))'
    prologue, arguments = [f"LIFETIME={lifetime}"], ["--lifetime", "${LIFETIME}s"]
    cluster = jobqueue(chosen, place, job_script_prologue=prologue, worker_extra_args=arguments)
    cluster.adapt(minimum_jobs=chosen.jobs, maximum_jobs=chosen.jobs)
    return cluster


def ours(chosen: argparse.Namespace, place: Path, **more: Any) -> Any:
    from hpcgpu import SlurmGPUCluster

    return SlurmGPUCluster(
        jobs=chosen.jobs,
        queue="gpu",
        gpus_per_node=0,
        cores=chosen.cores,
        memory=chosen.memory,
        walltime=WALLTIME,
        walltime_margin=f"{MARGIN}s",
        cluster_directory=str(place),
        scheduler={"queue": "shared", "prefer": "t4"},
        protocol="tcp",
        quiet=True,
        **more,
    )


def ours_restarted(chosen: argparse.Namespace, place: Path) -> Any:
    return ours(chosen, place, on_scheduler_end="restart")


SIDES = {
    LOCAL: local,
    "dask-jobqueue scale": jobqueue_scale,
    "dask-jobqueue adapt": jobqueue_adapt,
    "hpcgpu": ours,
    "hpcgpu restart": ours_restarted,
}
#: The kinds of runs, as in the table.
KINDS = {"undisturbed": "undisturbed", "lost": "two jobs lost", "killed": "scheduler killed"}


def program(chosen: argparse.Namespace, place: Path) -> None:
    """Compute the queries on a cluster of one side; write what happens to the file `events`."""
    from distributed import Client
    from distributed.client import FutureCancelledError
    from tpch_queries import QUERIES, Tables
    from tpch_reference import difference

    expected = pickle.loads((place.parent / "expected").read_bytes())
    tables = Tables(place.parent / "data", chosen.scale)

    with written_events(place) as note, SIDES[chosen.program](chosen, place) as cluster, Client(cluster) as client:
        module = str(Path(__file__).with_name("tpch_queries.py"))
        client.upload_file(module)
        QUERIES[6](tables)
        note("first")
        client.wait_for_workers(chosen.jobs)
        note("scheduler", client.run_on_scheduler(os.getpid))
        for number, query in list(QUERIES.items()) * chosen.rounds:
            note("begin", number)
            try:
                try:
                    answer = query(tables)
                except FutureCancelledError:
                    note("again", number)
                    client.upload_file(module)  # the next scheduler does not have it
                    answer = query(tables)
            except Exception as error:
                note("failed", number, f"{type(error).__name__}: {str(error)[:300]}")
                continue
            note("end", number)
            if wrong := difference(answer, expected[number]):
                note("wrong", number, wrong)
        note("all")


# What happens around it


@dataclass
class Outcome:
    """What one run gave: seconds, hours, queries, and what happened."""

    first: float = math.inf
    seconds: float = math.inf
    core_hours: float = 0.0
    failed: int = 0
    again: int = 0
    remarks: list[str] = field(default_factory=list)


def shorten(place: Path, minutes: int) -> dict[str, str]:
    """Return an environment in which sbatch gives a short walltime to the first worker job, and to no other."""
    wrapper = place / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in\n*-scheduler*|*scheduler.sbatch*) ;;\n'
        f'*) mkdir "{place}/short" 2>&- && set -- --time={minutes} "$@" ;;\nesac\n'
        f'exec "{shutil.which("sbatch")}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}


def command(chosen: argparse.Namespace, side: str, place: Path) -> list[str]:
    """Return the command that runs the program of one side: that of LocalCluster is a job."""
    options = [
        f"--rounds={chosen.rounds}",
        f"--scale={chosen.scale}",
        f"--jobs={chosen.jobs}",
        f"--cores={chosen.cores}",
        f"--memory={chosen.memory}",
    ]
    python = [sys.executable, __file__, f"--program={side}", f"--place={place}", *options]
    if side != LOCAL:
        return python
    from dask.utils import parse_bytes

    # the program and the scheduler need memory besides the workers
    megabytes = chosen.jobs * parse_bytes(chosen.memory) // 10**6 + 2000
    cores = f"--cpus-per-task={chosen.jobs * chosen.cores}"
    return ["srun", "-Q", "-p", "gpu", "-n", "1", cores, f"--mem={megabytes}M", f"--time={WALLTIME}", *python]


class Watch(Recorder):
    """Records the jobs of one run, and disturbs it."""

    def __init__(self, place: Path, kind: str, short: int) -> None:
        self.kind, self.short = kind, short
        self._victim = ""
        super().__init__(place)

    def disturb(self) -> None:
        query = {"lost": 2, "killed": 11}.get(self.kind)
        events = read_events(self.place)
        begun = [event.at for event in events if (event.what, event.number) == ("begin", query)]
        if self._victim or not begun or time.time() < begun[0] + 1:
            return
        if self.kind == "killed":
            self._victim = "the process of the scheduler was killed in query 11"
            os.kill(next(event.number for event in events if event.what == "scheduler"), signal.SIGKILL)
        else:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel a worker job."""
        self.record()
        running = [job for job in self.jobs.values() if job.state == "RUNNING" and not job.is_scheduler]
        if victims := [job for job in running if job.limit != f"{self.short}:00"]:
            self._victim = f"job {victims[-1].id} was cancelled in query 2"
            subprocess.run(["scancel", str(victims[-1].id)], check=True)

    def disturbances(self, events: list[Event]) -> list[str]:
        """Return what the disturbances were, for a reader who wants to know that they took place."""
        found = [self._victim or "NOTHING WAS CANCELLED OR KILLED"]
        for job in self.jobs.values():
            if self.kind == "lost" and job.limit == f"{self.short}:00":
                _, ended = job.times
                begun = sum(event.what == "begin" and event.at < ended for event in events)
                late = any(event.what == "all" and event.at < ended + 1 for event in events)
                when = f"after {begun - 1} queries" if begun and not late else "NOT DURING THE QUERIES"
                found.append(f"job {job.id} with the short walltime ended {when} ({job.state})")
        if self.kind == "killed":
            found.append(f"{sum(not job.is_scheduler for job in self.jobs.values())} worker jobs in all")
        return found


def run(chosen: argparse.Namespace, side: str, kind: str, bed: Any, place: Path) -> Outcome:
    """Run the program of one side, and end it and all jobs."""
    place.mkdir()
    watch = Watch(place, kind, chosen.short)
    more = shorten(place, chosen.short) if kind == "lost" else {}
    started = run_program(command(chosen, side, place), watch, bed, chosen.limit, more)
    return judge(watch, started, 22 * chosen.rounds, side)


def judge(watch: Watch, started: float, queries: int, side: str) -> Outcome:
    """Return what a run that has ended gave."""
    events, outcome = read_events(watch.place), Outcome(remarks=watch.remarks)
    by_name = {event.what: event.at for event in events}
    by_kind = Counter(event.what for event in events)
    outcome.failed = queries - by_kind["end"] + by_kind["wrong"]
    outcome.again = by_kind["again"]
    outcome.core_hours = sum(job.seconds * job.cores for job in watch.jobs.values()) / 3600
    outcome.remarks += [f"query {event.number}: {event.text}" for event in events if event.text]
    if "first" in by_name:
        outcome.first = by_name["first"] - started
    if "all" in by_name:
        outcome.seconds = by_name["all"] - min(event.at for event in events if event.what == "begin")
    if watch.kind != "undisturbed" and side != LOCAL:
        outcome.remarks += watch.disturbances(events)
    elif "all" not in by_name:
        outcome.remarks.append(f"it ended: {(watch.place / 'output').read_text()[-300:].strip()}")
    return outcome


def table(outcomes: dict[str, list[dict[str, Outcome]]]) -> str:
    """Return the medians as a table, each kind of runs with its columns."""
    kinds = list(next(iter(outcomes.values()))[0])
    lines = [
        f"{'':20}{'':>9} |" + "".join(f"{KINDS[kind]:^38} |" for kind in kinds),
        f"{'':20}{'first (s)':>9} |" + f"{'queries (s)':>12}{'core hours':>12}{'failed':>7}{'again':>7} |" * len(kinds),
    ]
    for side, turns in outcomes.items():
        first = statistics.median(outcome.first for turn in turns for outcome in turn.values())
        line = f"{side:20}{first:9.1f} |"
        for kind in kinds:
            found = [turn[kind] for turn in turns]
            seconds, hours = (
                statistics.median(getattr(outcome, name) for outcome in found) for name in ("seconds", "core_hours")
            )
            failed, again = ("+".join(str(getattr(outcome, name)) for outcome in found) for name in ("failed", "again"))
            took = f"{seconds:.1f}" if math.isfinite(seconds) else "-"
            line += f"{took:>12}{hours:12.3f}{failed:>7}{again:>7} |"
        lines.append(line)
    return "\n".join(line.rstrip("|").rstrip() for line in lines)


def remark(side: str, kind: str, outcome: Outcome) -> str:
    """Return what happened in one run."""
    name = side if kind == "undisturbed" else f"{side}, {KINDS[kind]}"
    return "; ".join([f"{name}: {outcome.first:.1f} s, {outcome.seconds:.1f} s", *outcome.remarks])


def heading(chosen: argparse.Namespace) -> str:
    """Return what must be known of a measurement."""
    jobs = f"{chosen.jobs} worker jobs, each with {chosen.cores} cores and {chosen.memory}"
    return f"""\
{common_heading(("distributed", "dask-jobqueue", "pandas", "pyarrow"))}\
Scale factor {chosen.scale:g}; {jobs}; 22 queries {chosen.rounds} x; medians of {chosen.repeat} runs.
In a run that loses two jobs, one job is cancelled, and one has a walltime of {chosen.short} min.
Where the scheduler is killed, it is killed in query 11.
"""


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="scale factor: GB of data as text")
    parser.add_argument("--parts", type=int, default=8, help="files of each table")
    parser.add_argument("--jobs", type=int, default=4, help="worker jobs")
    parser.add_argument("--cores", type=int, default=1, help="cores and threads of a worker job")
    parser.add_argument("--memory", default="3GB", help="memory of a worker job")
    parser.add_argument("--short", type=int, default=2, help="walltime in minutes of one job in disturbed runs")
    parser.add_argument("--rounds", type=int, default=1, help="the 22 queries so often in each run")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for a run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--program", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = parsed()
    exit_on_sigterm()
    if chosen.program:
        return program(chosen, chosen.place)
    import bed as slurm_bed
    from tpch_reference import QUERIES, make, reference

    outcomes: dict[str, list[dict[str, Outcome]]] = {side: [] for side in chosen.sides}
    text, remarks = heading(chosen), ["What happened, run by run: the first result, and all queries"]
    with tempfile.TemporaryDirectory(prefix="hpcgpu-tpch-") as temporary:
        place = Path(temporary)
        tables = make(place / "data", chosen.scale, chosen.parts)
        (place / "expected").write_bytes(pickle.dumps({number: reference(tables, number) for number in QUERIES}))
        os.environ["DASK_TEMPORARY_DIRECTORY"] = f"{place}/dask"
        with slurm_bed.started(place / "slurm") as bed:
            for turn in range(chosen.repeat):
                for side in chosen.sides:
                    outcomes[side].append({})
                    for kind in chosen.kinds:
                        name = f"run-{turn}-{list(SIDES).index(side)}-{kind}"
                        outcomes[side][-1][kind] = outcome = run(chosen, side, kind, bed, place / name)
                        remarks.append(remark(side, kind, outcome))
                        print(remarks[-1], flush=True)
    text += "\n".join(["", table(outcomes), "", *remarks, ""])
    print(f"\n{text}")
    if chosen.output:
        chosen.output.write_text(text)


if __name__ == "__main__":
    main()
