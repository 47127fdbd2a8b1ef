"""The commands that a job becomes: ``dask scheduler`` or ``dask cuda worker``, with values that only the job has.

The template of the job's script has the rest: resources, memory, threads and directories
(``templates/worker_command.j2``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from dataclasses import replace
from itertools import pairwise

from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.batch.cuda_visible_devices import VARIABLE
from hpcgpu.errors import LaunchError
from hpcgpu.fabric import collectives_interface, interface_addresses, protocol_and_interface, ucx_authentication
from hpcgpu.posix import variables_of_this_process
from hpcgpu.posix.standard_streams import write_stderr
from hpcgpu.runtime import cpu_affinity, next_scheduler, preemption
from hpcgpu.runtime.before_walltime import Retirement
from hpcgpu.runtime.scheduler_connection import wait_for_scheduler
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Memory pool of the scheduler's GPU if workers have one, as in dask-cuda's documentation for UCX.
_SCHEDULER_POOL = "1GB"
#: The variable with the number of lost workers that a task may have.
ALLOWED_FAILURES = "HPCGPU_ALLOWED_FAILURES"
#: The variables with the time after which a silent worker is restarted, and the scheduler ends without work; 0: never.
WORKER_TTL, IDLE_TIMEOUT = "HPCGPU_WORKER_TTL", "HPCGPU_IDLE_TIMEOUT"
#: How many distributed allows instead.
NO_LIMIT = 10**9


def worker_program(arguments: argparse.Namespace) -> str:
    """Return the module of Dask's program that runs the workers of a node."""
    return "dask_cuda.cli" if arguments.gpus else "distributed.cli.dask_worker"


def worker_command(
    arguments: argparse.Namespace, directory: ClusterDirectory, batch: BatchSystem, own: OwnJob
) -> list[str]:
    """Wait for the scheduler and return the full command of a worker."""
    check_interface(arguments.interface)
    importlib.import_module("hpcgpu.runtime.results_in_host_memory").register()  # nannies answer clients too
    if arguments.gpus:
        cpu_affinity.correct_device_index()
    timeout, restart_wait = _waits(arguments, directory, own)
    contact = wait_for_scheduler(directory, batch, timeout, restart_wait)
    ClusterDirectory.existing(directory.path)  # the wait may have been long
    interface = agreed_interface(contact, arguments.protocol, arguments.interface)
    # The user's own Dask configuration may have a lifetime for other clusters.
    os.environ["DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION"] = "None"
    # Names must be unique: the cluster gives each job its own name; a job submitted by hand has the cluster's name.
    name = own.name if own.name != directory.path.name else f"{own.name}-by-hand-{own.job_id}"
    if arguments.nodes > 1:
        name = f"{name}-{own.node}"
    names = [name, *(f"{name}-{gpu}" for gpu in range(len(os.environ.get(VARIABLE, "").split(","))))]  # of dask-cuda
    retirement = Retirement(
        own_job=own,
        batch=batch,
        directory=directory,
        contact=contact,
        names=names,
        walltime=arguments.walltime,
        margin=arguments.walltime_margin,
    )
    # if the scheduler is in the same job, no other job can take over the work: the workers stay until the end
    alone = contact.job_id == own.job_id
    if alone:
        arguments.restart_wait = None
    elif restart_wait is not None:
        next_scheduler.watch(directory, contact)
    if not alone:
        retirement.begin()
    if own.warned:
        preemption.listen(None if alone else retirement)
    command = [*arguments.command, "--name", name, "--protocol", contact.workers.split("://", 1)[0]]
    command += ["--preload", "hpcgpu.dask_worker.worker_preload"]
    os.environ["HPCGPU_GPUS"] = str(arguments.gpus or 0)  # for the preload
    postpone_pages(command)
    if contact.workers.startswith("ucx"):
        ucx_authentication.install()  # for the nannies, which run in this process
        set_ucx_defaults()
    host = host_for_workers(contact)
    variables_of_this_process.set_missing(os.environ, collectives_interface.variables(os.environ, interface, host))
    if interface:
        command += ["--interface", interface]
    elif contact.workers.startswith("authenticated"):  # Dask itself does this for tcp and tls
        os.environ[ucx_authentication.OWN_HOST] = importlib.import_module("distributed.utils").get_ip(host)
    return [*command, contact.workers]


