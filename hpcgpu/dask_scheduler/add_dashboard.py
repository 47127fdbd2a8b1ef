"""Adds the dashboard to a scheduler that listens already: the pages of Dask, and ``/hpcgpu`` with the GPUs by job.

The import of the dashboard takes as long as a third of all other steps of a scheduler's start. So ``dask scheduler``
starts without it, and the first workers and clients connect meanwhile: that takes the CPU, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tornado.ioloop import IOLoop

from hpcgpu.dask_scheduler.rpc_types import GPUState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

import asyncio
import importlib
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from distributed.http import get_handlers
from tornado.web import Application, RequestHandler

from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime import dashboard_access

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.hpcgpu")

#: Seconds in which the first workers usually join. The import begins after them, or when somebody opens a page.
_FIRST_WORKERS = 10.0
#: The page of the GPUs.
_PATH = "/hpcgpu"
#: Milliseconds between two pictures.
_INTERVAL = 1000
#: GPUs that are drawn; a page with more is no longer readable.
_DRAWN = 200
_BUSY, _IDLE, _UNKNOWN, _MEMORY = "#4c8c2b", "#d9a400", "#999999", "#5b7db1"


async def add_dashboard(scheduler: Scheduler, gpus: Callable[[], list[GPUState]], cluster: str) -> None:
    """Add Dask's pages, and those of hpcgpu, once one of them is requested, or ten seconds later. Requests wait.

    If there is an error, the cluster works without a dashboard: its pages and the log say why.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        It started without a dashboard; its HTTP server is a `ServerWithToken`.
    gpus : callable
        Returns the GPUs of all workers.
    cluster : str
        Its name.
    """
    server = scheduler.http_server
    if not isinstance(server, dashboard_access.ServerWithToken):
        logger.error("hpcgpu: the cluster has no dashboard: its HTTP server does not require the token")
        return
    with server.token_check.incomplete():
        with suppress(TimeoutError):
            await asyncio.wait_for(server.token_check.request_waits(), _FIRST_WORKERS)
        try:
            await _add(scheduler, gpus, cluster)
        except Exception as error:  # an unknown release of Dask or Bokeh, or a driver that fails
            why = f"{type(error).__name__}: {error}"
            logger.exception("hpcgpu: the cluster works, but has no dashboard: %s", why)
            # an application of its own comes after Dask's routes, which need no Bokeh
            scheduler.http_application.add_application(Application([(".*", _NoDashboard, {"why": why})]))


async def _add(scheduler: Scheduler, gpus: Callable[[], list[GPUState]], cluster: str) -> None:
    application = scheduler.http_application
    try:
        # a scheduler that ends meanwhile would wait for a thread of asyncio
        dashboard = await in_thread(importlib.import_module, "distributed.dashboard.scheduler")
    except ImportError as error:  # no Bokeh, or a release that Dask does not support: this page says so
        logger.warning("hpcgpu: the cluster works, but has no dashboard: %s", error)
        missing = get_handlers(server=scheduler, modules=["distributed.http.scheduler.missing_bokeh"])
        application.add_handlers(".*", missing)
        return
    dashboard_access.escape_text()
    dashboard.connect(application, scheduler.http_server, scheduler, prefix="/")
    try:
        _add_page(scheduler, gpus, cluster)
    except Exception as error:  # an unknown release of Dask or Bokeh: the cluster works without the page
        write_stderr(f"the dashboard has no page /hpcgpu: {error!r}")


class _NoDashboard(RequestHandler):
    """Says on every page why there is no dashboard."""

    def initialize(self, why: str) -> None:
        self.why = why

    def get(self) -> None:
        self.set_status(503)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(
            f"The cluster works, but has no dashboard: {self.why}\n\nThe log of the scheduler job has the traceback.\n"
        )


def _add_page(scheduler: Scheduler, gpus: Callable[[], list[GPUState]], cluster: str) -> None:
    """Add the page of the GPUs, which shows them by job, to the dashboard of a scheduler."""
    from distributed.dashboard.core import BokehApplication

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
