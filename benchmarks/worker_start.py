"""What the workers of one job cost to start: forks of a warm process against spawned ones, by turns.

For each number of GPUs a job of `dask cuda worker` starts on pretended GPUs, on the embedded queue, beside a scheduler
that already runs. Measured: seconds from the submit until all workers are connected; CPU seconds of all processes of
the job until then; their memory, where shared pages count in parts (PSS). Run it with
``python benchmarks/worker_start.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu_stub")]


@dataclass
class Run:
    """What one start cost."""

    seconds: float
    cpu: float
    pss: float


def processes(setting: str) -> list[Path]:
    """Return the processes that have a setting, NAME=VALUE, in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{setting}\0".encode() in (process / "environ").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


def cpu_and_memory(processes: list[Path]) -> tuple[float, float]:
    """Return CPU seconds, with those of ended children, and PSS in MiB."""
    ticks, kilobytes = 0, 0
    for process in processes:
        try:
            ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
            rollup = (process / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        kilobytes += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return ticks / os.sysconf("SC_CLK_TCK"), kilobytes / 1024


def measure(gpus: int, worker_start: str) -> Run:
    """Start a scheduler, then one job, and close."""
    from hpcgpu import LocalGPUCluster

    with LocalGPUCluster(
        gpus_per_node=gpus, scheduler={"gpus_per_node": 0}, protocol="tcp", worker_start=worker_start, quiet=True
    ) as cluster:
        started = time.monotonic()
        cluster.scale(jobs=1)
        while len(cluster.scheduler_info["workers"]) < gpus:
            time.sleep(0.02)
        seconds = time.monotonic() - started
        return Run(seconds, *cpu_and_memory(processes(f"HPCGPU_JOB_NAME={cluster.name}-0")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    import build

    with tempfile.TemporaryDirectory() as temporary:
        os.environ.update(build.environment(build.build(Path(temporary) / "stub")))
        os.environ["STUBNVML_COUNT"] = str(max(arguments.gpus))
        os.environ["HPCGPU_QUEUE_DIRECTORY"] = f"{temporary}/queue"
        os.environ["DASK_HPCGPU__CLUSTER_DIRECTORY"] = f"{temporary}/clusters"
        from hpcgpu.batch.local.queue import LocalQueue

        LocalQueue(Path(temporary) / "queue", gpus=max(arguments.gpus)).check()
        measure(2, "spawn")  # not counted: it fills the page cache
        print(f"{'GPUs':>4} {'':12} {'all connected (s)':>18} {'CPU (s)':>9} {'PSS (MiB)':>10}")
        for gpus in arguments.gpus:
            runs: dict[str, list[Run]] = {"spawn": [], "forkserver": []}
            for _ in range(arguments.repeat):
                for way, done in runs.items():
                    done.append(measure(gpus, way))
            medians = {}
            for way, done in runs.items():
                medians[way] = [statistics.median(getattr(r, name) for r in done) for name in ("seconds", "cpu", "pss")]
                seconds, cpu, pss = medians[way]
                print(f"{gpus:>4} {way:12} {seconds:>18.1f} {cpu:>9.1f} {pss:>10.0f}", flush=True)
            seconds, cpu, pss = (a / b for a, b in zip(medians["forkserver"], medians["spawn"], strict=True))
            print(f"{gpus:>4} {'ratio':12} {seconds:>18.2f} {cpu:>9.2f} {pss:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
