"""Adaptive scaling without a living client: ``python -m hpcgpu.orders.manager_in_scheduler_job DIRECTORY``.

`hpcgpu.dask_scheduler.keep_manager_running` starts it.

It manages the cluster like any program that took it over, until another program takes it over, or the cluster ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.errors import ClusterError, ClusterWarning, HpcgpuError
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.manager.manager import Manager
from hpcgpu.manager.take_over import program
from hpcgpu.runtime.scheduler_connection import scheduler_of, unreachable
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Detach, apply
from hpcgpu.store import saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Seconds that the scheduler may take to start the manager: the manager queries the queue first.
_TIMEOUT = 120.0


def in_scheduler_job(directory: ClusterDirectory, command: Adapt) -> str:
    """Let the scheduler job scale a group of workers, from now on or from its start; return a message on the result.

    Raises
    ------
    ClusterError
        The cluster was closed, or jobs cannot be submitted from its scheduler's node.
    """
    name, kept = directory.path.name, saved_options.read(directory)
    if kept.options.scheduler is None:
        raise ClusterError(
            f"cluster {name} has no scheduler job: its scheduler runs in the program that made it (scheduler='local'). "
            "Call `adapt` in that program"
        )
    earlier, group = directory.wanted(), command.group
    wanted = apply(earlier, Detach(unattended=True))
    if group not in wanted.groups:  # a cluster that `hpcgpu render` made has no record of its groups
        wanted = apply(wanted, AddGroup(group, 0))
    directory.want(apply(wanted, command))
    contact = directory.contact()  # after the request: a scheduler that starts now reads it
    if contact is None:
        directory.leave(directory.take_over(program()).number)  # from a program that waits for the scheduler
        return f"{name}: adaptive scaling begins when its scheduler job does"
    try:
        problem = asyncio.run(asyncio.wait_for(_start(contact, directory), _TIMEOUT))
    except (OSError, TimeoutError) as error:
        problem = unreachable(f"its scheduler at {contact.client}", error)
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
    # `_manage` prints warnings of the cluster; warnings of the directory were shown when the cluster started
    warnings.simplefilter("ignore", ClusterWarning)
    asyncio.run(_manage(locate(path)))


async def _manage(directory: ClusterDirectory) -> None:
    """Manage the cluster until a signal.

    SIGHUP: another manager takes over. SIGTERM: the scheduler has ended. SIGINT: the cluster has ended with it.
    """
    loop, end, received = asyncio.get_running_loop(), asyncio.Event(), set[signal.Signals]()

    def receive(number: signal.Signals) -> None:
        received.add(number)
        end.set()

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receive, number)
    manager = Manager.of_existing(directory, batch_system(directory.system), ends_jobs=False, in_scheduler_job=True)
    printed = 0
    try:
        await manager.start()
        while not end.is_set() and manager.managing:
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), 1.0)
            printed = _print_new(manager, printed)
    finally:
        if received - {signal.SIGHUP} and manager.managing:
            await _scheduler_ended(manager, over=signal.SIGINT in received)
        await manager.close(release=False)
        _print_new(manager, printed)
        # asyncio closes its pipe before it removes its handlers: a signal between the two is no error in the log
        signal.set_wakeup_fd(-1)


async def _scheduler_ended(manager: Manager, *, over: bool) -> None:
    """Notify the user of the end of the scheduler. If the cluster is `over` with it, no scheduler job may follow."""
    restarts, text = manager.reconciler.restarts, f"the scheduler of cluster {manager.state.name} has ended"
    following = restarts.following if restarts is not None else None
    if following is not None and not over:
        manager.state.notify("restarted", f"{text}, and scheduler job {following.job_id or following.name} follows")
        return
    manager.state.notify("ended", text)
    if restarts is not None and over:  # worker jobs that have lost their scheduler would wait for another one
        await restarts.abandon()
        with suppress(OSError):
            manager.state.dispatcher.directory.begin_close()


def _print_new(manager: Manager, printed: int) -> int:
    """Print what the manager did since the last call; return how much of its log is printed."""
    text = manager.messages.text()
    if len(text) > printed:
        print(text[printed:].strip(), flush=True)
    return len(text)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except HpcgpuError as error:  # a message without a traceback: people read this log
        sys.exit(f"hpcgpu: {error}")
