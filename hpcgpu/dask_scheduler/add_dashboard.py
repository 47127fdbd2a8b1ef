"""Adds the dashboard to a scheduler that listens already.

The import of the dashboard takes as long as a third of all other steps of a scheduler's start. So ``dask scheduler``
starts without it, and workers and clients can connect meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.http import get_handlers

from hpcgpu.dask_scheduler import gpu_dashboard_page
from hpcgpu.dask_scheduler.rpc_types import GPUState
from hpcgpu.runtime import dashboard_access

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


async def add_dashboard(scheduler: Scheduler, gpus: Callable[[], list[GPUState]], cluster: str) -> None:
    """Add Dask's pages, and those of hpcgpu. Requests wait for them.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        It started without a dashboard; its HTTP server is a `GuardedServer`.
    gpus : callable
        Returns the GPUs of all workers.
    cluster : str
        Its name.
    """
    application, server = scheduler.http_application, scheduler.http_server
    with server.guard.incomplete():
        try:
            dashboard = await asyncio.to_thread(importlib.import_module, "distributed.dashboard.scheduler")
        except ImportError:  # no Bokeh, or a release that Dask does not support: this page says so
            missing = get_handlers(server=scheduler, modules=["distributed.http.scheduler.missing_bokeh"])
            application.add_handlers(".*", missing)
            return
        dashboard_access.escape_text()
        dashboard.connect(application, server, scheduler, prefix="/")
        try:
            gpu_dashboard_page.add(scheduler, gpus, cluster)
        except Exception as error:  # an unknown release of Dask or Bokeh: the cluster works without the page
            print(f"hpcgpu: the dashboard has no page /hpcgpu: {error!r}", file=sys.stderr, flush=True)
