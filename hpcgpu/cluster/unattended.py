"""Adaptive scaling without a living client: ``python -m hpcgpu.cluster.unattended DIRECTORY``.

`hpcgpu.runtime.manager_process` starts it.

It manages the cluster like any program that took it over, until another one does, or the cluster ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.cluster.manager import Manager
from hpcgpu.errors import ClusterError, ClusterWarning, HpcgpuError
from hpcgpu.remote.lookup import locate
from hpcgpu.runtime.reach import no_answer, scheduler_of
from hpcgpu.scaling.wanted import Adapt, AddGroup, apply
from hpcgpu.store import saved
from hpcgpu.store.directory import ClusterDirectory, Contact

__all__ = ["in_scheduler_job", "main"]

#: Seconds that the scheduler may take to start the manager: it queries the queue first.
_TIMEOUT = 120.0


def in_scheduler_job(directory: ClusterDirectory, command: Adapt) -> str:
    """Let the scheduler job scale a group of workers, from now on or from its start; return a message on the outcome.

    Raises
    ------
    ClusterError
        The cluster was closed, or jobs cannot be submitted from its scheduler's node.
    """
    name, kept = directory.path.name, saved.read(directory)
    if directory.closing:
        raise ClusterError(f"cluster {name} was closed")
    if kept.options.scheduler is None:
        raise ClusterError(
            f"cluster {name} has no scheduler job: its scheduler runs in the program that made it (scheduler='local'). "
            "Call `adapt` in that program"
        )
    if not directory.detached:
        directory.detach()
    earlier, group = directory.wanted(), command.group
    known = earlier if group in earlier.groups else apply(earlier, AddGroup(group, 0))  # of `hpcgpu render`: none is
    directory.want(replace(apply(known, command), unattended=True))
    contact = directory.contact()  # after the request: a scheduler that starts now reads it
    if contact is None:
        return f"{name}: adaptive scaling begins when its scheduler job does"
    try:
        problem = asyncio.run(asyncio.wait_for(_start(contact, directory), _TIMEOUT))
    except (OSError, TimeoutError) as error:
        problem = f"its scheduler at {contact.client} does not answer: {no_answer(error)}"
    if problem:
        directory.want(earlier)
        raise ClusterError(
            f"the scheduler job of cluster {name} cannot scale it: {problem}. Let a program on a login node do it, "
            f"by from_name({name!r}).adapt(...)"
        )
    return f"{name}: its scheduler job scales it from now on"


async def _start(contact: Contact, directory: ClusterDirectory) -> str:
    async with scheduler_of(directory, contact) as scheduler:
        if problem := str(await scheduler.hpcgpu_manage()):
            return problem
        await scheduler.hpcgpu_release()
        return ""


def main(path: Path) -> None:
    """Scale as the cluster directory requests, until the cluster ends."""
    # of the cluster: printed below; of its directory: said when it began
    warnings.simplefilter("ignore", ClusterWarning)
    asyncio.run(_manage(locate(path)))


async def _manage(directory: ClusterDirectory) -> None:
    """Manage the cluster until another manager follows (SIGHUP), or the scheduler has ended (SIGTERM)."""
    loop, end, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def scheduler_ends() -> None:
        ended.set()
        end.set()

    loop.add_signal_handler(signal.SIGHUP, end.set)
    loop.add_signal_handler(signal.SIGTERM, scheduler_ends)
    manager = Manager.of_existing(directory, batch_system(directory.system), ends_jobs=False)
    printed = 0
    try:
        await manager.start()
        while not end.is_set() and manager.managing:
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), 1.0)
            printed = _print_new(manager, printed)
    finally:
        if ended.is_set() and manager.managing:
            manager.state.tell("ended", f"the scheduler of cluster {manager.state.name} has ended")
        await manager.close()
        _print_new(manager, printed)


def _print_new(manager: Manager, printed: int) -> int:
    """Print what the manager did since the last call; return how much of its log is printed."""
    text = manager.messages.text()
    if len(text) > printed:
        print(text[printed:].strip(), flush=True)
    return len(text)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except HpcgpuError as error:  # a sentence is enough: its log is read by people
        sys.exit(f"hpcgpu: {error}")
