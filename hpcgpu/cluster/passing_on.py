"""Let the program that manages a cluster do what another one requests, through the scheduler."""

from __future__ import annotations

import asyncio
import time

from hpcgpu.display.warn import warn
from hpcgpu.errors import ClusterError
from hpcgpu.runtime.reach import no_answer, scheduler_of
from hpcgpu.runtime.wire import RequestAnswer
from hpcgpu.scaling.wanted import Adapt, Scale, to_json
from hpcgpu.store.directory import ClusterDirectory, Contact

__all__ = ["BEGINS", "done_by_manager"]

#: Seconds until the scheduler has passed on the answer of the manager.
_TIMEOUT = 45.0
#: Seconds until a manager takes requests, from when its scheduler runs.
BEGINS = 10.0


def done_by_manager(directory: ClusterDirectory, command: Scale | Adapt) -> bool:
    """Let the manager do it; return whether there is one that could.

    A manager that nobody can find any more does not hold up the cluster: a warning says so.

    Raises
    ------
    ClusterError
        The manager refuses, or it cannot be reached though it lives: the cluster is not taken away from it.
    """
    deadline = time.monotonic() + BEGINS
    while True:
        contact, manager = directory.contact(), directory.manager()
        if manager is None or manager.lives is False:
            return False
        if contact is not None and _passed_on(directory, contact, command):
            return True
        late = time.monotonic() > deadline
        if contact is not None and late and manager.lives is None:
            warn(
                f"this program takes over cluster {directory.path.name} from {manager}: the scheduler has heard "
                "nothing from it for a minute, and hpcgpu cannot find out whether it still runs"
            )
            return False
        if contact is None or late:
            raise ClusterError(
                f"{manager} manages cluster {directory.path.name}, and takes no requests now. Other programs can send "
                f"requests while it is connected to the scheduler. Try again later, or call {command} in that program"
            )
        time.sleep(0.5)  # it is about to connect


def _passed_on(directory: ClusterDirectory, contact: Contact, command: Scale | Adapt) -> bool:
    """Request it of the manager through the scheduler; return whether there is one that takes requests."""
    try:
        answer = asyncio.run(_request(directory, contact, command))
    except (OSError, TimeoutError, ValueError) as error:  # ValueError: a damaged address, or certificate
        raise ClusterError(
            f"cluster {directory.path.name} cannot be changed now, because its scheduler at {contact.client} does not "
            f"answer: {no_answer(error)}"
        ) from error
    if answer["error"]:
        raise ClusterError(answer["error"])
    return answer["taken"]


async def _request(directory: ClusterDirectory, contact: Contact, command: Scale | Adapt) -> RequestAnswer:
    async with scheduler_of(directory, contact) as scheduler:
        call = scheduler.hpcgpu_request(command=to_json(command))
        answer: RequestAnswer = await asyncio.wait_for(call, _TIMEOUT)
        return answer
