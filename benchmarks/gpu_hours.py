"""GPU hours of `adapt`: hpcgpu against dask-jobqueue on the same Slurm, whose queue takes 15 s, in one run, by turns.

``python benchmarks/gpu_hours.py`` starts a Slurm of its own (tests/slurm/bed.py, as root). Its submit filter, Slurm's
plugin job_submit/lua, sets the begin time of each job to 15 s after its submit. Otherwise Slurm schedules every second.
The filter runs in Slurm's controller, so both sides get the same queue, and neither needs an option for it.

Both sides call ``adapt(maximum_jobs=4)`` with their defaults. A job has four workers on four pretended GPUs. A run is a
new program. After 10 minutes it is stopped, and then it did not finish. ``--short`` has shorter tasks, pauses and
limits, and fewer jobs: it shows that everything works, and its numbers mean nothing.

All workers run on this one machine. Where 16 of them start at once, they share its cores, and their jobs are paid
meanwhile. So run it on a machine that does nothing else.

- start: until the first tasks are submitted: hpcgpu waits for its scheduler job, which takes its time in the queue.
- time: from the start of the program until the last result.
- response: from the submit of a round of tasks until its last result; the mean of the rounds.
- paid: how long the worker jobs ran, times their GPUs, as Slurm shows it, which has whole seconds.
- not used: paid, less the time of the tasks that gave a result. A task that a lost worker began is not used.
- scheduler: what hpcgpu's scheduler job paid. The scheduler of dask-jobqueue runs in the program.
- lost: tasks that ended with `KilledWorker`.
- finished: runs in which each task gave a result.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import startup
from slurm_programs import (
    ROOT,
    Event,
    Job,
    Recorder,
    exit_on_sigterm,
    heading,
    read_events,
    run_program,
    written_events,
)

sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "gpu_stub")]
WORKERS = 4


class Work(NamedTuple):
    """Rounds of the same tasks, which last so many seconds, with pauses between them.

    `later` are the tasks of all rounds but the first, if they differ from those.
    """

    text: str
    tasks: list[float]
    rounds: int = 1
    pause: float = 0.0
    later: list[float] | None = None

    def of_round(self, number: int) -> list[float]:
        """Return the tasks of a round; the first one is 0."""
        return self.tasks if number == 0 or self.later is None else self.later

    def scaled(self, factor: float) -> Work:
        """Return the same with other times."""
        tasks, later = ([factor * seconds for seconds in each or []] for each in (self.tasks, self.later))
        return self._replace(tasks=tasks, pause=factor * self.pause, later=later or None)


#: Each long task of the tail has twenty short ones around it.
TAIL = ([2.0] * 10 + [60.0] + [2.0] * 10) * 6
WORKLOADS = {
    "burst": Work("160 tasks of 5 s at once", [5.0] * 160),
    "pauses": Work("five rounds of 64 tasks of 2 s, pauses of 20 s", [2.0] * 64, 5, 20.0),
    "tail": Work("six tasks of a minute among 120 of 2 s", TAIL),
    "few-after": Work("160 tasks of 2 s, and then eight of a minute", [2.0] * 160, 2, 0.0, [60.0] * 8),
    "long-pauses": Work("three rounds of 8 tasks of 1 s, pauses of 75 s", [1.0] * 8, 3, 75.0),
}


class Setting(NamedTuple):
    """What a measurement allows: jobs, their wait, the seconds of a run, and the factor of all times of the work."""

    jobs: int
    queue_seconds: int
    limit: float
    factor: float


FULL = Setting(jobs=4, queue_seconds=15, limit=600.0, factor=1.0)
SHORT = Setting(jobs=2, queue_seconds=2, limit=40.0, factor=0.05)
SIDES: dict[str, Callable[[Path], Any]] = {
    "hpcgpu": lambda place: startup.ours(WORKERS, sys.executable, 0),
    "dask-jobqueue": lambda place: startup.theirs(
        WORKERS, sys.executable, place, 0, job_extra_directives=[f"--gres=gpu:{WORKERS}"]
    ),
}


# The program of one side


def task(seconds: float) -> float:
    """Work so long; return how long it took."""
    began = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - began


def ended(given: Any) -> tuple[str, str]:
    """Return how a task ended, and its seconds or its error, from what `as_completed` gives."""
    if isinstance(given, float):
        return "result", f"{given:.3f}"
    from distributed import KilledWorker

    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, KilledWorker):
        return "lost", str(error)
    return "failed", f"{type(error).__name__}: {str(error)[:300]}"


def program(side: str, work: Work, jobs: int, place: Path) -> None:
    """Do the work on a cluster of one side; write what happens."""
    from distributed import Client, as_completed

    with written_events(place) as note:
        note("start")
        with SIDES[side](place) as cluster, Client(cluster) as client:
            adaptive = cluster.adapt(maximum_jobs=jobs)
            try:
                for number in range(work.rounds):
                    time.sleep(work.pause if number else 0.0)
                    note("begin", number)
                    futures = client.map(task, work.of_round(number), pure=False)
                    # the results come while other tasks run: fetched at the end, they would keep jobs without work
                    for pair in as_completed(futures, with_results=True, raise_errors=False):
                        what, text = ended(pair[1])
                        note(what, number, text)
                    note("end", number)
                    del futures, pair
            finally:
                for at, what in adaptive.log if side == "hpcgpu" else ():
                    note("log", text=f"{at} {what}")


# What happens around it


@dataclass
class Outcome:
    """What one run gave: seconds, GPU seconds, tasks, and 1 if it finished."""

    start: float
    time: float
    response: float
    paid: float
    not_used: float
    scheduler: float
    lost: float
    finished: float


def account(events: list[Event], jobs: Iterable[Job], work: Work) -> Outcome:
    """Return what a run gave that has ended."""
    jobs = list(jobs)
    begins, ends = ({event.number: event.at for event in events if event.what == what} for what in ("begin", "end"))
    results = [float(event.text) for event in events if event.what == "result"]
    complete = len(ends) == work.rounds
    paid, scheduler = (
        sum(job.seconds * job.gpus for job in jobs if job.is_scheduler is which) for which in (False, True)
    )
    return Outcome(
        start=begins[0] - events[0].at if begins else math.inf,
        time=max(ends.values()) - events[0].at if complete else math.inf,
        response=statistics.fmean(at - begins[number] for number, at in ends.items()) if complete else math.inf,
        paid=paid,
        not_used=paid - sum(results),
        scheduler=scheduler,
        lost=sum(event.what == "lost" for event in events),
        finished=len(results) == sum(len(work.of_round(number)) for number in range(work.rounds)),
    )


#: The head of each column of the table, and its width.
COLUMNS = {
    "start": ("start (s)", 10),
    "time": ("time (s)", 15),
    "response": ("response (s)", 14),
    "paid": ("paid (GPU s)", 14),
    "not_used": ("not used (GPU s)", 18),
    "scheduler": ("scheduler (GPU s)", 19),
    "lost": ("lost", 6),
    "finished": ("finished", 10),
}
#: The columns in which less is better, of which hpcgpu's value is divided by the other's.
COMPARED = ("time", "response", "paid", "not_used")


def summary(runs: list[Outcome]) -> dict[str, str]:
    """Return the cells of one side: medians, all lost tasks, and how many runs finished."""
    cells = {}
    for name in (field.name for field in fields(Outcome)):
        median = statistics.median(getattr(run, name) for run in runs)
        cells[name] = f"{median:.1f}" if math.isfinite(median) else "-"
    if cells["time"] == "-":
        cells["time"] = "did not finish"
    cells["lost"] = f"{sum(run.lost for run in runs):.0f}"
    cells["finished"] = f"{sum(run.finished for run in runs):.0f}/{len(runs)}"
    return cells


def ratios(mine: list[Outcome], peer: list[Outcome]) -> dict[str, str]:
    """Return the cells of the ratios of the medians; none unless all runs finished."""
    if not all(run.finished for run in (*mine, *peer)):
        return {}
    cells = {}
    for name in COMPARED:
        a, b = (statistics.median(getattr(run, name) for run in runs) for runs in (mine, peer))
        cells[name] = f"{a / b:.2f}" if b > 0 else "-"
    return cells


def table(outcomes: dict[str, dict[str, list[Outcome]]]) -> str:
    """Return the medians of each workload and side, and their ratios."""
    lines = [" " * 15 + "".join(f"{head:>{width}}" for head, width in COLUMNS.values())]
    for workload, sides in outcomes.items():
        rows = {side: summary(runs) for side, runs in sides.items()} | {"ratio": ratios(*sides.values())}
        lines += [workload, *(row(name, cells) for name, cells in rows.items())]
    return "\n".join(lines)


def row(name: str, cells: dict[str, str]) -> str:
    """Return one line of the table."""
    return f"  {name:13}" + "".join(f"{cells.get(key, '-'):>{width}}" for key, (_, width) in COLUMNS.items())


def story(side: str, recorder: Recorder) -> list[str]:
    """Return what happened in one run: its rounds, its jobs, and what hpcgpu decided."""
    events = read_events(recorder.place)
    start = events[0].at if events else 0.0
    rounds = [event for event in events if event.what in ("begin", "end")]
    lines = [f"  {event.at - start:6.1f} {event.what} of round {event.number}" for event in rounds]
    for job in recorder.jobs.values():
        began, end = job.times
        waited = f"waited {job.waited:.0f} s, {job.gpus} GPUs from {began - start:.0f} to {end - start:.0f} s"
        lines.append(f"  job {job.id} {job.name}: {waited if began else 'did not start'}, {job.state}")
    for event in events:
        if event.what == "log":
            at, _, what = event.text.partition(" ")
            lines.append(f"  {float(at) - start:6.1f} {what}")
    lines += [f"  {event.what}: {event.text}" for event in events if event.what in ("lost", "failed")][:5]
    lines += [f"  {remark}" for remark in recorder.remarks]
    if not any(event.what == "end" for event in events):
        lines.append(f"  {side} wrote: {(recorder.place / 'output').read_text()[-300:].strip()}")
    return lines


def run(name: str, side: str, short: bool, bed: Any, place: Path) -> tuple[Outcome, list[str]]:
    """Run the program of one side, and end it and all jobs."""
    place.mkdir()
    setting = SHORT if short else FULL
    recorder = Recorder(place)
    options = [f"--program={side}", f"--place={place}", f"--workloads={name}", *(["--short"] if short else [])]
    run_program([sys.executable, __file__, *options], recorder, bed, setting.limit, {})
    work = WORKLOADS[name].scaled(setting.factor)
    return account(read_events(place), recorder.jobs.values(), work), story(side, recorder)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a trial that takes some minutes")
    parser.add_argument("--output", type=Path, help="also write the table, and what happened, to this file")
    parser.add_argument("--program", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(chosen: argparse.Namespace, bed: Any, place: Path) -> tuple[dict[str, dict[str, list[Outcome]]], list[str]]:
    """Run the workloads on both sides by turns; return what they gave, and what happened."""
    outcomes: dict[str, dict[str, list[Outcome]]] = {}
    told: list[str] = []
    for name in chosen.workloads:
        outcomes[name] = {side: [] for side in SIDES}
        for turn in range(1 if chosen.short else chosen.repeats):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                outcome, lines = run(name, side, chosen.short, bed, place / f"{name}-{turn}-{side}")
                outcomes[name][side].append(outcome)
                lines.insert(0, f"{name}, {side}:{row('', summary([outcome]))[15:]}")
                print("\n".join(lines), flush=True)
                told += lines
    return outcomes, told


def main() -> None:
    chosen = parsed()
    exit_on_sigterm()
    setting = SHORT if chosen.short else FULL
    if chosen.program:
        work = WORKLOADS[chosen.workloads[0]].scaled(setting.factor)
        return program(chosen.program, work, setting.jobs, chosen.place)
    import bed as slurm_bed
    import build

    text = heading(("distributed", "dask-jobqueue", "dask-cuda"))
    text += f"The queue takes {setting.queue_seconds} s; at most {setting.jobs} jobs of {WORKERS} GPUs; medians.\n"
    text += "".join(f"{name}: {WORKLOADS[name].text}\n" for name in chosen.workloads)
    if chosen.short:
        text += f"A trial: the times of tasks and pauses are multiplied by {setting.factor:g}.\n"
    with tempfile.TemporaryDirectory(prefix="hpcgpu-gpu-hours-") as temporary:
        place = Path(temporary)
        os.environ |= build.environment(build.build(place / "stub")) | {"STUBNVML_COUNT": str(WORKERS)}
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = str(place / "clusters")
        os.environ["DASK_TEMPORARY_DIRECTORY"] = str(place / "dask")
        with slurm_bed.started(place / "slurm", slurm_bed.FAST, setting.queue_seconds) as bed:
            outcomes, told = measure(chosen, bed, place)
    text += f"\n{table(outcomes)}\n"
    print(f"\n{text}")
    if chosen.output:
        story_of_all = "\n".join(["", "Run by run, in seconds from the start of the program:", *told, ""])
        chosen.output.write_text(text + story_of_all)


if __name__ == "__main__":
    main()
