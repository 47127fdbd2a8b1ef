"""Routes from a browser to the dashboard of a cluster: by a proxy, by a forwarded port, or by ssh.

A program first requires a proof from a dashboard that it is the cluster's, and only then sends the token: when a
scheduler has ended, any user of its node may listen on its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import shlex
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode

from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.posix.threads import in_thread, run
from hpcgpu.posix.user import user_name
from hpcgpu.runtime.dashboard_access import PROOF, link, link_with_token, proof
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
#: Limits for the proof: seconds in all, and bytes of the answer.
_TIMEOUT, _ANSWER = 10.0, 4096
#: Bytes that are copied at once.
_PIECE = 64 * 1024


@dataclass(frozen=True)
class DashboardEndpoint:
    """Where a dashboard listens, and its token.

    Attributes
    ----------
    host : str
        As in a URL: an IPv6 address is in brackets.
    port : int
    token : str
    node : str
        The host of the scheduler's address for clients: its node.
    secure : bool
        Whether it has a certificate of the site: HTTPS.
    """

    host: str
    port: int
    token: str
    node: str = ""
    secure: bool = False

    def link(self, local_port: int) -> str:
        """Return the link with the token through a forward from a port of the browser's machine."""
        return f"http{'s' * self.secure}://localhost:{local_port}/status?{urlencode({'token': self.token})}"


def endpoint(directory: ClusterDirectory, contact: Contact | None = None) -> DashboardEndpoint:
    """Return where the dashboard of a cluster listens, as a contact records; by default that of its directory.

    Raises
    ------
    ClusterError
        It has none now, or its contact is damaged.
    """
    contact, token, name = contact or directory.contact(), directory.dashboard_token(), directory.path.name
    if contact is None or not contact.dashboard or not token:
        raise ClusterError(
            f"cluster {name} has no dashboard, because its scheduler is not running. To see why, run: hpcgpu status "
            f"{directory.in_shell}"
        )
    host, _, port = contact.dashboard.rpartition(":")
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(
            f"the address of the dashboard of cluster {name} is {contact.dashboard!r}, which is not a host and a port: "
            f"{directory.path} is damaged. To end the cluster, run: hpcgpu stop {directory.in_shell}"
        )
    node = contact.client.partition("://")[2].rpartition(":")[0]
    return DashboardEndpoint(host, int(port), token, node, secure=link(contact).startswith("https:"))


async def listening(directory: ClusterDirectory, contact: Contact | None = None) -> DashboardEndpoint:
    """Return where the dashboard of a cluster listens, after it has proved that it is the cluster's.

    The time limit is for the whole proof, so a program that sends a byte now and then delays nobody for longer.

    Raises
    ------
    ClusterError
        It has none, it does not answer, or another program listens there.
    """
    there, nonce = await in_thread(endpoint, directory, contact), secrets.token_hex(32)
    name, at = directory.path.name, f"{there.host}:{there.port}"
    try:
        async with asyncio.timeout(_TIMEOUT):
            proved = await _proves(there, nonce)
    except OSError as error:
        why = str(error) or f"no proof came within {_TIMEOUT:g} s"
        raise ClusterError(
            f"the dashboard of cluster {name} at {at} does not answer: {why}. To see whether its scheduler runs, "
            f"run: hpcgpu status {directory.in_shell}"
        ) from error
    if not proved:
        raise ClusterError(
            f"at {at}, where cluster {name} had its dashboard, another program listens now: it did not prove that it "
            f"knows the cluster's token. To see whether the scheduler runs, run: hpcgpu status {directory.in_shell}"
        )
    return there


async def _proves(there: DashboardEndpoint, nonce: str) -> bool:
    """Whether the program that listens there has the token, and is itself the one that was reached.

    The proof does not use a certificate, even if the dashboard has one.
    """
    secure = ssl.create_default_context() if there.secure else None
    if secure is not None:
        secure.check_hostname, secure.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(there.host.strip("[]"), there.port, ssl=secure)
    with contextlib.closing(writer):
        expected = proof(there.token, nonce, writer.get_extra_info("peername"))
        request = f"GET {PROOF}?nonce={nonce} HTTP/1.1\r\nHost: {there.host}:{there.port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        answer = b""
        while len(answer) < _ANSWER and (piece := await reader.read(_ANSWER)):
            answer += piece
    return hmac.compare_digest(answer.rpartition(b"\r\n\r\n")[2], expected.encode())


def proven_link(directory: ClusterDirectory, contact: Contact | None) -> str:
    """Return the link with the token, after the dashboard has proved that it is the cluster's; empty without one.

    Raises
    ------
    ClusterError
        It does not answer, or another program listens there.
    """
    if found := link_with_token(directory, contact):
        run(listening(directory, contact))
    return found


def ssh_command(there: DashboardEndpoint, user: str = "", login_node: str = "") -> str:
    """Return the command for the user's own computer that forwards a port of it to a dashboard.

    If a dashboard listens only on its own node, ssh connects to that node through the login node. By default, this user
    is the user, and this machine is the login node.
    """
    user, login_node = user or user_name(), login_node or socket.getfqdn()
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
        Its contact is read again for each connection.
    port : int
        0 for any.
    ready : callable
        Called with the port.
    refused : callable
        Called with the reason why a connection was closed at once.

    Raises
    ------
    OSError
        Another program uses the port.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # cancelled by Ctrl-C: Python 3.11 prints a traceback for each connection that is cancelled
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError):
            try:
                there = await listening(directory)
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
