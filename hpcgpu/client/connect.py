"""A Dask client for an existing cluster: ``hpcgpu.connect("NAME")``. It does not manage or take over the cluster."""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.security import Security

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.reasons import explain
from hpcgpu.client import jupyter_dashboard_link, lost_scheduler, reached_by_ssh
from hpcgpu.configuration.resolve import cluster_directories
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.display.progress import Progress
from hpcgpu.display.warn import warn
from hpcgpu.errors import CertificateError, ClusterError, Damaged
from hpcgpu.existing_clusters.lookup import batch_of, directories, locate
from hpcgpu.existing_clusters.query_jobs import check_queue
from hpcgpu.options import values
from hpcgpu.posix.threads import in_thread
from hpcgpu.runtime.scheduler_connection import SchedulerWatch, answers
from hpcgpu.scaling.scheduler_restarts import ended_too_early
from hpcgpu.software.compare_environments import EnvironmentCheck, environments
from hpcgpu.ssh.login import Login
from hpcgpu.store import certificates_and_keys, saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: The directories of the clusters that this program has connected to, by the address of the scheduler.
_connected_to: dict[str, Path] = {}
_plain_link = Client.dashboard_link.fget


def directory_of(client: Client) -> Path | None:
    """Return the directory of the cluster that a client of an address belongs to; None if it is not known."""
    address = getattr(client.scheduler, "address", "")
    return None if client.cluster is not None else _connected_to.get(address) or lost_scheduler.followed.get(address)


def _dashboard_link(client: Client) -> str:
    path = directory_of(client)
    link = jupyter_dashboard_link.dashboard_link(path) if path is not None else ""
    return jupyter_dashboard_link.with_host(link) or _plain_link(client)


#: A client of an address has no cluster, so its link would bypass the Jupyter server and open a page that asks for a
#: token.
Client.dashboard_link = property(_dashboard_link, doc=Client.dashboard_link.__doc__)


class ClientBySSH(Client):  # type: ignore[misc]
    """A client of a cluster of a login node. A notebook shows the cluster.

    Parameters
    ----------
    reached : ReachedCluster
        The way to its scheduler.
    **arguments
        Of `distributed.Client`.
    """

    _shown: Any = None

    def __init__(self, reached: reached_by_ssh.ReachedCluster, **arguments: Any) -> None:
        self.reached = reached
        super().__init__(reached.address, **arguments)

    def _ipython_display_(self, **_: Any) -> None:
        if self._shown is None:  # only notebooks need the layers above this one
            self._shown = importlib.import_module("hpcgpu.cluster.cluster_by_ssh").ClusterBySSH.of_client(self)
        self._shown._ipython_display_()


def connect(
    name: str | Path,
    *,
    timeout: float | str | None = None,
    quiet: bool = False,
    asynchronous: bool = False,
    environment_check: str = "error",
    **arguments: Any,
) -> Client | Awaitable[Client]:
    """Return a Dask client for a cluster that another program or ``hpcgpu start`` has started.

    Wait until its scheduler answers.

    Parameters
    ----------
    name : str or Path
        Name of the cluster, or the path of its directory. ``"login1:demo"`` is the cluster of that name on a login
        node, which is reached by ssh: see the page on laptops.
    timeout : number or str, optional
        Seconds, or a text with a unit. Default: none; the queue may take days.
    quiet : bool, default False
        No progress messages.
    asynchronous : bool, default False
        Return an awaitable.
    environment_check : {"error", "warn", "off"}, default "error"
        What happens if software or GPUs of this program and the cluster do not work together; see the option of that
        name.
    **arguments
        Arguments of `distributed.Client`.

    Raises
    ------
    OptionError
        `environment_check` or `timeout` has a value that is not allowed, or `name` is not a name or path.
    NoCluster
        There is no cluster of that name.
    OtherFormat
        Another version of hpcgpu made the cluster.
    NotTrusted
        Another user can write to its directory.
    Damaged
        A file of its directory does not hold what hpcgpu writes.
    BatchError
        The batch system does not answer, or the cluster is in another queue.
    ClusterError
        It was closed, its scheduler job has ended, or the software of this program does not work with the cluster's.
    HostError
        The login node cannot be reached by ssh, or hpcgpu is not there.
    TimeoutError
        The scheduler did not answer within `timeout`.
    """
    comparison = EnvironmentCheck(values.choice("error", "warn", "off")("environment_check", environment_check))
    limit = values.time_limit("connect: timeout", timeout)
    wait = _wait(name, limit, quiet)
    if asynchronous:
        return _connected(wait, comparison, arguments)
    client = wait()(arguments)
    try:
        client.sync(_compare, client, comparison)
    except ClusterError:
        client.close()
        raise
    return client


def _wait(name: str | Path, timeout: float | None, quiet: bool) -> Callable[[], Callable[[dict[str, Any]], Client]]:
    """Return a function that waits for the scheduler; it returns a function that makes a client."""
    if (elsewhere := reached_by_ssh.host_and_name(name)) is not None:
        host, own_name = elsewhere

        def wait_by_ssh() -> Callable[[dict[str, Any]], Client]:
            reached = reached_by_ssh.reach_cluster(Login(host), own_name, timeout=timeout, quiet=quiet)
            return lambda arguments: _client_by_ssh(reached, arguments)

        return wait_by_ssh
    directory = locate(name)

    def wait() -> Callable[[dict[str, Any]], Client]:
        contact = wait_for_contact(directory, timeout=timeout, quiet=quiet)
        return lambda arguments: _client(directory, contact, arguments)

    return wait


