"""Snapshots that no cluster had, and a page that draws them with the module of the widget."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import hpcgpu.widget
from hpcgpu.dask_scheduler.rpc_types import GroupState
from hpcgpu.display.job_info import JobInfo
from hpcgpu.existing_clusters.snapshot import GPUInfo, Snapshot

STATIC = Path(hpcgpu.widget.__file__).parent / "static"
NOW = 1_790_000_000.0
GIB = 2**30


def job(number: int, state: str = "running", reason: str = "", **more: Any) -> JobInfo:
    """A worker job of two GPUs: submitted 10 min ago, and started 7 min ago if it runs."""
    running = state == "running"
    facts: dict[str, Any] = {
        "id": str(4170 + number),
        "kind": "worker",
        "name": f"flights-{number}",
        "state": state,
        "reason": reason,
        "waited": 180.0 if running else 600.0,
        "node": f"n{number:02}" if running else "",
        "workers": 2 if running else 0,
        "log": Path(f"/home/ada/logs/flights-{number}.log"),
        "group": "default",
        "gpus": 2,
        "submitted": NOW - 600,
        "started": NOW - 420 if running else None,
        "time_left": 3180.0 if running else None,
    }
    return JobInfo(**{**facts, **more})


def gpu(number: int, index: int, used: float | None = 80.0, idle: float | None = None) -> GPUInfo:
    """A GPU of that job; `idle`: for how many seconds."""
    return GPUInfo(
        job=f"flights-{number}",
        worker=f"flights-{number}-{index}",
        node=f"n{number:02}",
        model="NVIDIA A100-SXM4-40GB",
        utilization=used,
        memory_used=int(GIB * (0.3 if idle else 12 + 9 * index)),
        memory_total=40 * GIB,
        power=61.0 if idle else 287.0,
        idle_since=None if idle is None else NOW - idle,
    )


def group(**more: Any) -> GroupState:
    """The group `default`, which adapts."""
    facts: dict[str, Any] = {
        "name": "default",
        "target": 4,
        "minimum": 0,
        "maximum": 8,
        "reason": "240 tasks wait, about 4 min of work for 4 jobs",
        "paused": "",
        "gpu_hours": 0.9,
        "maximum_gpu_hours": 20.0,
        "usual_wait": 180.0,
        "gpus_per_node": 4,
        "resources": {"GPU": 1.0},
    }
    return GroupState(**{**facts, **more})  # type: ignore[typeddict-item]


def snapshot(**more: Any) -> Snapshot:
    """A cluster with two jobs that run, one that waits, and one that failed."""
    scheduler = job(0, kind="scheduler", name="flights-scheduler", gpus=1, workers=0, group="", node="n00", waited=20.0)
    facts: dict[str, Any] = {
        "time": NOW,
        "name": "flights",
        "system": "slurm",
        "directory": "/home/ada/.hpcgpu/clusters/flights",
        "state": "running",
        "workers": 4,
        "gpus": 4,
        "scheduler": "tls://n00:8786",
        "dashboard": "http://n00:8787/status",
        "time_left": 6420.0,
        "gpu_hours": 1.02,
        "groups": [group()],
        "jobs": [
            scheduler,
            job(1),
            job(2),
            job(3, "pending", "waits behind jobs with a higher priority [Priority]", expected_start=NOW + 900),
            job(
                4,
                "failed",
                "exit code 1: the log says `CUDA error: out of memory`",
                ended=NOW - 120,
                started=NOW - 300,
                node="n07",
            ),
        ],
        "devices": [gpu(1, 0, 97), gpu(1, 1, 88), gpu(2, 0, 41), gpu(2, 1, 0, idle=260)],
    }
    return Snapshot(**{**facts, **more})


def thousand() -> Snapshot:
    """A cluster of a thousand jobs and two thousand GPUs."""
    jobs = [
        job(number, submitted=NOW - 4000 + number, started=NOW - 3500 + 3 * number, waited=500.0 + 2 * number)
        if number < 800
        else job(number, "pending", "waits behind jobs with a higher priority [Priority]", submitted=NOW - 1000)
        for number in range(1000)
    ]
    devices = [
        gpu(number, index, float((number * 7 + index * 31) % 101), idle=30.0 * number if number % 9 == 0 else None)
        for number in range(800)
        for index in range(2)
    ]
    return snapshot(jobs=jobs, devices=devices, workers=1600, gpus=1600, gpu_hours=1412.0)


#: A page that has the module as `view.update(snapshot)`; what its controls ask for is in `window.asked`.
SCRIPT = """
window.asked = [];
const note = (what) => async (...given) => {
  window.asked.push([what, ...given.filter((one) => typeof one !== "function")]);
  return window.answer?.(what) ?? "";
};
const actions = Object.fromEntries(["scale", "adapt", "stop", "detach", "log"].map((what) => [what, note(what)]));
window.view = clusterView(document.getElementById("place"), { actions });
window.history_of = history;
window.ready = true;
"""


class Drawing:
    """A page with the picture of a cluster."""

    def __init__(self, page: Any, theme: str = "") -> None:
        self.page = page
        page.set_content(f"<body {theme}><div id='place'></div></body>")
        page.add_style_tag(content=(STATIC / "widget.css").read_text())
        page.add_script_tag(content=(STATIC / "panel.js").read_text() + SCRIPT, type="module")
        page.wait_for_function("() => window.ready")
        self.whole = page.locator(".hpcgpu")

    def draw(self, snapshot: Snapshot) -> None:
        """Draw a snapshot; its times count from now."""
        self.page.evaluate("snapshot => window.view.update(snapshot)", json.loads(json.dumps(snapshot.as_json())))

    def asked(self) -> Any:
        """What the controls asked for."""
        return self.page.evaluate("() => window.asked")


PICTURES = Path(__file__).parents[2] / "docs" / "_static"


def kept(part: Any, name: str) -> None:
    """Compare the size of a picture of the docs with what is drawn; or make the picture anew."""
    path = PICTURES / name
    if os.environ.get("HPCGPU_UPDATE_PICTURES"):
        path.parent.mkdir(exist_ok=True)
        part.screenshot(path=str(path))
    box = part.bounding_box()
    size = struct.unpack(">II", path.read_bytes()[16:24])  # fonts differ between machines: the pixels do
    assert abs(size[0] - box["width"]) < 40 and abs(size[1] - box["height"]) < 120, (
        f"docs/_static/{name} is not the picture of today: HPCGPU_UPDATE_PICTURES=1 makes it anew"
    )
    assert path.stat().st_size < 300_000
