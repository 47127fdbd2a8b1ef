"""Gives a package of the user to all workers of a cluster, and to its scheduler."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from distributed import Client

from hpcgpu.client.pack_package import pack
from hpcgpu.dask_worker.uploaded_package import send_package
from hpcgpu.posix.threads import in_thread


def upload_package(client: Client, path: str | Path) -> list[str] | Awaitable[list[str]]:
    """Give a package of your own, which is not installed on the cluster, to all workers and to the scheduler.

    Workers that start later get it too, before they take tasks. A second upload of the package replaces it: what tasks
    import then is new. A task that runs meanwhile may fail.

    Only pure Python. A package that was installed on the cluster too is hidden by this one.

    Parameters
    ----------
    client : distributed.Client
        A client of a cluster of hpcgpu: from `connect`, of a cluster, or of `SlurmGPURunner`. If it is asynchronous,
        await what this function returns.
    path : str or Path
        A wheel, a source tree (packages in its folder ``src``, or at its top), or the directory of a package. Hidden
        files, ``__pycache__`` and virtual environments are left out.

    Returns
    -------
    list of str
        What tasks can import now.

    Raises
    ------
    OptionError
        There is no package, its files have more than 64 MiB, or it has compiled code, symbolic links or special files.
        Nothing was uploaded.
    NotTrusted
        Other users can change the directory or wheel.
    OSError
        A worker cannot unpack it, because its disk is full for example. It runs on without the package; all other
        workers have it, and later ones get it.
    """
    answer: Any = client.sync(upload, client, path)
    return answer  # type: ignore[no-any-return]


async def upload(client: Client, path: str | Path) -> list[str]:
    """Do what `upload_package` does, in the event loop of the client."""
    package = await in_thread(pack, path)
    await send_package(client, package)
    return [*package.modules]
