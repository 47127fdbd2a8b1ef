"""A way to the dashboard of a cluster from where a browser is: a proxy's, a forward's, or that of ssh.

Who brings the token to a dashboard first lets it prove that it is the cluster's: when a scheduler has ended, any user
of its node may listen on its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlencode

from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.dashboard import PROOF, proof
from hpcgpu.store.directory import ClusterDirectory

__all__ = ["Place", "forward", "listening", "place", "ssh_command"]

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
#: Seconds for the proof, and bytes that are copied at once.
_TIMEOUT, _PIECE = 10.0, 64 * 1024


@dataclass(frozen=True)
class Place:
    """Where a dashboard listens, and its token.

    Attributes
    ----------
    host : str
        As in a URL: an IPv6 address is in brackets.
    port : int
    token : str
    node : str
        The host of the scheduler's address for clients: its node.
    """

    host: str
    port: int
    token: str
    node: str = ""

    def link(self, local_port: int) -> str:
        """Return the link with the token through a forward from a port of the browser's machine."""
        return f"http://localhost:{local_port}/status?{urlencode({'token': self.token})}"


def place(directory: ClusterDirectory) -> Place:
    """Return where the dashboard of a cluster listens, as its contact says now.

    Raises
    ------
    ClusterError
        It has none now, or its contact is damaged.
    """
    contact, token, name = directory.contact(), directory.dashboard_token(), directory.path.name
    if contact is None or not contact.dashboard or not token:
        raise ClusterError(
            f"cluster {name} has no dashboard, because its scheduler is not running. `hpcgpu status {name}` says why"
        )
    host, _, port = contact.dashboard.rpartition(":")
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(f"the dashboard of cluster {name} is at {contact.dashboard!r}, which is no host and port")
    node = contact.client.partition("://")[2].rpartition(":")[0]
    return Place(host, int(port), token, node)


def listening(directory: ClusterDirectory) -> Place:
    """Return where the dashboard of a cluster listens, after it has proved that it is the cluster's.

    Raises
    ------
    ClusterError
        It has none, it does not answer, or another program listens there.
    """
    there, name, nonce = place(directory), directory.path.name, secrets.token_hex(32)
    connection = HTTPConnection(there.host.strip("[]"), there.port, timeout=_TIMEOUT)
    try:
        with contextlib.closing(connection):
            connection.request("GET", f"{PROOF}?nonce={nonce}")
            answer = connection.getresponse().read(len(nonce) + 1)
    except (OSError, HTTPException) as error:
        raise ClusterError(
            f"the dashboard of cluster {name} at {there.host}:{there.port} does not answer: {error}. `hpcgpu status "
            f"{name}` says whether its scheduler runs"
        ) from error
    if not hmac.compare_digest(answer, proof(there.token, nonce).encode()):
        raise ClusterError(
            f"at {there.host}:{there.port}, where cluster {name} had its dashboard, another program listens now: it "
            f"does not know the cluster's token. `hpcgpu status {name}` says whether the scheduler runs"
        )
    return there


def ssh_command(there: Place, user: str, login_node: str) -> str:
    """Return the command for the user's own computer that forwards a port of it to a dashboard.

    A dashboard that listens on its node alone is reached by ssh to that node, through the login node.
    """
    forwarded = f"{there.port}:{there.host}:{there.port}"
    if _loopback(there.host) and there.node and not _loopback(there.node):
        return shlex.join(["ssh", "-N", "-J", f"{user}@{login_node}", "-L", forwarded, f"{user}@{there.node}"])
    return shlex.join(["ssh", "-N", "-L", forwarded, f"{user}@{login_node}"])


def _loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("localhost", "[::1]")


async def forward(
    directory: ClusterDirectory,
    port: int,
    *,
    ready: Callable[[int], None],
    refused: Callable[[str], None],
) -> None:
    """Forward a port of this machine's 127.0.0.1 to the dashboard, until cancelled.

    Other users of this machine reach that port too; the dashboard asks them for its token.

    Parameters
    ----------
    directory : ClusterDirectory
        Its contact is read anew for each connection.
    port : int
        0 for any.
    ready : callable
        Is given the port.
    refused : callable
        Is given why a connection was closed at once.

    Raises
    ------
    OSError
        Another program has the port.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # cancelled by Ctrl-C: Python 3.11 prints a traceback for each connection that is cancelled
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError):
            try:
                there = await in_thread(listening, directory)
                onward = await asyncio.open_connection(there.host.strip("[]"), there.port)
            except (HpcgpuError, OSError) as error:
                refused(str(error))
                return
            with contextlib.closing(onward[1]):
                await asyncio.gather(_copy(reader, onward[1]), _copy(onward[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        ready(server.sockets[0].getsockname()[1])
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
