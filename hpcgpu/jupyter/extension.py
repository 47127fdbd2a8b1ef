"""The handlers that the extension adds to a Jupyter server, by address."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from jupyter_server.utils import url_path_join

from hpcgpu import widget
from hpcgpu.client import jupyter_dashboard_link
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.errors import HpcgpuError
from hpcgpu.jupyter.api import Clusters, Logs, OneCluster, Profiles, Request
from hpcgpu.jupyter.busy_kernels import Message
from hpcgpu.jupyter.dashboard_proxy import Dashboard
from hpcgpu.jupyter.page import Page, Static
from hpcgpu.jupyter.snapshots import Snapshots
from hpcgpu.runtime import dashboard_frame

_NAME = r"([^/]+)"


def load(server: Any) -> None:
    """Add the handlers, and announce them to the kernels of this server."""
    application = server.web_app
    base = application.settings["base_url"]
    snapshots = {"snapshots": Snapshots()}
    folders = {
        "folders": [Path(__file__).parent / "static", Path(widget.__file__).parent / "static", dashboard_frame.SCRIPTS]
    }
    handlers: list[tuple[Any, ...]] = [
        (r"/?", Page),
        (r"/static/([A-Za-z0-9_-]+\.(?:js|css|svg))", Static, folders),
        (r"/api/clusters", Clusters, snapshots),
        (rf"/api/clusters/{_NAME}", OneCluster, snapshots),
        (rf"/api/clusters/{_NAME}/(scale|adapt|detach|stop)", Request, snapshots),
        (rf"/api/clusters/{_NAME}/logs", Logs),
        (r"/api/profiles", Profiles),
    ]
    inboxes: Path | None = None
    if hasattr(socket, "AF_UNIX"):  # not on Windows
        with contextlib.suppress(OSError):  # the disk is full, for example: all else works
            inboxes = Path(tempfile.mkdtemp(prefix="hpcgpu-jupyter-"))
            atexit.register(shutil.rmtree, inboxes, ignore_errors=True)
            handlers.append((r"/api/inboxes/([0-9a-f]+)", Message, {"inboxes": inboxes}))
    here = url_path_join(base, "hpcgpu")
    routes = [(here + pattern, *rest) for pattern, *rest in handlers]
    routes += [
        (url_path_join(base, prefix) + rf"/{_NAME}(/.*|)", Dashboard) for prefix in jupyter_dashboard_link.PREFIXES
    ]
    application.add_handlers(".*$", routes)
    roots: list[Path] = []
    with contextlib.suppress(HpcgpuError):  # the configuration is wrong: the API reports it
        roots = cluster_directories()
    jupyter_dashboard_link.announce(base, roots, inboxes)
