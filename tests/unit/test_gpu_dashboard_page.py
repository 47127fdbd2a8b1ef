"""The page of the Dask dashboard that shows GPUs by job."""

from __future__ import annotations

from typing import Any

import pytest

from hpcgpu.dask_scheduler import gpu_dashboard_page
from hpcgpu.dask_scheduler.rpc_types import GPUState


def gpu(worker: str, **facts: Any) -> GPUState:
    about = {"node": "n1", "model": "", "utilization": 50.0, "memory_used": 1, "memory_total": 4, "power": None}
    return GPUState(**(about | {"worker": worker, "idle_since": None} | facts))  # type: ignore[typeddict-item]


def test_the_bars_are_grouped_by_job_and_idle_ones_have_a_colour_of_their_own() -> None:
    found = [gpu("my-run-0-1"), gpu("my-run-12", idle_since=7.0, utilization=None, memory_used=None)]
    drawn = gpu_dashboard_page.columns(found, "my-run")
    assert drawn["gpu"] == [("my-run-0", "my-run-0-1 on n1"), ("my-run-12", "my-run-12 on n1")]
    assert (drawn["use"], drawn["memory"]) == ([50.0, 100.0], [25.0, 0.0])
    assert drawn["words"] == ["", "not known; no task runs"], "a grey bar, as the legend says"
    assert len(set(drawn["colour"])) == 2


def test_the_page_follows_the_gpus() -> None:
    document = pytest.importorskip("bokeh.document").Document()
    there = [gpu("demo-0")]
    gpu_dashboard_page._fill(document, lambda: there, "demo")
    there.append(gpu("demo-1"))
    [callback] = document.session_callbacks
    callback.callback()
    [plot] = document.roots
    assert plot.y_range.factors == [("demo-0", "demo-0 on n1"), ("demo-1", "demo-1 on n1")]
    assert plot.renderers[0].data_source.data["use"] == [50.0, 50.0]
    assert plot.title.text == "GPUs by job"
    there[:] = [gpu("demo-0", utilization=None, memory_used=None)]
    callback.callback()
    assert "no NVML" in plot.title.text
    assert plot.renderers[0].data_source.data["words"] == ["not known; a task runs"]
    there[:] = [gpu("demo-0", utilization=0.0, idle_since=7.0), gpu("demo-1")]
    callback.callback()
    assert plot.renderers[0].data_source.data["words"] == ["idle", ""], "a bar of 0 per cent has no colour"
    there.clear()
    callback.callback()
    assert plot.title.text == "GPUs by job: no worker with a GPU is connected"