async def _connected(
    wait: Callable[[], Callable[[dict[str, Any]], Client]], comparison: EnvironmentCheck, arguments: dict[str, Any]
) -> Client:
    make = await in_thread(wait)
    client = await make({"asynchronous": True, **arguments})
    try:
        await _compare(client, comparison)
    except ClusterError:
        await client.close()
        raise
    return client


async def _compare(client: Client, comparison: EnvironmentCheck) -> None:
    """Raise or warn if this program, the scheduler and the workers are incompatible."""
    if comparison.mode == "off":
        return
    comparison.scheduler = await client.scheduler.hpcgpu_environment()
    fatal, warning = comparison.check(environments((await client.scheduler.identity(n_workers=-1))["workers"]))
    if fatal:
        raise ClusterError(fatal)
    if warning:
        warn(warning)


def security_for(client: Mapping[str, Any]) -> Security | None:
    """Return the credentials of the cluster whose scheduler has an address; None if it is no cluster of ours.

    Dask calls it for ``Client(address)`` without a security, if it is configured as
    ``distributed.client.security-loader``: ``hpcgpu jupyter-config`` does so.

    Parameters
    ----------
    client : mapping
        It has the ``address``.

    Raises
    ------
    NotTrusted
        Another user can write to the directory of that cluster.
    """
    for directory in (found for root in cluster_directories() for found in directories(root)):
        with suppress(OSError, Damaged):
            contact = directory.contact()
            if contact is not None and contact.client == client["address"]:
                there = ClusterDirectory.existing(directory.path)
                _connected_to[contact.client] = there.path
                lost_scheduler.explain_loss_by_queue(contact, there)
                return certificates_and_keys.security(there)
    return None


def _client(directory: ClusterDirectory, contact: Contact, arguments: dict[str, Any]) -> Client:
    ClusterDirectory.existing(directory.path)  # the wait for the scheduler may have been long
    _connected_to[contact.client] = directory.path
    lost_scheduler.explain_loss_by_queue(contact, directory)
    return Client(
        contact.client,
        **{"name": f"hpcgpu-{directory.path.name}", "security": certificates_and_keys.security(directory), **arguments},
    )


def _client_by_ssh(reached: reached_by_ssh.ReachedCluster, arguments: dict[str, Any]) -> Client:
    name, timeout = f"hpcgpu-{reached.name.rpartition('/')[2]}", reached_by_ssh.TIMEOUT
    own = {"name": name, "direct_to_workers": False, "timeout": timeout}
    return ClientBySSH(reached, **{**own, "security": reached.security, **arguments})


def wait_for_contact(directory: ClusterDirectory, *, timeout: float | None = None, quiet: bool = False) -> Contact:
    """Wait until a cluster's scheduler answers, and show the reason for the wait.

    Raises
    ------
    ClusterError
        It was closed, its scheduler job has ended, or its certificate is not valid now.
    TimeoutError
        The time is over.
    """
    name, began = directory.path.name, time.monotonic()
    batch = batch_of(directory)
    watch = SchedulerWatch(directory, batch, before=lambda: check_queue(directory, batch))
    following = lost_scheduler.FollowingJobs(directory)
    submitted = directory.created
    with Progress(quiet) as progress:
        while True:
            if directory.closing:
                raise ClusterError(directory.how_it_ended())
            contact = directory.contact()
            if contact is not None and directory.has_ended(contact.job_id):
                contact = None  # its scheduler has ended, and another one may follow
            try:
                if contact is not None and answers(contact, directory):
                    return contact
            except CertificateError as error:
                raise ClusterError(str(error)) from error
            now = time.monotonic()
            status = watch.poll(now=now)
            follows = (
                status is not None
                and ended_too_early(status.state)
                and lost_scheduler.restarts_scheduler(directory, status.job_id, following)
            )
            if status is not None and status.state.ended and not follows:
                log = saved_options.logs(directory) / batch.log_name(status.name, status.job_id)
                raise ClusterError(f"the scheduler of cluster {name} is gone: {_words(status)}. Log: {log}")
            if timeout is not None and now - began > timeout:
                raise TimeoutError(
                    f"the scheduler of cluster {name} did not answer within {timeout:g} s: {_words(status, contact)}"
                )
            progress.update(
                f"cluster {name}: waiting for its scheduler",
                f"{_words(status, contact)}, for {duration(time.time() - submitted)}",
            )
            time.sleep(0.5)


def _words(status: JobStatus | None, contact: Contact | None = None) -> str:
    runs = status is not None and status.state is JobState.RUNNING and not status.halted
    if contact is not None and (status is None or runs):
        return (
            f"it listens on {contact.client}, which does not answer {socket.gethostname()}. Its process may be stopped "
            "or stuck. If this machine does not reach that network, set client_interface to one that it reaches, or "
            "run this program on a compute node; `hpcgpu check --in-job` shows which networks it reaches"
        )
    if status is None:
        return "the queue says nothing about its job"
    if runs:
        return f"scheduler job {status.job_id} runs on {status.node or 'its node'}"
    return f"scheduler job {status.job_id} {status.state.value}: {explain(status, kind='scheduler')}"
