"""The Jupyter server that this program belongs to, if it has our extension.

The extension announces itself in the environment, which kernels inherit. A program uses this only if the server is its
parent, according to Jupyter, or the program itself, and only for clusters that the server finds too. In all other cases
the server counts as unknown.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import dask

from hpcgpu.errors import Damaged
from hpcgpu.posix import json_records

_VARIABLE = "HPCGPU_JUPYTER_SERVER"
#: Paths of the dashboards on the server. dask-labextension opens only paths below ``proxy/`` unchanged.
PREFIXES = ("hpcgpu/dashboard", "proxy/hpcgpu")
#: Dask's default. If the user has set another link, that one stays.
_DASHBOARD_LINK = "{scheme}://{host}:{port}/status"


@dataclass(frozen=True)
class _Server:
    pid: int
    base_url: str
    directories: list[str]
    inboxes: str = ""


def announce(base: str, directories: Iterable[Path], inboxes: Path | None = None) -> None:
    """Announce to the kernels of this server that it has the extension, and in which directories it finds clusters.

    In `inboxes` widgets listen for messages that it passes on.
    """
    server = _Server(os.getpid(), base, list(map(str, directories)), str(inboxes or ""))
    os.environ[_VARIABLE] = json.dumps(asdict(server))


def inboxes(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where widgets listen for messages that the server passes on; None if it passes none on."""
    server = _announced(environ)
    return Path(server.inboxes) if server is not None and server.inboxes else None


def dashboard_link(directory: Path, environ: Mapping[str, str] = os.environ, *, running: bool = True) -> str:
    """Return the path of a cluster's dashboard on that server; empty if it is not known, not `running`, or if Dask's
    configuration has another link.

    In the server only dask-labextension makes clusters. It reads the link of a new cluster once, before the scheduler
    runs, and then requests it until it is served.
    """
    server = _announced(environ)
    in_server = server is not None and server.pid == os.getpid()
    configured = dask.config.get("distributed.dashboard.link", _DASHBOARD_LINK) != _DASHBOARD_LINK
    if server is None or str(directory.parent) not in server.directories or configured or not (running or in_server):
        return ""
    prefix = PREFIXES[in_server]
    return f"{server.base_url.rstrip('/')}/{prefix}/{directory.name}/status"


def with_host(link: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a path of that server as an address for a browser, if Jupyter says where browsers reach the server.

    A JupyterHub provides this address if its configuration contains it. A server under a path prefix without a hub is
    behind a proxy, such as that of Open OnDemand. Only browsers know the address of such a proxy.
    """
    if not link.startswith("/") or not (pid := environ.get("JPY_PARENT_PID")):
        return link
    if public := environ.get("JUPYTERHUB_PUBLIC_URL"):
        return urljoin(public, link)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ImportError):
        from jupyter_core.paths import jupyter_runtime_dir

        address = str(json.loads(Path(jupyter_runtime_dir(), f"jpserver-{int(pid)}.json").read_text())["url"])
        if urlsplit(address).scheme in ("http", "https") and urlsplit(address).path == "/":
            return urljoin(address, link)
    return link


def _announced(environ: Mapping[str, str]) -> _Server | None:
    try:
        server = json_records.parse(environ.get(_VARIABLE, "").encode(), _Server, _VARIABLE)
    except Damaged:
        return None
    ours = server.pid == os.getpid() or environ.get("JPY_PARENT_PID") == str(server.pid)
    return server if ours else None