def _waits(arguments: argparse.Namespace, directory: ClusterDirectory, own: OwnJob) -> tuple[float, float | None]:
    """Return how many seconds a worker job waits for a scheduler, and for one that is restarted; None if it is not."""
    timeout, restart_wait = float(arguments.timeout), next_scheduler.restart_wait(arguments, directory, own)
    if restart_wait is not None:
        os.environ[next_scheduler.RESTARTS] = "1"  # for the workers
        if next_scheduler.begins_anew():
            next_scheduler.reap_earlier_workers()
            next_scheduler.report_wait(arguments.gpus, restart_wait)
            timeout = restart_wait
    return timeout, restart_wait


def scheduler_command(arguments: argparse.Namespace, directory: ClusterDirectory, own: OwnJob) -> list[str]:
    """Choose protocol and interfaces and return the full command of the scheduler."""
    check_interface(arguments.interface)
    check_interface(arguments.client_interface, "client_interface")
    node = protocol_and_interface.this_node(ucx=arguments.protocol in ("auto", "ucx") and bool(arguments.gpus))
    chosen = protocol_and_interface.decide(node, arguments.protocol, arguments.interface, gpu=bool(arguments.gpus))
    if arguments.protocol == "ucx" and arguments.gpus and (unused := protocol_and_interface.without_rdma(node, chosen)):
        chosen = replace(chosen, why=f"{chosen.why}; {unused}")
    if chosen.protocol == "ucx":
        ucx_authentication.install()
        set_ucx_defaults()
        if arguments.gpus:
            variables_of_this_process.set_missing(os.environ, {"DASK_DISTRIBUTED_UCXX__CREATE_CUDA_CONTEXT": "True"})
            if arguments.rmm_pool:  # the scheduler holds only data that passes through it
                variables_of_this_process.set_missing(
                    os.environ, {"DASK_DISTRIBUTED_UCXX__RMM__POOL_SIZE": _SCHEDULER_POOL}
                )
    if arguments.gpus:  # dask-cuda sets it on the workers, whatever their environment has (`dask_cuda.plugins`)
        os.environ["CUDF_SPILL"] = "on" if arguments.cudf_spill else "off"
    stream = directory.stream
    workers = "ucx" if chosen.protocol == "ucx" else stream
    command = [*arguments.command, "--protocol", f"{workers},{stream}"]
    inner, outer = interfaces(chosen, node, arguments.client_interface)
    if outer:
        command += ["--interface", f"{inner},{outer}"]
    # Libraries such as RAFT let the workers meet at a port that NCCL opens here.
    variables_of_this_process.set_missing(os.environ, collectives_interface.variables(os.environ, inner, ""))
    if "--dashboard-address" not in command:  # only where clients and their proxies reach the scheduler
        command += ["--dashboard-address", f"{node.addresses.get(outer or '', '127.0.0.1')}:0"]
    os.environ["HPCGPU_SCHEDULER_JOB"] = own.job_id
    os.environ["HPCGPU_FABRIC"] = json.dumps(
        {"fabric": chosen.why, "network": chosen.network, "interface": chosen.interface or ""}
    )
    take_limits(command)
    os.environ["HPCGPU_LEASE"] = f"{arguments.lease:g}"
    write_stderr(chosen.why)
    return command


def interfaces(
    chosen: protocol_and_interface.TransportChoice, node: protocol_and_interface.Node, client_interface: str | None
) -> tuple[str | None, str | None]:
    """Return the interfaces of the scheduler's node for workers, and for clients; None if they are not known."""
    default = interface_addresses.default_interface(node.addresses)
    outer = client_interface or default or chosen.interface
    return chosen.interface or default or outer, outer


