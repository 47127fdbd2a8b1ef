"""Connects to a cluster's scheduler, and waits for one that cannot be reached yet.

Worker jobs use it, and programs that connect.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.batch.cadence import Cadence
from hpcgpu.batch.monitor import Monitor
from hpcgpu.batch.reasons import OWN_CANCEL, cancel_of_ours, explain
from hpcgpu.errors import BatchError, CertificateError, LaunchError
from hpcgpu.fabric import certificates
from hpcgpu.store import credentials
from hpcgpu.store.directory import ClusterDirectory, Contact

if TYPE_CHECKING:
    from distributed.core import rpc

__all__ = ["SchedulerWatch", "answers", "check_alone", "no_answer", "scheduler_of", "wait_for_scheduler"]

#: Seconds without a contact after which a worker job first polls for the scheduler job, at the earliest; and its poll
#: interval. There may be a thousand worker jobs that start together, so their first polls are spread over an interval.
FIRST_POLL, _POLL_INTERVAL = 15.0, 60.0
#: Seconds after which a scheduler job that the queue does not know has ended: the second poll finds that.
_GRACE = 45.0


def answers(contact: Contact, directory: ClusterDirectory) -> bool:
    """Whether the cluster's scheduler listens at the contact's address for clients, which is TCP.

    Raises
    ------
    CertificateError
        The certificate has expired or is not yet valid, by the clock of this machine or of the scheduler's.
    """
    scheme, _, location = contact.client.partition("://")
    host, _, port = location.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            if scheme == "tls":
                context = ssl.create_default_context(cafile=directory.tls / "cert.pem")
                context.check_hostname = False
                context.load_cert_chain(directory.tls / "cert.pem", directory.tls / "key.pem")
                with context.wrap_socket(connection) as encrypted:
                    # under TLS 1.3 this fails if the scheduler refuses our certificate; it speaks first
                    encrypted.recv(1)
                    with contextlib.suppress(OSError):
                        encrypted.unwrap()
    except ssl.SSLError as error:
        what = credentials.certificate_name(directory)
        if why := credentials.problem(directory, now=time.time()) or certificates.refusal(error, location, what):
            raise CertificateError(why) from error
        return True  # somebody is there; distributed says better what is wrong
    except (OSError, ValueError):  # ValueError: what is written there is no address
        return False
    return True


def scheduler_of(directory: ClusterDirectory, contact: Contact) -> rpc:
    """Return a connection to the scheduler of a cluster, for ``async with``.

    Its methods are the scheduler's handlers.
    """
    from distributed.core import rpc

    return rpc(contact.client, connection_args=credentials.security(directory).get_connection_args("client"))


class SchedulerWatch:
    """What the queue says of a cluster's scheduler job, polled as often as `hpcgpu.batch.cadence` says.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    cadence : Cadence, optional
    before : callable, optional
        Called before each poll. It raises `BatchError` where the queue must not be polled.
    """

    def __init__(
        self,
        directory: ClusterDirectory,
        batch: BatchSystem,
        cadence: Cadence | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self.monitor = Monitor(batch, cadence=cadence or Cadence(), grace=_GRACE)
        self._before = before

    @property
    def error(self) -> str:
        """Why the last poll failed; empty if it did not."""
        return self.monitor.error

    def poll(self, *, now: float) -> JobStatus | None:
        """Poll if it is time to; return what is known of the job.

        None means that it has no id yet, or that the last poll failed.

        A job that is presumed to have ended is `JobState.FAILED`, with the reason: see
        `hpcgpu.batch.monitor.presumed_ended`.
        """
        submit = next((s for s in self.directory.submits() if s.kind == "scheduler" and not s.refused), None)
        if submit is None or submit.job_id is None:
            return None
        if submit.job_id not in self.monitor.views:
            self.monitor.watch(submit.job_id, submit.name, now=now)
        if self.monitor.cadence.due(now=now):
            try:
                self._before()
            except BatchError as error:
                self.monitor.error = str(error)
                self.monitor.cadence.failed(now=now)
            else:
                self.monitor.poll_if_due(now=now, waiting=True)
        view = self.monitor.views[submit.job_id]
        return view.status if view.polled and not self.error else None


def wait_for_scheduler(directory: ClusterDirectory, batch: BatchSystem, timeout: float) -> Contact:
    """Wait until the scheduler answers; fail as soon as it can no longer come.

    Raises
    ------
    LaunchError
        The scheduler job has ended, the scheduler did not come in time, or the certificate is not valid now.
    """
    began = time.monotonic()
    first = began + FIRST_POLL + random.random() * _POLL_INTERVAL
    watch = SchedulerWatch(directory, batch, Cadence(_POLL_INTERVAL, next_poll=first))
    pause, reported = 0.1, ""
    while True:
        contact = directory.contact()
        try:
            if contact is not None and answers(contact, directory):
                return contact
        except CertificateError as error:
            raise LaunchError(str(error)) from error
        now = time.monotonic()
        status = watch.poll(now=now)
        if watch.error != reported:  # compute nodes may lack the queue's commands
            reported = watch.error
            print(
                f"hpcgpu: cannot query the queue about the scheduler job: {reported}" * bool(reported), file=sys.stderr
            )
        if status is not None and status.state.ended:
            own = cancel_of_ours(status.state, decided=False, ended=status.end, over=directory.over())
            why = OWN_CANCEL if own else explain(status, kind="scheduler")
            raise LaunchError(f"the scheduler job {status.job_id} has ended ({why}): this worker job ends too")
        if now - began > timeout:
            raise LaunchError(
                f"no scheduler answered within {timeout:g} s (death_timeout): {_silence(contact, directory)}"
            )
        time.sleep(pause)
        pause = min(1.0, pause * 1.2)


def no_answer(error: BaseException) -> str:
    """Return why a scheduler did not answer: the words of an error, also of one without words."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time. Its process may be stopped or stuck, or the network may lose its answers"
    return str(error) or type(error).__name__


def _silence(contact: Contact | None, directory: ClusterDirectory) -> str:
    """Return why a scheduler may not have answered, and what to do."""
    if contact is None:
        written = directory.path / "contact.json"
        return (
            f"it did not write {written}. See its log in {directory.logs}. If it only starts slowly, raise "
            "death_timeout"
        )
    return (
        f"{contact.client} does not answer {socket.gethostname()}: set client_interface to a network that worker "
        "nodes reach too, or ask the site about a firewall"
    )


def check_alone(directory: ClusterDirectory, job_id: str) -> None:
    """Refuse to be a second scheduler of a cluster: the script may be submitted by hand while the cluster runs.

    Raises
    ------
    LaunchError
        Another job runs its scheduler.
    """
    contact, name = directory.contact(), directory.path.name
    if contact is None or contact.job_id == job_id:
        return
    host, _, port = contact.client.partition("://")[2].rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        # a scheduler that is too busy for a handshake still accepts a connection
        socket.create_connection((host, int(port)), timeout=5).close()
        raise LaunchError(
            f"cluster {name} already has a scheduler, in job {contact.job_id}. A second one would take its clients "
            f"and workers. To start again, first run: hpcgpu stop {directory.in_shell}"
        )
