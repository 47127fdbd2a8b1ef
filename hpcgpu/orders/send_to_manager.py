"""Send a command through the scheduler to the program that manages a cluster."""

from __future__ import annotations

import asyncio
import time

from hpcgpu.dask_scheduler.rpc_types import RequestAnswer
from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError
from hpcgpu.runtime.scheduler_connection import answer_of, unreachable
from hpcgpu.scaling.wanted_state import Sent, to_json
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Seconds to wait until the scheduler forwards the answer of the manager.
_TIMEOUT = 45.0
#: Seconds until the scheduler job has started its manager, and as many until that accepts requests.
BEGINS = 10.0


def done_by_manager(directory: ClusterDirectory, command: Sent) -> bool:
    """Let the manager carry out a command; return whether there was a manager to do it.

    A manager that cannot be found any more does not block the cluster: then a warning reports this.

    Raises
    ------
    ClusterError
        The manager refuses, or it runs but cannot be reached. Then it stays the manager of the cluster.
    """
    began, found = time.monotonic(), False
    while True:
        contact, manager = directory.contact(), directory.manager()
        late = time.monotonic() - began > BEGINS
        if manager is None or manager.lives is False:
            if late or not _one_comes(directory, contact):
                return False
            time.sleep(0.5)
            continue
        if not found:  # it has its own time until it accepts requests
            began, found, late = time.monotonic(), True, False
        if contact is not None and directory.has_ended(contact.job_id):
            raise ClusterError(
                f"cluster {directory.path.name} cannot be changed now: its scheduler has ended, and the next one is "
                f"not there yet. Try again later, or call {command} in the program that manages it: {manager}"
            )
        if contact is not None and _forwarded(directory, contact, command):
            return True
        if contact is not None and late and manager.lives is None:
            warn(
                f"this program takes over cluster {directory.path.name} from {manager}: the scheduler has received "
                "nothing from it for a minute, and hpcgpu cannot find out whether it still runs"
            )
            return False
        if contact is None or late:
            raise ClusterError(
                f"{manager} manages cluster {directory.path.name}, and takes no requests now. Other programs can send "
                f"requests while it is connected to the scheduler. Try again later, or call {command} in that program"
            )
        time.sleep(0.5)  # the manager connects soon


def _one_comes(directory: ClusterDirectory, contact: Contact | None) -> bool:
    """Whether the scheduler job is about to start a manager, which would take the cluster back from this program."""
    if contact is None or directory.has_ended(contact.job_id):
        return False
    wanted = directory.wanted()
    return wanted.manager_in_scheduler_job and not wanted.closing


def _forwarded(directory: ClusterDirectory, contact: Contact, command: Sent) -> bool:
    """Send a command to the manager through the scheduler; return whether a manager accepts requests."""
    try:
        call = answer_of(directory, contact, lambda one: one.hpcgpu_request(command=to_json(command)), _TIMEOUT)
        answer: RequestAnswer = asyncio.run(call)
    except (OSError, TimeoutError, ValueError) as error:  # ValueError: a damaged address, or certificate
        why = unreachable(f"its scheduler at {contact.client}", error)
        raise ClusterError(f"cluster {directory.path.name} cannot be changed now, because {why}") from error
    if answer["error"]:
        raise ClusterError(answer["error"])
    return answer["accepted"]
