"""What both kinds of clusters need to save results on the shared disk, and to restore them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import Future

from hpcgpu.errors import OptionError


def chosen(path: str | Path | None, of_cluster: str | Path | None) -> str | Path:
    """Return the directory of checkpoints.

    Raises
    ------
    OptionError
        There is none.
    """
    if (place := path or of_cluster) is None:
        raise OptionError(
            "checkpoint: write where it is, as path=... or for the cluster as checkpoint_directory=..., for "
            "example '$SCRATCH/checkpoints': a directory that all nodes see, with room for the data"
        )
    return place


def with_client(
    cluster: Any, futures: list[Future], function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call a function with the client of these futures, or else with the client of a cluster."""
    client = futures[0].client if futures else cluster.get_client()
    if not cluster.asynchronous:
        return function(client, *arguments, **named)

    async def call() -> Any:
        return await function(await client, *arguments, **named)

    return call()
