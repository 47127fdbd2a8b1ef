"""A cluster that is reached through a login node, by ssh: its address here, its credentials, its next scheduler.

The keys stay in the memory of this program.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from distributed import Client

from hpcgpu.client import lost_scheduler
from hpcgpu.errors import ClusterError, HostError, HpcgpuError
from hpcgpu.fabric.security import ClusterSecurity
from hpcgpu.posix import json_records
from hpcgpu.posix.threads import in_thread
from hpcgpu.ssh.login import Answer, Login, check_host
from hpcgpu.ssh.tunnel import ADDRESSES, Tunnel
from hpcgpu.store.contact import Contact

_NAME = re.compile(r"([^/:]+(?:@[^/:]+)?):(.+)", re.DOTALL)
#: Seconds between two attempts to ask the login node, and how often it is tried.
_AGAIN, _ATTEMPTS = 10.0, 90
#: Seconds that a new connection of a client may take: the machine may sleep, or be between two networks.
TIMEOUT = 900


@dataclass(frozen=True, kw_only=True)
class ReachedScheduler:
    """What a login node reports of a scheduler.

    Attributes
    ----------
    contact : Contact
    directory : str
        The cluster directory on that host.
    certificate, key, ucx_key : str
        Its credentials; without TLS the first two are empty.
    dashboard : str
        Link with the token, of the dashboard that has proved that it is the cluster's; empty if none has.
    on_scheduler_end : str
        The option of that name.
    workers_per_job : int
        Workers of each job of the default group.
    """

    contact: Contact
    directory: str
    workers_per_job: int
    certificate: str = ""
    key: str = ""
    ucx_key: str = ""
    dashboard: str = ""
    on_scheduler_end: str = ""


@dataclass(frozen=True, kw_only=True)
class NextScheduler:
    """What a login node reports of a scheduler that may have ended.

    Attributes
    ----------
    scheduler : ReachedScheduler or None
        The one that follows; None if there is none, or if the earlier one lives.
    why : str
        Why the earlier one has ended; empty if that is not known.
    lives : bool
        Whether the earlier one has proved that it lives.
    """

    scheduler: ReachedScheduler | None
    why: str
    lives: bool


def host_and_name(name: object) -> tuple[str, str] | None:
    """Split ``login1:demo``, or ``login1:/path/of/its/directory``; None for a cluster of this machine."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return (check_host(found[1]), found[2]) if found is not None else None


_tunnels: dict[tuple[str, str], Tunnel] = {}
_lock = threading.Lock()


def tunnel_of(login: Login) -> Tunnel:
    """Return the tunnel to a login node; all clusters of this program there share it.

    Raises
    ------
    HostError
        It cannot be opened.
    """
    with _lock:
        if (there := _tunnels.get((login.host, login.python))) is None:
            there = Tunnel(login)
            there.open()
            _tunnels[login.host, login.python] = there
        return there


@atexit.register
def close_tunnels() -> None:
    """End all connections through login nodes, at the end of the program."""
    with _lock:
        for tunnel in _tunnels.values():
            tunnel.close()
        _tunnels.clear()


#: By the address of a scheduler for clients of this program.
_reached: dict[str, ReachedCluster] = {}


def cluster_of(client: Client) -> ReachedCluster | None:
    """Return the cluster of a login node to which a client belongs; None if it belongs to none."""
    return _reached.get(getattr(client.scheduler, "address", ""))


