"""A page of the Dask dashboard, ``/hpcgpu``: the GPUs of the cluster by job."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tornado.ioloop import IOLoop

from hpcgpu.dask_scheduler.rpc_types import GPUState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


_PATH = "/hpcgpu"
#: Milliseconds between two pictures.
_INTERVAL = 1000
#: GPUs that are drawn; a page with more is no longer readable.
_DRAWN = 200
_BUSY, _IDLE, _UNKNOWN, _MEMORY = "#4c8c2b", "#d9a400", "#999999", "#5b7db1"


def add(scheduler: Scheduler, gpus: Callable[[], list[GPUState]], cluster: str) -> None:
    """Add the page to the dashboard of a scheduler, if it has one.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Its HTTP server already listens.
    gpus : callable
        Returns the GPUs of all workers.
    cluster : str
        Its name.
    """
    if scheduler.http_server is None:
        return
    try:
        from distributed.dashboard.core import BokehApplication
    except ImportError:  # no Bokeh, or a release that Dask does not support: there is no dashboard
        return

    def document(server: Scheduler, extra: dict[str, Any], doc: Any) -> None:
        _fill(doc, gpus, cluster)

    application = BokehApplication({_PATH: document}, scheduler)
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()


def columns(gpus: Sequence[GPUState], cluster: str) -> dict[str, list[Any]]:
    """Return the columns of the plot, one list each: bars by job and worker, in per cent.

    Parameters
    ----------
    gpus : sequence of GPUState
    cluster : str
        Its name: workers are called after their jobs, ``CLUSTER-NUMBER``.
    """
    drawn, job = gpus[:_DRAWN], re.compile(rf"{re.escape(cluster)}-[0-9]+")
    jobs = [found.group() if (found := job.match(gpu["worker"])) else gpu["worker"] for gpu in drawn]
    used = [100 * (gpu["memory_used"] or 0) / (gpu["memory_total"] or 1) for gpu in drawn]
    return {
        "gpu": [(name, f"{gpu['worker']} on {gpu['node']}") for name, gpu in zip(jobs, drawn, strict=True)],
        "use": [100.0 if gpu["utilization"] is None else gpu["utilization"] for gpu in drawn],
        "memory": used,
        "colour": [_colour(gpu) for gpu in drawn],
        "words": [_words(gpu) for gpu in drawn],
    }


def title(gpus: Sequence[GPUState]) -> str:
    """Return the title above the bars, also why there are no bars or why all are grey."""
    if not gpus:
        return "GPUs by job: no worker with a GPU is connected"
    if all(gpu["utilization"] is None for gpu in gpus):
        return "GPUs by job: the driver does not say how much they are in use (no NVML); the words say if tasks run"
    return "GPUs by job"


def _fill(doc: Any, gpus: Callable[[], list[GPUState]], cluster: str) -> None:
    from bokeh.models import ColumnDataSource, FactorRange, Range1d
    from bokeh.plotting import figure
    from bokeh.transform import dodge

    found = gpus()
    first = columns(found, cluster)
    source = ColumnDataSource(first)
    where: Any = FactorRange(*first["gpu"])
    plot: Any = figure(
        y_range=where,
        x_range=Range1d(start=0, end=100),
        x_axis_label="per cent",
        title=title(found),
        tools="",
        sizing_mode="stretch_width",
        height=_height(first["gpu"]),
    )
    bars = (("use", "colour", -0.2, "time in use (yellow: idle, grey: not known)"), ("memory", _MEMORY, 0.2, "memory"))
    for column, colour, offset, label in bars:
        plot.hbar(
            y=dodge("gpu", offset, range=where),
            right=column,
            height=0.35,
            color=colour,
            source=source,
            legend_label=label,
        )

    words = dodge("gpu", -0.2, range=where)
    plot.text(x=1, y=words, text="words", source=source, text_baseline="middle", text_font_size="11px")

    def update() -> None:
        found = gpus()
        latest = columns(found, cluster)
        source.data, plot.title.text = latest, title(found)
        if where.factors != latest["gpu"]:
            where.factors, plot.height = latest["gpu"], _height(latest["gpu"])

    doc.title = "hpcgpu: GPUs by job"
    doc.add_root(plot)
    doc.add_periodic_callback(update, _INTERVAL)


def _colour(gpu: GPUState) -> str:
    if gpu["utilization"] is None:
        return _UNKNOWN
    return _IDLE if gpu["idle_since"] is not None else _BUSY


def _words(gpu: GPUState) -> str:
    if gpu["utilization"] is not None:  # the bar of an idle GPU is too short to be seen
        return "" if gpu["idle_since"] is None else "idle"
    return "not known; no task runs" if gpu["idle_since"] is not None else "not known; a task runs"


def _height(bars: Sequence[Any]) -> int:
    """Return the height in pixels of a plot with this number of bars."""
    return 120 + 30 * len(bars)
