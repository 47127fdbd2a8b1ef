"""Futures that a program holds are submitted again to the next scheduler: ``with hpcgpu.replay(client):``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from distributed import Client

from hpcgpu.client import futures_to_replay
from hpcgpu.client.connect import directory_of
from hpcgpu.client.reached_by_ssh import cluster_of
from hpcgpu.errors import OptionError
from hpcgpu.store import saved_options
from hpcgpu.store.directory import ClusterDirectory


def replay(client: Client) -> AbstractContextManager[None]:
    """Let the futures of a block outlive the scheduler: ``with hpcgpu.replay(client):``.

    If the scheduler ends and another one follows it, what this client holds then and has submitted in the block is
    submitted again, under the same keys. Results of published datasets that were saved are used. The futures are
    pending meanwhile, so the program goes on and only takes longer.

    Parameters
    ----------
    client : distributed.Client
        A client of a cluster with ``on_scheduler_end="restart"``, from `connect` for example.

    Returns
    -------
    context manager
        ``with``, also in asynchronous programs.

    Raises
    ------
    OptionError
        No scheduler follows the one of this cluster, or the client does not belong to a cluster of hpcgpu.
    """
    if (reached := cluster_of(client)) is not None:
        check(reached.scheduler.on_scheduler_end)
        return futures_to_replay.keep(lambda other: other is client)
    own = getattr(client.cluster, "directory", None)
    if isinstance(own, ClusterDirectory):
        path = own.path
    elif (found := directory_of(client)) is not None:
        path = found
    else:
        raise OptionError("replay: the client does not belong to a cluster of hpcgpu")
    check(saved_options.read(ClusterDirectory.existing(path)).options.cluster.on_scheduler_end)
    return futures_to_replay.keep(lambda other: other is client)


def check(on_scheduler_end: str) -> None:
    """Raise `OptionError` if no scheduler follows the one of a cluster with this option."""
    if on_scheduler_end != "restart":
        raise OptionError(
            f"replay: the cluster has on_scheduler_end={on_scheduler_end!r}, so that no scheduler follows the present "
            "one. Start the cluster with on_scheduler_end='restart'"
        )
