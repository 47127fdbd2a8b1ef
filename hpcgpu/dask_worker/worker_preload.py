"""Preload of worker processes.

It installs the connections of `hpcgpu.fabric`, the token of the dashboard, and host copies of results for clients
without a GPU.

It also reports the worker's software and job to the scheduler, and with each heartbeat its GPU and its calls.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import socket
from multiprocessing.forkserver import get_inherited_fds
from pathlib import Path
from typing import TYPE_CHECKING

from dask import config

from hpcgpu.dask_worker import accept_tasks, count_calls, start_again, uploaded_package, worker_pages
from hpcgpu.dask_worker.gpu_metrics import GPUS, METRIC, SENT, Device
from hpcgpu.fabric import authenticated_tcp, tls_connections, ucx_authentication
from hpcgpu.fabric.connection_report import NODE
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written
from hpcgpu.runtime import dashboard_access, preemption, results_in_host_memory
from hpcgpu.runtime.forkserver import METHOD, NANNY_MODULE, NANNY_PRELOAD
from hpcgpu.runtime.job_identity import JOB, job_identity
from hpcgpu.software import compare_environments
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from distributed.nanny import Nanny
    from distributed.worker import Worker


drop_what_cannot_be_written()  # of a worker that is no fork of the first process of its job
ucx_authentication.install()
dashboard_access.require_token_in_this_process()
authenticated_tcp.install()
tls_connections.install()
results_in_host_memory.register()
if get_inherited_fds() is not None:  # this is a fork: its tasks start processes as in a spawned worker
    preloads = config.get(NANNY_PRELOAD)
    if not isinstance(preloads, str):  # one name, given by the user
        preloads = [preload for preload in preloads if preload != NANNY_MODULE]
    config.set({METHOD: "spawn", NANNY_PRELOAD: preloads})
    multiprocessing.set_start_method("spawn", force=True)
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


def dask_setup(server: Worker | Nanny) -> None:
    """Add environment, node and GPUs to the data with which a worker registers."""
    faulthandler.enable()  # a worker that is no fork of the job's first process does not have it
    if hasattr(server, "startup_information"):
        server.startup_information["hpcgpu"] = lambda worker: compare_environments.collect()
        # The host name is that of the machine: several nodes of a test bed share one machine.
        server.startup_information[NODE] = lambda worker: os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        server.startup_information[JOB] = lambda worker: job_identity()
        accept_tasks.obey(server)
        count_calls.count(server)
        uploaded_package.require_packages(server)
        start_again.start_again(server, ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"])))
        preemption.ignore_warning()
        worker_pages.add_when_requested(server)
        server.metrics[SENT] = lambda worker: worker.transfer_outgoing_bytes_total
        gpus = int(os.environ.get(GPUS, "0"))
        server.startup_information[GPUS] = lambda worker: gpus
        if gpus:  # a worker without a GPU may be on a node with GPUs
            device = Device()
            server.startup_information[METRIC] = lambda worker: device.model()
            server.metrics[METRIC] = lambda worker: asyncio.to_thread(device.read)  # reading the power may be slow
