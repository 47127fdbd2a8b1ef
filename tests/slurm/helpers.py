"""What several test modules of the real Slurm use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bed import SlurmBed, call, wait_for

from hpcgpu import SlurmGPUCluster

#: The scheduler job goes to the node with the cheap GPU.
_BASE: dict[str, Any] = {
    "queue": "gpu",
    "scheduler": {"queue": "shared", "prefer": "t4"},
    "protocol": "tcp",
    "poll_interval": 1,
    "quiet": True,
}
A100: dict[str, Any] = _BASE | {
    "walltime": "02:00:00",
    "gpus_per_node": 4,
    "gpu_type": "a100",
    "cores": 4,
    "memory": "4GB",
}
CPU: dict[str, Any] = _BASE | {"gpus_per_node": 0, "cores": 1, "memory": "1GB"}


def in_queue(bed: SlurmBed) -> list[str]:
    return [job.name for job in bed.squeue() if job.state != "COMPLETING"]


def submits(cluster: SlurmGPUCluster) -> list[str]:
    """Ids of all worker jobs that the journal records, and that the queue accepted."""
    lines = [json.loads(line) for line in (cluster.directory.path / "journal.jsonl").read_text().splitlines()]
    return [line["id"] for line in lines if line["event"] == "submitted" and not line["name"].endswith("-scheduler")]


def stop(name: str) -> None:
    """End a cluster that has no program, by the command."""
    argv = [sys.executable, "-m", "hpcgpu", "stop", name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def run_script(script: Path, *options: str) -> int:
    """Submit a script, and return its exit code when it has ended. `sbatch --wait` polls after 2, 10, 42 and 74 s."""
    job = call("sbatch", "--parsable", *options, str(script)).strip()

    ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"}
    shown = dict[str, str]()

    def over() -> bool:
        answer = call("scontrol", "show", "job", job, check=False)  # a busy controller may be too late with it
        shown.update(re.findall(r"\b(JobState|ExitCode)=([^\s:]+)", answer))
        return shown.get("JobState") in ended

    wait_for(over, f"the job of {script} ends", timeout=300, interval=0.2)
    code = int(shown["ExitCode"])
    assert code or shown["JobState"] == "COMPLETED", f"the job of {script} is {shown['JobState']}"
    return code
