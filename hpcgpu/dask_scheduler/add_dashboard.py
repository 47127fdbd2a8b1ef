"""Adds the dashboard to a scheduler that listens already.

The import of the dashboard takes as long as a third of all other steps of a scheduler's start. So ``dask scheduler``
starts without it, and the first workers and clients connect meanwhile: that takes the CPU, too.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from distributed.http import get_handlers
from tornado.web import Application, RequestHandler

from hpcgpu.dask_scheduler import gpu_dashboard_page
from hpcgpu.dask_scheduler.rpc_types import GPUState
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime import dashboard_access

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.hpcgpu")

#: Seconds in which the first workers usually join. The import begins after them, or when somebody opens a page.
_FIRST_WORKERS = 10.0


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
        gpu_dashboard_page.add(scheduler, gpus, cluster)
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
