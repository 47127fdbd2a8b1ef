"""The commands that a job becomes: ``dask scheduler`` or ``dask cuda worker``, with what is known in the job only."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace

from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.batch.visible import VARIABLE
from hpcgpu.errors import LaunchError
from hpcgpu.fabric import authentication, choice, interfaces
from hpcgpu.runtime import devices, warned
from hpcgpu.runtime.leaving import Leaving
from hpcgpu.runtime.reach import wait_for_scheduler
from hpcgpu.store.directory import ClusterDirectory, Contact

__all__ = ["scheduler_command", "worker_command", "worker_program"]

#: Memory pool of the scheduler's GPU where workers have one, as dask-cuda's documentation has it for UCX.
_SCHEDULER_POOL = "1GB"


def worker_program(arguments: argparse.Namespace) -> str:
    """Return the module of Dask's program that runs the workers of a node."""
    return "dask_cuda.cli" if arguments.gpus else "distributed.cli.dask_worker"


def worker_command(
    arguments: argparse.Namespace, directory: ClusterDirectory, batch: BatchSystem, own: OwnJob
) -> list[str]:
    """Wait for the scheduler and return the full command of a worker."""
    check_interface(arguments.interface)
    importlib.import_module("hpcgpu.runtime.hostcopy").register()  # for the nannies, which answer clients too
    if arguments.gpus:
        devices.correct_device_index()
    contact = wait_for_scheduler(directory, batch, arguments.timeout)
    ClusterDirectory.there(directory.path)  # the wait may have been long
    interface = agreed_interface(contact, arguments.protocol, arguments.interface)
    # The user's own Dask configuration may have a lifetime for other clusters.
    os.environ["DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION"] = "None"
    # Names must be unique: the cluster gives each job a name of its own, a job submitted by hand has the cluster's.
    name = own.name if own.name != directory.path.name else f"{own.name}-by-hand-{own.job_id}"
    if arguments.nodes > 1:
        name = f"{name}-{own.node}"
    names = [name, *(f"{name}-{gpu}" for gpu in range(len(os.environ.get(VARIABLE, "").split(","))))]  # of dask-cuda
    leaving = Leaving(
        own=own,
        batch=batch,
        directory=directory,
        contact=contact,
        names=names,
        walltime=arguments.walltime,
        margin=arguments.walltime_margin,
    )
    leaving.begin()
    if own.warned:
        warned.listen(worker_program(arguments), leaving if contact.job_id != own.job_id else None)
    command = [*arguments.command, "--name", name, "--protocol", contact.workers.split("://", 1)[0]]
    command += ["--preload", "hpcgpu.runtime.worker"]
    os.environ["HPCGPU_GPUS"] = str(arguments.gpus or 0)  # for the preload
    if contact.workers.startswith("ucx"):
        authentication.install()  # for the nannies, which run in this process
        set_ucx_defaults()
    if interface:
        command += ["--interface", interface]
    elif contact.workers.startswith("authenticated"):  # Dask itself does this for tcp and tls
        host = contact.workers.split("://", 1)[1].rpartition(":")[0].strip("[]")
        os.environ[authentication.OWN_HOST] = importlib.import_module("distributed.utils").get_ip(host)
    return [*command, contact.workers]


def scheduler_command(arguments: argparse.Namespace, directory: ClusterDirectory, own: OwnJob) -> list[str]:
    """Choose protocol and interfaces and return the full command of the scheduler."""
    check_interface(arguments.interface)
    check_interface(arguments.client_interface, "client_interface")
    node = choice.this_node(ucx=arguments.protocol in ("auto", "ucx") and bool(arguments.gpus))
    chosen = choice.decide(node, arguments.protocol, arguments.interface, gpu=bool(arguments.gpus))
    if arguments.protocol == "ucx" and arguments.gpus and (unused := choice.without_rdma(node, chosen)):
        chosen = replace(chosen, why=f"{chosen.why}; {unused}")
    if chosen.protocol == "ucx":
        authentication.install()
        set_ucx_defaults()
        if arguments.gpus:
            os.environ.setdefault("DASK_DISTRIBUTED_UCXX__CREATE_CUDA_CONTEXT", "True")
            if arguments.rmm_pool:  # the scheduler only holds what passes through it
                os.environ.setdefault("DASK_DISTRIBUTED_UCXX__RMM__POOL_SIZE", _SCHEDULER_POOL)
    stream = directory.stream
    workers = "ucx" if chosen.protocol == "ucx" else stream
    command = [*arguments.command, "--protocol", f"{workers},{stream}"]
    default = interfaces.default_interface(node.addresses)
    outer = arguments.client_interface or default or chosen.interface
    if outer:
        command += ["--interface", f"{chosen.interface or default or outer},{outer}"]
    if "--dashboard-address" not in command:  # where clients and their proxies reach the scheduler, and nowhere else
        command += ["--dashboard-address", f"{node.addresses.get(outer or '', '127.0.0.1')}:0"]
    os.environ["HPCGPU_SCHEDULER_JOB"] = own.job_id
    os.environ["HPCGPU_FABRIC"] = json.dumps(
        {"fabric": chosen.why, "network": chosen.network, "interface": chosen.interface or ""}
    )
    os.environ["HPCGPU_LEASE"] = f"{arguments.lease:g}"
    print(f"hpcgpu: {chosen.why}", file=sys.stderr)
    return command


def agreed_interface(contact: Contact, protocol: str, interface: str | None) -> str | None:
    """Return the interface for what the scheduler's node decided.

    Raises
    ------
    LaunchError
        This node cannot do that.
    """
    ucx = contact.workers.startswith("ucx")
    node = choice.this_node(ucx=ucx and protocol == "auto")
    chosen = choice.TransportChoice("ucx" if ucx else "tcp", contact.interface or None, contact.network, contact.fabric)
    if why := choice.incompatibility(chosen, node, protocol, interface):
        raise LaunchError(why)
    if interface is not None or not contact.network:
        return interface
    return choice.nearest(
        node,
        contact.network,
        contact.interface,
        interfaces.reaching(contact.workers.split("://", 1)[1].rpartition(":")[0]),
    )


def check_interface(name: str | None, option: str = "interface") -> None:
    """Raise `LaunchError` when this node has no such interface."""
    if name is not None and (problem := interfaces.missing(name, interfaces.addresses())):
        raise LaunchError(f"{problem}. Set `{option}` to one of them")


def set_ucx_defaults() -> None:
    """Set `settings.private_transports`, once it is known what UCX would use without it, and `memory_type_cache`."""
    from dask import config

    from hpcgpu.fabric import settings

    section = config.get("distributed-ucxx", None) or {}
    os.environ.update(settings.private_transports(os.environ, section))
    os.environ.update(settings.memory_type_cache(os.environ, section))
