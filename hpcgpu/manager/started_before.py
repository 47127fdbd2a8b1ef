"""A start that a program on another machine requests again, because its connection broke meanwhile."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import ClusterError
from hpcgpu.existing_clusters.stop import stop_all
from hpcgpu.posix import process_identity
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.managers import ManagerRecord

#: Seconds for which a command on another login node is waited for.
_TIMEOUT = 600.0


def started_before(system: str, given: Mapping[str, Any], token: str) -> ClusterDirectory | None:
    """Return the cluster that an earlier command has started for the same request, after a wait for that command.

    Parameters
    ----------
    system : str
    given : mapping
        The options of the cluster.
    token : str
        That of the request.

    Returns
    -------
    ClusterDirectory or None
        None if no command has begun.

    Raises
    ------
    ClusterError
        The earlier command does not end, or it ended half-way. Then no job is left.
    """
    settings = resolve(system, {name: value for name, value in given.items() if name != "host"}).cluster
    directory = ClusterDirectory(settings.cluster_directory / settings.name)
    if not (directory.path / "cluster.json").exists() or not directory.has_token(token):
        return None
    deadline = time.monotonic() + _TIMEOUT
    while (manager := directory.manager()) is not None and _starts(manager):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{manager} has started cluster {settings.name}, and does not end. To end the cluster, run: hpcgpu "
                f"stop {directory.in_shell}"
            )
        time.sleep(0.2)
    if directory.wanted().detached and not directory.closing:
        return directory
    stop_all(directory)
    raise ClusterError(
        f"the start of cluster {settings.name} was interrupted on {socket.gethostname()}, and no job of it is left. "
        "Start it again"
    )


def _starts(manager: ManagerRecord) -> bool:
    """Whether the program that starts the cluster still runs. The last thing that it does is to let others manage."""
    if manager.in_scheduler_job:
        return False
    if manager.host == socket.gethostname():
        return process_identity.alive(manager.process)
    return not manager.left
