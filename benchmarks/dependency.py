"""How long after the start of one job Slurm starts another that waits for it, on a Slurm with default scheduling.

``python benchmarks/dependency.py`` starts a Slurm of its own (tests/slurm/bed.py, as root), and jobs that only write
down when they began. Three ways: no dependency, a dependency, and a dependency where the first job changes its own job,
as the scheduler jobs of hpcgpu do.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "slurm"))

CHANGE = 'scontrol update "JobId=$SLURM_JOB_ID" "JobName=$SLURM_JOB_NAME"'
#: Whether the second job depends on the first, and what the first one does.
WAYS = {"no dependency": (False, ""), "dependency": (True, ""), "dependency, job changes": (True, CHANGE)}


def seconds(bed: Any, place: Path, depends: bool, command: str) -> float:
    """Start two jobs, and return how much later the second one began."""

    def submit(name: str, command: str, *arguments: str) -> str:
        script = place / f"{name}.sh"
        script.write_text(
            f'#!/bin/bash\necho "$EPOCHREALTIME" > {place}/{name}.new\nmv {place}/{name}.new {place}/{name}\n'
        )
        with script.open("a") as file:
            file.write(f"{command}\nsleep 100\n")
        argv = ["sbatch", "--parsable", f"--output={place}/log", "--mem=100", *arguments, str(script)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    first = submit("first", command, "--partition=shared", "--gres=gpu:1")
    after = [f"--dependency=after:{first}"] if depends else []
    submit("second", "", "--partition=gpu", "--gres=gpu:4", *after)
    begun = [place / name for name in ("first", "second")]
    while not all(path.exists() for path in begun):
        time.sleep(0.05)
    times = [float(path.read_text()) for path in begun]
    for path in begun:
        path.unlink()
    bed.cancel_all()
    bed.wait_empty()
    return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    import bed as slurm_bed

    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as temporary, slurm_bed.started(Path(temporary) / "slurm") as bed:
        for _ in range(arguments.repeat):
            for way, (depends, command) in WAYS.items():
                measured[way].append(seconds(bed, Path(temporary), depends, command))
    print(f"{'way':26}{'median (s)':>11}{'from':>7}{'to':>7}")
    for way, times in measured.items():
        print(f"{way:26}{statistics.median(times):>11.1f}{min(times):>7.1f}{max(times):>7.1f}")


if __name__ == "__main__":
    main()