class ReachedCluster:
    """A cluster of a login node.

    Parameters
    ----------
    login : Login
    name : str
        Its name there, or the path of its directory there.
    scheduler : ReachedScheduler
    """

    def __init__(self, login: Login, name: str, scheduler: ReachedScheduler) -> None:
        if not scheduler.ucx_key:
            raise ClusterError(
                f"cluster {name} has no security: it is not reached by ssh, because all users of this machine could "
                "use the way to it. Start it without security=False"
            )
        self.login, self.name, self.scheduler = login, name, scheduler
        self.tunnel = tunnel_of(login)
        self._dashboard_port: int | None = None
        self._port = self.tunnel.forward(lambda: _host_and_port(self.scheduler.contact.client))
        protocol = scheduler.contact.client.partition("://")[0]
        #: The address of its scheduler for clients of this program. It stays the same for the next scheduler.
        self.address = f"{protocol}://127.0.0.1:{self._port}"
        self.security = _security(scheduler)
        _reached[self.address] = self
        ADDRESSES.add(self.address)
        lost_scheduler.explain_loss(self.address, self._why)
        lost_scheduler.follow(self.address, self._next_address)

    def close(self) -> None:
        """Close the ports of this machine that lead to the cluster. The connections that exist stay."""
        for port in (self._port, self._dashboard_port):
            if port is not None:
                self.tunnel.stop_forwarding(port)

    def dashboard_link(self, *, token: bool = False) -> str:
        """Return the address of the dashboard on this machine; empty while there is none."""
        link = urlsplit(self.scheduler.dashboard)
        if not link.netloc:
            return ""
        if self._dashboard_port is None:
            self._dashboard_port = self.tunnel.forward(lambda: _host_and_port(self.scheduler.dashboard))
        here = f"127.0.0.1:{self._dashboard_port}"
        return urlunsplit((link.scheme, here, link.path, link.query if token else "", ""))

    def call(self, *arguments: str) -> Answer:
        """Run a command of hpcgpu on the login node; see `Login.call`."""
        return self.login.call(arguments, show_errors=False)

    async def _why(self) -> str:
        found = await self._following("--why")
        if found is not None and found.lives:
            return f"the connection through {self.login.host} broke, and the scheduler lives: run your work again"
        return found.why if found is not None else ""

    async def _next_address(self) -> str:
        """Wait for the next scheduler, or for the way to this one if it lives; empty if there is none."""
        found = await self._following()
        if found is not None and found.scheduler is not None:
            self.scheduler = found.scheduler
        return self.address if found is not None and (found.lives or found.scheduler is not None) else ""

    async def _following(self, *more: str) -> NextScheduler | None:
        """Return what the login node answers, as soon as it can be reached; None if it cannot."""
        arguments = ("contact", "--after", self.scheduler.contact.job_id, *more, "--", self.name)
        for _ in range(_ATTEMPTS):
            try:
                answer = await in_thread(self.call, *arguments)
                return json_records.parse(answer.output, NextScheduler, f"the answer of {self.login.host}")
            except HostError:
                await asyncio.sleep(_AGAIN)
            except HpcgpuError:
                return None
        return None


def reach_cluster(login: Login, name: str, *, timeout: float | None, quiet: bool) -> ReachedCluster:
    """Wait until the scheduler of a cluster of a login node answers there, and open the way to it.

    Raises
    ------
    HostError
        ssh fails, or hpcgpu is not there.
    ClusterError, TimeoutError, BatchError
        As for a cluster of this machine.
    """
    limit: Sequence[str] = ("--timeout", str(timeout)) if timeout is not None else ()
    answer = login.call_again(["contact", "--wait", *limit, "--", name], show_errors=not quiet)
    scheduler = json_records.parse(answer.output, ReachedScheduler, f"the answer of {login.host}")
    return ReachedCluster(login, name, scheduler)


def _host_and_port(address: str) -> tuple[str, int]:
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise ClusterError(f"the address of the scheduler, {address!r}, is not a host and a port")


def _security(scheduler: ReachedScheduler) -> ClusterSecurity:
    """Return credentials that are in memory alone."""
    files = {}
    if scheduler.certificate:
        files = {
            "tls_ca_file": scheduler.certificate,
            "tls_client_cert": scheduler.certificate,
            "tls_client_key": scheduler.key,
        }
    return ClusterSecurity(bytes.fromhex(scheduler.ucx_key), **files)
