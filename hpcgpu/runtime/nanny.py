"""Preload of nannies whose workers are forks of a warm process (`hpcgpu.runtime.forkserver`).

A fork has the environment of the fork server. A spawned worker has that of its nanny, which is complete only now. So
the nanny hands on its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dask import config

from hpcgpu.runtime.forkserver import METHOD, NANNY_PRELOAD_VARIABLE

if TYPE_CHECKING:
    from distributed.nanny import Nanny

__all__ = ["dask_setup"]

config.set({METHOD: "forkserver"})  # dask-cuda sets "spawn" in its own program before


def dask_setup(nanny: Nanny) -> None:
    """Give the worker the environment of this process."""
    own = {name: value for name, value in os.environ.items() if name != NANNY_PRELOAD_VARIABLE}
    nanny.env = {**own, **nanny.env}
