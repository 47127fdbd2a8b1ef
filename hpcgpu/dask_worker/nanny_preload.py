"""Preload of nannies whose workers are forks of one process, the fork server (`hpcgpu.runtime.forkserver`).

A spawned worker has the present environment of its nanny, and imports the packages that are installed now. A fork has
the environment and the packages of the fork server. So the nanny passes on its own environment at each start, and
spawns its worker if a fork would differ from the worker that the user expects.
"""

from __future__ import annotations

import multiprocessing
import os
import site
from pathlib import Path
from typing import TYPE_CHECKING

from dask import config

from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime.forkserver import METHOD, NANNY_PRELOAD_VARIABLE

if TYPE_CHECKING:
    from distributed.core import Status
    from distributed.nanny import Nanny


config.set({METHOD: "forkserver"})  # dask-cuda has set "spawn" in its own program


def dask_setup(nanny: Nanny) -> None:
    """Let each start of the worker, also a restart, apply the changes since the last start."""
    instantiate, installed = nanny.instantiate, _installed()
    handed: dict[str, str] = {}

    async def refresh_and_instantiate() -> Status:
        own = {name: value for name, value in os.environ.items() if name != NANNY_PRELOAD_VARIABLE}
        # Values of the user or a plugin in `nanny.env` take precedence. The dictionary stays the same object: the
        # process has it.
        nanny.env.update({name: value for name, value in own.items() if nanny.env.get(name) == handed.get(name)})
        handed.clear()
        handed.update(own)
        if config.get(METHOD) == "forkserver" and (why := _why_spawn(installed)):
            config.set({METHOD: "spawn"})
            write_stderr(f"workers are spawned from now on: {why}")
        return await instantiate()

    nanny.instantiate = refresh_and_instantiate


def _why_spawn(installed: dict[str, int]) -> str:
    """Return why the next worker must not be a fork; empty if it may be."""
    directory = multiprocessing.current_process()._config["tempdir"]  # type: ignore[attr-defined]
    if not Path(directory).is_dir() or not any(path.is_socket() for path in Path(directory).iterdir()):
        return f"the socket of the fork server in {directory} was removed"
    if _installed() != installed:
        return "packages were installed after the fork server had imported its modules"
    return ""


def _installed() -> dict[str, int]:
    """Return when a package was last installed or removed: the time at which each directory of packages changed."""
    directories = map(Path, (*site.getsitepackages(), site.getusersitepackages()))
    return {str(path): path.stat().st_mtime_ns for path in directories if path.is_dir()}