def host_for_workers(contact: Contact) -> str:
    """Return the scheduler's address for workers, without a port."""
    return contact.workers.split("://", 1)[1].rpartition(":")[0].strip("[]")


def take_limits(command: list[str]) -> None:
    """Let hpcgpu apply some limits of the scheduler, and not distributed.

    It counts which lost workers are failures of their tasks (`hpcgpu.dask_scheduler.lost_workers_as_failures`), and the
    times by which workers restart and the scheduler ends (`hpcgpu.dask_scheduler.time_limits`).

    Parameters
    ----------
    command : list of str
        The command of the scheduler. The limit of its own ``--idle-timeout`` is taken, and there is none afterwards.
    """
    importlib.import_module("distributed")  # its defaults
    configured = importlib.import_module("dask.config").get
    os.environ[ALLOWED_FAILURES] = str(configured("distributed.scheduler.allowed-failures"))
    os.environ["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"] = str(NO_LIMIT)
    os.environ[WORKER_TTL] = str(configured("distributed.scheduler.worker-ttl") or 0)
    os.environ["DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL"] = "None"
    given = dict(pairwise(command)).get("--idle-timeout")
    os.environ[IDLE_TIMEOUT] = given or str(configured("distributed.scheduler.idle-timeout") or 0)
    command += ["--idle-timeout", "0"]  # the last one counts


def postpone_pages(command: list[str]) -> None:
    """Let a worker add its pages when one of them is requested (`hpcgpu.dask_worker.worker_pages`).

    Parameters
    ----------
    command : list of str
        The command of the worker. Whoever wrote ``--dashboard`` or ``--no-dashboard`` into it gets that.
    """
    if not {"--dashboard", "--no-dashboard"} & set(command):
        words = [word for argument in command for word in argument.split("=", 1)]
        os.environ["HPCGPU_WORKER_PAGES"] = dict(pairwise(words)).get("--dashboard-prefix", "")
        command += ["--no-dashboard"]


def agreed_interface(
    contact: Contact, protocol: str, interface: str | None, node: protocol_and_interface.Node | None = None
) -> str | None:
    """Return this node's interface for the transport that the scheduler's node chose.

    Parameters
    ----------
    contact : Contact
    protocol, interface : str, and str or None
        The options.
    node : Node, optional
        This node, if it was examined before.

    Raises
    ------
    LaunchError
        This node cannot use that transport.
    """
    ucx = contact.workers.startswith("ucx")
    node = node or protocol_and_interface.this_node(ucx=ucx and protocol == "auto")
    chosen = protocol_and_interface.TransportChoice(
        "ucx" if ucx else "tcp", contact.interface or None, contact.network, contact.fabric
    )
    if why := protocol_and_interface.incompatibility(chosen, node, protocol, interface):
        raise LaunchError(why)
    if interface is not None or not contact.network:
        return interface
    return protocol_and_interface.nearest(
        node,
        contact.network,
        contact.interface,
        interface_addresses.interfaces_of_network(host_for_workers(contact)),
    )


def check_interface(name: str | None, option: str = "interface") -> None:
    """Raise `LaunchError` when this node has no such interface."""
    if name is not None and (problem := interface_addresses.missing(name, interface_addresses.addresses())):
        raise LaunchError(f"{problem}. Set `{option}` to one of them")


def set_ucx_defaults() -> None:
    """Set the variables of `ucx_settings.private_transports` and `ucx_settings.memory_type_cache`.

    The choice of the transport must come first: it reads ``UCX_TLS`` as the user or the site has set it.
    """
    from dask import config

    from hpcgpu.fabric import ucx_settings

    section = config.get("distributed-ucxx", None) or {}
    os.environ.update(ucx_settings.private_transports(os.environ, section))
    os.environ.update(ucx_settings.memory_type_cache(os.environ, section))
