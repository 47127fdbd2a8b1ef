"""`hpcgpu demo`, whole, on the embedded queue."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fake_slurm import Site

from hpcgpu.batch.local.queue import LocalQueue


def test_the_demo_runs_on_the_embedded_queue_where_slurm_is_installed_and_does_not_answer(
    queue: LocalQueue, home: Path
) -> None:
    slurm = Site(home)
    slurm.fault(
        "squeue",
        stdout="",
        stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
        rc=1,
        always=True,
    )
    environment = os.environ | {"PATH": f"{slurm.bin}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "hpcgpu", "demo"], capture_output=True, text=True, timeout=250, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (
        "Slurm cannot be used: `squeue` failed: slurm_load_jobs error: Unable to contact slurm controller"
        in done.stdout
    )
    assert "This runs on the queue embedded in hpcgpu" in done.stdout and "336,776 flights" in done.stdout
    assert re.search(r"^First result: \d+\.\d s after the start of the demo$", done.stdout, re.MULTILINE)
    assert "no job of this cluster is left" in done.stdout
    assert "has not reported" not in done.stdout and "pending" not in done.stdout, "what answers is shown as running"
