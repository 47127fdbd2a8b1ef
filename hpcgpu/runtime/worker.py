"""Preload of worker processes.

It installs the connections of `hpcgpu.fabric`, the token of the dashboard, and host copies of results for clients
without a GPU.

It also informs the scheduler of the worker's software and job, and with each heartbeat of its GPU and its calls.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from multiprocessing.forkserver import get_inherited_fds
from typing import TYPE_CHECKING

from dask import config

from hpcgpu.fabric import authenticated_tcp, authentication, tls
from hpcgpu.fabric.report import NODE
from hpcgpu.runtime import calls, dashboard, hostcopy, warned
from hpcgpu.runtime.forkserver import METHOD, NANNY_MODULE, NANNY_PRELOAD
from hpcgpu.runtime.own import JOB, told
from hpcgpu.runtime.readings import METRIC, SENT, Device
from hpcgpu.runtime.recipients import GPUS
from hpcgpu.software import versions

if TYPE_CHECKING:
    from distributed.nanny import Nanny
    from distributed.worker import Worker

__all__ = ["dask_setup"]

authentication.install()
dashboard.guard_servers_of_this_process()
authenticated_tcp.install()
tls.install()
hostcopy.register()
if get_inherited_fds() is not None:  # this is a fork: what its tasks start is as in a worker that was spawned
    preloads = config.get(NANNY_PRELOAD)
    if not isinstance(preloads, str):  # one name, which is the user's
        preloads = [preload for preload in preloads if preload != NANNY_MODULE]
    config.set({METHOD: "spawn", NANNY_PRELOAD: preloads})
    multiprocessing.set_start_method("spawn", force=True)
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


def dask_setup(server: Worker | Nanny) -> None:
    """Add environment, node and GPUs to what a worker says of itself when it registers."""
    if hasattr(server, "startup_information"):
        server.startup_information["hpcgpu"] = lambda worker: versions.collect()
        # The host's name is the machine's: several nodes of a test bed share one.
        server.startup_information[NODE] = lambda worker: os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        server.startup_information[JOB] = lambda worker: told()
        calls.count(server)
        warned.stay()
        server.metrics[SENT] = lambda worker: worker.transfer_outgoing_bytes_total
        gpus = int(os.environ.get(GPUS, "0"))
        server.startup_information[GPUS] = lambda worker: gpus
        if gpus:  # a worker without may be on a node with GPUs
            device = Device()
            server.startup_information[METRIC] = lambda worker: device.model()
            server.metrics[METRIC] = lambda worker: asyncio.to_thread(device.read)  # power may take its time
