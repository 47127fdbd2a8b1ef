"""Record the tasks of the examples, for `adaptive_sim.py` to replay: how long each takes, and which others it needs.

The examples run as they are, on distributed's own LocalCluster in place of a queue. The result is
``benchmarks/recorded_tasks.json``. Run it with ``python benchmarks/record_tasks.py``.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from distributed import LocalCluster, Scheduler, SchedulerPlugin

import hpcgpu

EXAMPLES = Path(__file__).parents[1] / "examples"
RECORD = Path(__file__).with_name("recorded_tasks.json")


class Recorder(SchedulerPlugin):
    """Takes note of each task that a worker has computed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tasks: dict[str, tuple[float, list[str]]] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note how long it took, in seconds, and what it needed."""
        if (start, finish) == ("processing", "memory"):
            took = sum(s["stop"] - s["start"] for s in kwargs["startstops"] if s["action"] == "compute")
            self.tasks[str(key)] = took, [str(need.key) for need in self.scheduler.tasks[key].dependencies]


class Recorded(LocalCluster):
    """The cluster of an example, whatever it asks for."""

    recorder: Recorder

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None)
        self.recorder = Recorder(self.scheduler)
        self.scheduler.add_plugin(self.recorder)
        made.append(self)
        self.jobs: list[str] = []

    def job_script(self) -> str:
        """The examples print it."""
        return ""

    def wait_for_workers(self, *args: Any, **kwargs: Any) -> None:
        """They are there."""


made: list[Recorded] = []


def main() -> None:
    """Record and write."""
    vars(hpcgpu).update(LocalGPUCluster=Recorded, SlurmGPUCluster=Recorded)
    recorded = {}
    for name, arguments in {"flights": [], "slurm": ["any"]}.items():
        sys.argv = [name, *arguments]
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        tasks = made.pop().recorder.tasks
        numbers = {key: number for number, key in enumerate(tasks)}
        recorded[name] = [
            [round(took, 5), [numbers[need] for need in needs if need in numbers]] for took, needs in tasks.values()
        ]
    RECORD.write_text(json.dumps(recorded, separators=(",", ":")).replace("]],[", "]],\n[") + "\n")


if __name__ == "__main__":
    main()
