"""What `hpcgpu top` draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpcgpu.cli.top import picture
from hpcgpu.display.job_info import JobInfo
from hpcgpu.existing_clusters.snapshot import GPUInfo, Snapshot

NOW = 1e9


def job(**facts: Any) -> JobInfo:
    about = {"id": "4711", "kind": "worker", "name": "demo-0", "state": "running", "reason": "", "waited": 300.0}
    return JobInfo(**(about | {"node": "n1", "workers": 1, "log": Path("log"), "gpus": 2} | facts))


def gpu(**facts: Any) -> GPUInfo:
    about = {"job": "demo-0", "worker": "demo-0-0", "model": "NVIDIA A100-SXM4-40GB", "utilization": 87.0}
    return GPUInfo(**(about | {"memory_used": 30 * 2**30, "memory_total": 40 * 2**30, "power": 312.4} | facts))


def drawn(width: int = 80, height: int | None = None, first: int = 0, error: str = "", **facts: Any) -> list[str]:
    about: dict[str, Any] = {"time": NOW, "name": "demo", "system": "slurm", "directory": "/x", "state": "running"}
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(
            picture(Snapshot(**(about | facts)), now=NOW, width=width, height=height, first=first, error=error)
        )
    return capture.get().splitlines()


def test_jobs_gpus_and_clocks_fit_into_eighty_columns() -> None:
    lines = drawn(
        workers=1,
        gpus=2,
        time_left=7000.0,
        gpu_hours=12.345,
        jobs=[
            job(name="demo-1", id="4712", state="pending", node="", reason="no free nodes", expected_start=NOW + 600),
            job(time_left=3500.0),
            job(name="demo-scheduler", kind="scheduler", id="4710", time_left=7000.0),
            job(name="demo-9", id="4700", state="completed"),
        ],
        devices=[gpu(), gpu(worker="demo-0-1", utilization=0.0, idle_since=NOW - 200)],
    )
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split("   ") == [
        "1 worker",
        "2 GPUs, 1 idle, 44 % in use",
        "time left 1 h 57 min",
        "12.35 GPU hours",
    ]
    text = "\n".join(line.rstrip() for line in lines)
    assert text.index("4710  demo-scheduler") < text.index("4711  demo-0") < text.index("4712  demo-1")
    assert "running, 58 min left" in text and "pending for 5 min" in text
    assert "no free nodes; the queue expects to start it in 10 min" in text
    assert "demo-0-0  █████░  87 %  ████░░  30.00 GiB  312 W  A100-SXM4-40GB" in text
    assert "idle 3 min" in text and "demo-9" not in text, "a job that has ended costs nothing any more"


def test_reasons_and_warnings_are_wrapped_and_not_cut() -> None:
    reason = "waits until other jobs end, because the group m1234 may use at most 64 GPUs at a time [AssocGrpGRES]"
    found = {"jobs": [job(state="pending", reason=reason)], "warnings": [reason], "problem": reason}
    for height in (None, 24):
        lines = [line.strip() for line in drawn(height=height, **found)]
        assert " ".join(lines).count(reason) == 3 and all(len(line) <= 80 for line in lines)


def test_what_is_not_known_of_a_gpu_is_not_invented() -> None:
    [line] = [
        line
        for line in drawn(jobs=[job()], devices=[gpu(utilization=None, memory_used=None, power=None)])
        if "demo-0-0" in line
    ]
    assert "use not known" in line and "GiB" not in line and "W" not in line.replace("GPU", "")


@pytest.mark.parametrize("first", [0, 500, 995])
def test_of_a_thousand_jobs_as_many_are_shown_as_fit(first: int) -> None:
    jobs = [job(name=f"demo-{number}", id=str(number)) for number in range(1000)]
    lines = drawn(height=24, first=first, jobs=jobs)
    assert len(lines) <= 24
    assert any(line.startswith(f"{first} ") for line in lines) and "arrows move" in lines[-1]


def test_old_pictures_warnings_and_foreign_text_are_named_as_what_they_are() -> None:
    lines = drawn(
        time=NOW - 60,
        error="the queue is away",
        warnings=["job 7 failed\nand its log"],
        jobs=[job(reason="\x1b[31m[red]x[/red]")],
    )
    assert "warning: job 7 failed" in lines and "problem: the queue is away" in lines and "as of 60 s ago" in lines
    assert any(r"\x1b[31m[red]x[/red]" in line for line in lines)
