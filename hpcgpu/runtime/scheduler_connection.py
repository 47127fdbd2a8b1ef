"""Connects to a cluster's scheduler, and waits if it cannot be reached yet.

Worker jobs use it, and programs that connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from hpcgpu.batch.base import BatchSystem, JobStatus
from hpcgpu.batch.reasons import OWN_CANCEL, cancel_of_ours, explain
from hpcgpu.errors import BatchError, CertificateError, LaunchError
from hpcgpu.fabric import certificate_errors
from hpcgpu.polling.poll_interval import Cadence
from hpcgpu.polling.queue_monitor import Monitor
from hpcgpu.posix.full_disk import file_error
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.posix.threads import in_thread
from hpcgpu.scaling.scheduler_restarts import ended_too_early
from hpcgpu.store import certificates_and_keys
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.journal import Submit
from hpcgpu.store.present_scheduler import present_scheduler

if TYPE_CHECKING:
    from distributed.core import rpc

_T = TypeVar("_T")

#: Least seconds without a contact before a worker job's first poll for the scheduler job; and its poll interval. A
#: thousand worker jobs may start together, so their first polls are spread over one interval.
FIRST_POLL, _POLL_INTERVAL = 15.0, 60.0
#: How much longer the intervals are while a job waits for a scheduler that is restarted, perhaps for hours.
_LONG_WAIT = 5.0
#: Seconds after which a scheduler job that the queue does not list counts as ended, at the second poll.
_GRACE = 45.0
#: Seconds for a connection, and for each step of its handshake.
_TIMEOUT = 5.0
#: Seconds without an answer of a scheduler before it is looked up whether anybody listens at its address.
_NO_ANSWER = 1.0


class ConnectionResult(enum.Enum):
    """What happens to a connection to the address of a scheduler."""

    ACCEPTED = "the scheduler of the cluster accepts it, as far as its protocol proves that"
    BUSY = "it is accepted, and no more happens: the scheduler may be busy, or another program listens there"
    REFUSED = "it is refused: nobody listens there any more, or another program does"
    SILENT = "there is no answer: the network may have failed, or the node"


def answers(contact: Contact, directory: ClusterDirectory) -> bool:
    """Whether the cluster's scheduler listens at the contact's address for clients, which is TCP.

    Raises
    ------
    CertificateError
        The certificate has expired or is not yet valid, by the clock of this machine or of the scheduler's.
    """
    try:
        with _connect(contact) as connection:
            _prove(connection, contact, directory)
    except ssl.SSLError as error:
        if why := _certificate_error(error, contact, directory):
            raise CertificateError(why) from error
        return True  # a program listens; distributed reports better what is wrong
    except (OSError, ValueError):
        return False
    return True


def identify(contact: Contact, directory: ClusterDirectory) -> ConnectionResult:
    """Return whether the cluster's scheduler listens at the contact's address for clients.

    A port of a scheduler that has ended may belong to another program. TLS proves who listens; under other protocols
    whoever accepts counts as the scheduler.
    """
    try:
        connection = _connect(contact)
    except ConnectionRefusedError:
        return ConnectionResult.REFUSED
    except (OSError, ValueError):
        return ConnectionResult.SILENT
    with connection:
        try:
            _prove(connection, contact, directory)
        except ssl.SSLError as error:
            why = _certificate_error(error, contact, directory)
            return ConnectionResult.BUSY if why else ConnectionResult.REFUSED
        except OSError:  # also files of this cluster
            return ConnectionResult.BUSY
    return ConnectionResult.ACCEPTED


def proves_life(found: ConnectionResult, contact: Contact) -> bool:
    """Whether the scheduler of a contact certainly lives, whatever the queue and the journal report: TLS proves it."""
    return found is ConnectionResult.ACCEPTED and contact.client.startswith("tls://")


def _prove(connection: socket.socket, contact: Contact, directory: ClusterDirectory) -> None:
    """Let the scheduler prove by TLS that it has the key of the cluster."""
    if not contact.client.startswith("tls://"):
        return
    context = ssl.create_default_context(cafile=directory.tls / "cert.pem")
    context.check_hostname = False
    context.load_cert_chain(directory.tls / "cert.pem", directory.tls / "key.pem")
    with context.wrap_socket(connection) as encrypted:
        # under TLS 1.3 this fails if the scheduler refuses our certificate; it speaks first
        encrypted.recv(1)
        with contextlib.suppress(OSError):
            encrypted.unwrap()


def _certificate_error(error: ssl.SSLError, contact: Contact, directory: ClusterDirectory) -> str:
    """Return why the certificate cannot be used now; empty if another program listens."""
    what = certificates_and_keys.certificate_name(directory)
    location = contact.client.partition("://")[2]
    return certificates_and_keys.problem(directory, now=time.time()) or certificate_errors.refusal(
        error, location, what
    )


def _connect(contact: Contact) -> socket.socket:
    """Connect to the address for clients.

    Raises
    ------
    ValueError
        The contact contains no valid address.
    """
    host, _, port = contact.client.partition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_TIMEOUT)


def scheduler_of(directory: ClusterDirectory, contact: Contact) -> rpc:
    """Return a connection to the scheduler of a cluster, for ``async with``.

    Its methods are the scheduler's handlers.
    """
    from distributed.core import rpc

    return rpc(contact.client, connection_args=certificates_and_keys.security(directory).get_connection_args("client"))


async def answer_of(
    directory: ClusterDirectory, contact: Contact, call: Callable[[rpc], Awaitable[_T]], timeout: float
) -> _T:
    """Return what the scheduler of a cluster answers to a call, within this number of seconds.

    Raises
    ------
    OSError, TimeoutError, ValueError
        There is no answer. If nobody listens any more, the error comes soon: Dask itself would try again and again.
    """

    async def answer() -> _T:
        async with scheduler_of(directory, contact) as scheduler:
            return await asyncio.wait_for(call(scheduler), timeout)

    calling = asyncio.ensure_future(answer())
    try:
        done, _ = await asyncio.wait([calling], timeout=_NO_ANSWER)
        if (
            not done
            and await in_thread(identify, contact, directory) is ConnectionResult.REFUSED
            and not calling.done()
        ):
            raise ConnectionRefusedError(ConnectionResult.REFUSED.value)
        return await calling
    finally:
        calling.cancel()


class SchedulerWatch:
    """The state of a cluster's scheduler job in the queue, polled at the intervals of `hpcgpu.polling.poll_interval`.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    cadence : Cadence, optional
    before : callable, optional
        Called before each poll. It raises `BatchError` if the queue must not be polled.
    job_id : str, optional
        The scheduler job. The default is the present one: see `hpcgpu.store.present_scheduler`.
    """

    def __init__(
        self,
        directory: ClusterDirectory,
        batch: BatchSystem,
        cadence: Cadence | None = None,
        before: Callable[[], None] = lambda: None,
        *,
        job_id: str = "",
    ) -> None:
        self.directory = directory
        self.monitor = Monitor(batch, cadence=cadence or Cadence(), grace=_GRACE)
        self._before = before
        self._job_id = job_id

    @property
    def error(self) -> str:
        """Why the last poll failed; empty if it succeeded."""
        return self.monitor.error

    def poll(self, *, now: float) -> JobStatus | None:
        """Poll if it is time to; return what is known of the job.

        None means that it has no id yet, or that the last poll failed.

        A job that is presumed to have ended is `JobState.FAILED`, with the reason: see
        `hpcgpu.polling.queue_monitor.presumed_ended`.
        """
        submits, contact = self.directory.submits(), self.directory.contact()
        submit = next((one for one in submits if self._job_id and one.job_id == self._job_id), None)
        submit = submit or present_scheduler(submits, contact.job_id if contact is not None else "")
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


def wait_for_scheduler(
    directory: ClusterDirectory, batch: BatchSystem, timeout: float, restart_wait: float | None = None
) -> Contact:
    """Wait until the scheduler answers; fail as soon as it can no longer start.

    Parameters
    ----------
    directory : ClusterDirectory
    batch : BatchSystem
    timeout : float
        Seconds that a scheduler may take.
    restart_wait : float, optional
        Seconds to wait for another scheduler if the scheduler job ends too early. None: there will be no other one.

    Raises
    ------
    LaunchError
        The scheduler job has ended, the scheduler did not start in time, or the certificate is not valid now.
    """
    began = time.monotonic()
    first = began + FIRST_POLL + random.random() * _POLL_INTERVAL
    interval = _POLL_INTERVAL if restart_wait is None else _LONG_WAIT * _POLL_INTERVAL
    watch = SchedulerWatch(directory, batch, Cadence(interval, next_poll=first))
    pause, longest, reported = 0.1, 1.0, ""
    while True:
        if restart_wait is not None and directory.closing:
            raise LaunchError(f"the cluster in {directory.path} is closed: this job ends")
        contact = directory.contact()
        try:
            if contact is not None and answers(contact, directory):
                # another program may have the port of a scheduler that has ended
                if restart_wait is None or identify(contact, directory) is ConnectionResult.ACCEPTED:
                    return contact
        except CertificateError as error:
            raise LaunchError(str(error)) from error
        now = time.monotonic()
        status = watch.poll(now=now)
        if watch.error != reported:  # compute nodes may lack the queue's commands
            reported = watch.error
            if reported:
                write_stderr(f"cannot query the queue about the scheduler job: {reported}")
        if restart_wait is not None and status is not None and ended_too_early(status.state):
            status, timeout, longest = None, max(timeout, restart_wait), _LONG_WAIT
        if status is not None and status.state.ended:
            own = cancel_of_ours(status.state, decided=False, ended=status.end, closed=directory.ended_at())
            why = OWN_CANCEL if own else explain(status, kind="scheduler")
            raise LaunchError(f"the scheduler job {status.job_id} has ended ({why}): this worker job ends too")
        if now - began > timeout:
            option = "restart_wait" if timeout == restart_wait else "death_timeout"
            raise LaunchError(f"no scheduler answered within {timeout:g} s ({option}): {_silence(contact, directory)}")
        time.sleep(pause)
        pause = min(longest, pause * 1.2)


def unreachable(scheduler: str, error: Exception) -> str:
    """Return that a scheduler does not answer, and why; or which file failed before it was reached."""
    if isinstance(error, OSError) and error.filename:  # an error of the network has none
        return file_error(error)
    return f"{scheduler} does not answer: {no_answer(error)}"


def no_answer(error: BaseException) -> str:
    """Return why a scheduler did not answer: the text of the error, or a text for an error without one."""
    late = isinstance(error, TimeoutError)
    reason = str(error) or ("no answer in time" if late else type(error).__name__)
    if late or reason.startswith("Timed out"):  # distributed's OSError
        reason += ". Its process may be stopped or stuck, or the network may lose its answers"
    return reason


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


def check_wanted(own: Submit) -> None:
    """Raise `LaunchError` if this scheduler job is not to run the scheduler any more, as the journal records."""
    if own.ended:
        raise LaunchError("this scheduler job had ended, and another one may have replaced it: it ends")
    if own.unwanted:
        raise LaunchError("the cluster does not need this scheduler job any more: it ends")


def check_alone(directory: ClusterDirectory, job_id: str) -> None:
    """Refuse to be a second scheduler of a cluster.

    The script may be submitted by hand while the cluster runs. The batch system may run a job again that another one
    has replaced.

    Raises
    ------
    LaunchError
        Another job runs its scheduler, or this job is not to do that any more.
    """
    with contextlib.suppress(OSError):  # a filesystem that fails for a moment proves nothing
        for own in directory.submits():
            if own.job_id == job_id:
                check_wanted(own)
    contact, name = directory.contact(), directory.path.name
    if contact is None or contact.job_id == job_id:
        return
    found = identify(contact, directory)
    there = found in (ConnectionResult.ACCEPTED, ConnectionResult.BUSY) and not directory.has_ended(contact.job_id)
    if there or proves_life(found, contact):
        raise LaunchError(
            f"cluster {name} already has a scheduler, in job {contact.job_id}. A second one would take its clients "
            f"and workers. To start again, first run: hpcgpu stop {directory.in_shell}"
        )
