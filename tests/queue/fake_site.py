"""The pretended Slurm, as seen by a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import state as locked_state

HERE = Path(__file__).parent
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct")


class Site:
    """The state of the pretended Slurm, and what a test does with it."""

    def __init__(self, folder: Path, cluster: str = "alpha") -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.script = folder / "job.sbatch"
        self.bin.mkdir()
        self.script.write_text("#!/bin/bash\n")
        self.state = folder / "state.json"
        nothing = {
            "cluster": cluster,
            "next_id": 101,
            "jobs": {},
            "faults": {},
            "late": {},
            "calls": [],
            "accounting": {},
        }
        self.state.write_text(json.dumps(nothing))
        program = (HERE / "fake_slurm.py").read_text()
        for name in COMMANDS:
            self.replace(name, f"#!{sys.executable} -IS\n{program}")

    def replace(self, name: str, text: str) -> Path:
        """Put a program of the test's own in the place of a command."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def remove(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have no such command, nor a real one elsewhere on the PATH."""
        monkeypatch.setenv("PATH", str(self.bin))
        (self.bin / name).unlink()

    def change(self, act: Callable[[dict[str, Any]], None]) -> None:
        """Change the state between two commands."""
        with locked_state(str(self.folder)) as state:
            act(state)

    def fault(self, command: str, **fault: Any) -> None:
        """Let the next call of a command that has no fault yet go wrong; see fake_slurm."""
        self.change(lambda state: state["faults"].setdefault(command, []).append(fault))

    def job(self, job_id: int | str, state: str = "PENDING", **fields: str) -> str:
        """Have a job; `fields` are named by squeue's letters."""
        job = {"T": state, "N": "", "S": "N/A", "e": "N/A", "j": f"job-{job_id}", "r": "None"} | fields
        self.change(lambda site: site["jobs"].__setitem__(str(job_id), job))
        return str(job_id)

    def jobs(self, **fields: str) -> list[str]:
        """Ids of the jobs with these fields."""
        with locked_state(str(self.folder)) as state:
            return [i for i, job in state["jobs"].items() if fields.items() <= job.items()]

    def calls(self, command: str) -> list[list[str]]:
        """Arguments of each call of a command."""
        return [arguments for name, arguments, _ in self._calls() if name == command]

    def environments(self) -> list[dict[str, str]]:
        """Environment of each call of any command."""
        return [environment for _, _, environment in self._calls()]

    def _calls(self) -> list[tuple[str, list[str], dict[str, str]]]:
        with locked_state(str(self.folder)) as state:
            return [tuple(call) for call in state["calls"]]
