"""Adaptive scaling without a living client: ``python -m hpcgpu.orders.manager_in_scheduler_job DIRECTORY``.

`hpcgpu.dask_scheduler.keep_manager_running` starts it.

It manages the cluster like any program that took it over, until another program takes it over, or the cluster ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.manager.manager import Manager
from hpcgpu.manager.take_over import program
from hpcgpu.orders.manager_on_login_node import on_login_node
from hpcgpu.orders.run_manager import manage_alone, run
from hpcgpu.runtime.scheduler_connection import scheduler_of, unreachable
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Detach, Wanted, apply
from hpcgpu.store import saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Seconds that the scheduler may take to start the manager: the manager queries the queue first.
_TIMEOUT = 120.0


def in_scheduler_job(directory: ClusterDirectory, command: Adapt | None) -> str:
    """Let the scheduler job manage the cluster, from now on or from its start; return a message on the result.

    With a command it scales a group of workers by their work; with None it keeps the sizes, and there is no message.
    Where compute nodes cannot submit jobs, a process on this machine manages the cluster, as the message says.

    Raises
    ------
    ClusterError
        The cluster was closed, its scheduler does not answer, or nothing can manage the cluster.
    """
    name, kept = directory.path.name, saved_options.read(directory)
    if kept.options.scheduler is None:
        raise ClusterError(
            f"cluster {name} has no scheduler job: its scheduler runs in the program that made it (scheduler='local'). "
            "Call `adapt` in that program"
        )
    manager = directory.manager()

    def change(earlier: Wanted) -> Wanted:
        wanted = apply(earlier, Detach(manager_in_scheduler_job=True))
        if command is None:
            return wanted
        if command.group not in wanted.groups:  # a cluster that `hpcgpu render` made has no record of its groups
            wanted = apply(wanted, AddGroup(command.group, 0))
        return apply(wanted, command)

    earlier, recorded = _record(directory, change, after=manager.number if manager is not None else 0)
    contact = directory.contact()  # after the request: a scheduler that starts now reads it
    if contact is None:
        return f"{name}: adaptive scaling begins when its scheduler job does" if command is not None else ""
    try:
        problem = asyncio.run(asyncio.wait_for(_start(contact, directory), _TIMEOUT))
    except (OSError, TimeoutError) as error:
        problem = unreachable(f"its scheduler at {contact.client}", error)
        _undo(directory, recorded, earlier)
        raise ClusterError(f"cluster {name} cannot be changed now: {problem}") from error
    if problem:
        try:
            return f"{on_login_node(directory)}. The scheduler job cannot: {problem}"
        except ClusterError as error:
            _undo(directory, recorded, earlier)
            raise ClusterError(
                f"the scheduler job of cluster {name} cannot scale it: {problem}. And {error}"
            ) from error
    return f"{name}: its scheduler job scales it from now on" if command is not None else ""


def _record(directory: ClusterDirectory, change: Callable[[Wanted], Wanted], *, after: int) -> tuple[Wanted, Wanted]:
    """Change the wanted state as the manager of this moment; return the earlier state and the new one.

    Only the manager writes it, so that no order is lost. Its number decides who that is: `ClusterDirectory.take_over`.

    Raises
    ------
    ClusterError
        The cluster was closed, or another program has followed the manager with the number `after`.
    """
    change(directory.wanted())  # an order that is refused takes the cluster from nobody
    number = directory.take_over(program(), after=after).number
    try:
        earlier = directory.wanted()
        wanted = change(earlier)
        directory.want(wanted)
    finally:
        with suppress(OSError):  # on a full disk, it ends with this process
            directory.leave(number)
    return earlier, wanted


def _undo(directory: ClusterDirectory, recorded: Wanted, earlier: Wanted) -> None:
    """Record the earlier state again, unless a manager lives that has read the new one, or has changed it since."""
    manager = directory.manager()
    if manager is not None and manager.lives is False and directory.wanted() == recorded:
        with suppress(ClusterError):  # a program has just begun to manage it
            _record(directory, lambda _: earlier, after=manager.number)


async def _start(contact: Contact, directory: ClusterDirectory) -> str:
    async with scheduler_of(directory, contact) as scheduler:
        if problem := str(await scheduler.hpcgpu_manage()):
            return problem
        await scheduler.hpcgpu_release()
        return ""


def main(path: Path) -> None:
    """Scale as the cluster directory requests, until the cluster ends."""
    manage_alone(lambda: _manage(locate(path)))


async def _manage(directory: ClusterDirectory) -> None:
    """Manage the cluster until a signal.

    SIGHUP: another manager takes over. SIGTERM: the scheduler has ended. SIGINT: the cluster has ended with it.
    """
    loop, end, received = asyncio.get_running_loop(), asyncio.Event(), set[signal.Signals]()

    def receive(number: signal.Signals) -> None:
        received.add(number)
        end.set()

    handled = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, receive, number)
    if signal.SIGHUP in signal.sigpending():  # the next manager waits for the end of this one
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # who started this process has blocked them until now
    manager = Manager.of_existing(directory, batch_system(directory.system), ends_jobs=False, in_scheduler_job=True)

    async def leave() -> None:
        if received - {signal.SIGHUP} and manager.managing:
            await _scheduler_ended(manager, over=signal.SIGINT in received)
        await manager.close(release=False)

    try:
        await run(manager, end, leave)
    finally:
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
        with suppress(OSError):
            await manager.reconciler.close_with_scheduler()
        with suppress(OSError):
            manager.state.dispatcher.directory.begin_close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except HpcgpuError as error:  # a message without a traceback: people read this log
        sys.exit(f"hpcgpu: {error}")
