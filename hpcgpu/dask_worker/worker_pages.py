"""The pages of a worker in Dask's dashboard: they are there when one of them is requested.

Few people open them, and the import of Bokeh takes as long as half of all other imports of a worker. So a worker starts
with ``--no-dashboard``, unless its user has chosen (`hpcgpu.runtime.complete_dask_commands.postpone_pages`). Its HTTP
server listens nevertheless.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.dashboard_access import ServerWithToken

if TYPE_CHECKING:
    from distributed.worker import Worker

logger = logging.getLogger("distributed.hpcgpu")

#: The variable with the prefix of the pages, if they are added.
WORKER_PAGES = "HPCGPU_WORKER_PAGES"
#: The tasks that wait for the first request: asyncio does not keep them.
_waiting: set[asyncio.Task[None]] = set()


def add_when_requested(worker: Worker) -> None:
    """Add Dask's pages of a worker to its HTTP server once one of them is requested. That request waits.

    Parameters
    ----------
    worker : distributed.Worker
        Nothing is added unless the variable of its job requests it, and its HTTP server is a `ServerWithToken`.
    """
    prefix = os.environ.get(WORKER_PAGES)
    if prefix is not None and isinstance(worker.http_server, ServerWithToken):
        incomplete = ExitStack()
        incomplete.enter_context(worker.http_server.token_check.incomplete())  # from now on, not when the task begins
        task = asyncio.create_task(_add_when_requested(worker, worker.http_server, prefix, incomplete))
        _waiting.add(task)
        task.add_done_callback(_waiting.discard)


async def _add_when_requested(worker: Worker, server: ServerWithToken, prefix: str, incomplete: ExitStack) -> None:
    with incomplete:
        await server.token_check.request_waits()
        try:
            # a worker that ends meanwhile would wait for a thread of asyncio
            pages = await in_thread(importlib.import_module, "distributed.dashboard.worker")
            pages.connect(worker.http_application, server, worker, prefix=prefix)
        except ImportError:
            logger.info("hpcgpu: this worker has no pages in the dashboard, because Bokeh is not installed")
        except Exception as error:  # an unknown release of Dask or Bokeh: the worker works
            logger.exception("hpcgpu: this worker has no pages in the dashboard: %r", error)
