"""First step of every job, ``python -m hpcgpu.runtime.launch``: checks what the job was given, then becomes the stock Dask command.

It fails at once and says why when that command could not succeed. The command runs in this very process, so that signals from the batch
system reach Dask and nothing stands between. A worker imports Dask while it waits for the scheduler: on a busy shared filesystem that
takes longer than all the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import runpy
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hpcgpu.batch import batch_system
from hpcgpu.batch.base import BatchSystem, OwnJob
from hpcgpu.batch.reasons import explain
from hpcgpu.errors import BatchError, CertificateError, Damaged, LaunchError, NotTrusted, OtherFormat
from hpcgpu.fabric import authentication, certificates, choice, interfaces
from hpcgpu.fabric.gpus import gpus_on_node
from hpcgpu.posix.ownership import weaknesses
from hpcgpu.posix.paths import expand
from hpcgpu.runtime import devices, scratch
from hpcgpu.scaling.walltime import margin
from hpcgpu.store import credentials
from hpcgpu.store.directory import ClusterDirectory, Contact

__all__ = ["job_arguments", "main"]

#: Seconds without a contact after which a worker job asks the queue about the scheduler job, and between two such questions.
_FIRST_QUESTION, _NEXT_QUESTION = 5.0, 15.0
#: Answers of the queue in a row that leave the scheduler job out, before it is believed to be gone.
_UNKNOWN = 3
#: Memory pool of the scheduler's GPU where workers have one, as dask-cuda's documentation has it for UCX.
_SCHEDULER_POOL = "1GB"


def visible_gpus(
    wanted: int, environ: Mapping[str, str], on_node: int | None, *, whole_nodes: bool = False, kind: str = "worker"
) -> str | None:
    """Return the value that CUDA_VISIBLE_DEVICES must have for a job that asked for `wanted` GPUs; None to leave it as it is.

    Its entries may be indices, UUIDs or MIG UUIDs, and are only counted.

    Parameters
    ----------
    wanted : int
    environ : mapping
    on_node : int or None
        GPUs that NVML sees on this node; None when it sees nothing. Only needed where the batch system leaves
        CUDA_VISIBLE_DEVICES unset.
    whole_nodes : bool, default False
        Whether all GPUs of the node are the job's, which asked for none (``gpu_request="none"``).
    kind : str, default "worker"
        Of the job: the scheduler uses one GPU, however many its node has.

    Raises
    ------
    LaunchError
        The job does not see as many GPUs as it asked for, or it is not clear which are its own.
    """
    if wanted == 0:
        return None
    advice = "Check `gpu_request` and `gpu_type`, and that this queue has GPUs"
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        if not on_node:
            raise LaunchError(f"this job asked for {wanted} GPUs and sees none: no CUDA_VISIBLE_DEVICES, no NVIDIA driver. {advice}")
        if on_node != wanted and not (whole_nodes and on_node > wanted):
            whole = "scheduler={'gpu_request': 'none'}" if kind == "scheduler" else f"gpus_per_node={on_node}"
            raise LaunchError(
                f"the batch system does not say which GPUs are this job's (CUDA_VISIBLE_DEVICES is not set); it asked for {wanted} and "
                f"the node has {on_node}. Set {whole} where jobs get whole nodes, or CUDA_VISIBLE_DEVICES in the job_script_prologue"
            )
        return ",".join(map(str, range(wanted)))
    entries = [entry.strip() for entry in listed.split(",") if entry.strip() and entry.strip() != "NoDevFiles"]
    if "-1" in entries:  # CUDA ignores what follows the first entry that is none
        entries = entries[: entries.index("-1")]
    if len(entries) < wanted:
        raise LaunchError(f"this job asked for {wanted} GPUs and sees {len(entries)} (CUDA_VISIBLE_DEVICES={listed!r}). {advice}")
    return ",".join(entries[:wanted])


def lifetime(remaining: float, asked: float | None = None) -> float:
    """Return the seconds after which a worker retires by itself, so that its data is elsewhere when the walltime ends.

    That is half-way into the margin in which the cluster's manager retires it: it counts where the manager is away.
    """
    return remaining - margin(remaining, asked) / 2


def answers(contact: Contact, directory: ClusterDirectory) -> bool:
    """Whether the cluster's scheduler listens where the contact says; asked at the address for clients, which is TCP.

    Raises
    ------
    CertificateError
        The certificate has expired or is not yet valid, by the clock of this machine or of the scheduler's.
    """
    scheme, _, location = contact.client.partition("://")
    host, _, port = location.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            if scheme == "tls":
                context = ssl.create_default_context(cafile=directory.tls / "cert.pem")
                context.check_hostname = False
                context.load_cert_chain(directory.tls / "cert.pem", directory.tls / "key.pem")
                with context.wrap_socket(connection) as encrypted:
                    encrypted.recv(1)  # under TLS 1.3 this tells whether the scheduler takes our certificate; it speaks first
                    with contextlib.suppress(OSError):
                        encrypted.unwrap()
    except ssl.SSLError as error:
        what = credentials.certificate_name(directory)
        if why := credentials.trouble(directory, now=time.time()) or certificates.refusal(error, location, what):
            raise CertificateError(why) from error
        return True  # somebody is there; distributed says better what is wrong
    except (OSError, ValueError):  # ValueError: what is written there is no address
        return False
    return True


def _silence(contact: Contact | None, directory: ClusterDirectory) -> str:
    """Return why a scheduler may not have answered, and what to do."""
    if contact is None:
        written = directory.path / "contact.json"
        return f"it wrote no {written}; see its log in {directory.logs}, and raise death_timeout if it only starts slowly"
    return (
        f"{contact.client} does not answer {socket.gethostname()}: set client_interface to a network that worker nodes reach too, or ask "
        f"the site about a firewall"
    )


def wait_for_scheduler(directory: ClusterDirectory, batch: BatchSystem, timeout: float) -> Contact:
    """Wait until the scheduler is there; fail as soon as it cannot come any more.

    Raises
    ------
    LaunchError
        The scheduler job has ended, the scheduler did not come in time, or the certificate is not valid now.
    """
    deadline = time.monotonic() + timeout
    next_question = time.monotonic() + _FIRST_QUESTION
    pause, unknown = 0.1, 0
    while True:
        contact = directory.contact()
        try:
            if contact is not None and answers(contact, directory):
                return contact
        except CertificateError as error:
            raise LaunchError(str(error)) from error
        scheduler = next((s for s in directory.submits() if s.kind == "scheduler"), None)
        now = time.monotonic()
        if scheduler is not None and scheduler.job_id is not None and now >= next_question:
            next_question = now + _NEXT_QUESTION
            try:
                status = batch.poll([scheduler.job_id]).get(scheduler.job_id)
            except BatchError as error:  # compute nodes may lack the queue's commands
                print(f"hpcgpu: cannot ask the queue about the scheduler job: {error}", file=sys.stderr)
            else:
                unknown = unknown + 1 if status is None else 0
                if unknown >= _UNKNOWN or (status is not None and status.state.ended):
                    why = explain(status) if status is not None else "the queue does not know it any more"
                    raise LaunchError(f"the scheduler job {scheduler.job_id} is gone ({why}): this worker job has nothing to do")
        if now > deadline:
            raise LaunchError(f"no scheduler answered within {timeout:g} s (death_timeout): {_silence(contact, directory)}")
        time.sleep(pause)
        pause = min(1.0, pause * 1.2)


def end_of_walltime(own: OwnJob, batch: BatchSystem) -> float | None:
    """Return when the walltime of this job is over, epoch seconds; the queue is asked where the environment does not tell."""
    if own.end is not None:
        return own.end
    with contextlib.suppress(BatchError):  # compute nodes may lack the queue's commands
        if status := batch.poll([own.job_id]).get(own.job_id):
            return status.end
    return None


def make_credentials(directory: ClusterDirectory, own: OwnJob | None, batch: BatchSystem) -> None:
    """Make the credentials of a cluster that lives in this job, valid for as long as the job is."""
    end = end_of_walltime(own, batch) if own is not None else None
    credentials.create(directory, end - time.time() if end is not None else None, waits=False)


def expanded(path: str, environ: Mapping[str, str]) -> str:
    """Return a path with its variables, such as ``$TMPDIR``, replaced: they are often known in the job only."""
    try:
        found = expand(path, environ)
    except ValueError as error:
        raise LaunchError(f"local_directory={path!r}: {error}") from error
    if not os.path.isabs(found):  # noqa: PTH117  text
        raise LaunchError(f"local_directory={path!r} means {found!r} in this job, a relative path: it must begin with '/'")
    return found


def import_from_working_directory() -> None:
    """Let tasks import modules from where the job was submitted, as Dask's own command does, unless others can put modules there.

    The job script starts Python with ``-P``: without it Python would look there first of all, for its own modules too.
    """
    with contextlib.suppress(OSError):
        place = Path.cwd()
        found = [weakness for weakness in weaknesses(place, group_may_write=True) if not weakness.by_group]
        if found:
            print(f"hpcgpu: tasks import nothing from {place}, where others can put modules: {found[0].why}", file=sys.stderr, flush=True)
        elif sys.flags.safe_path:
            sys.path.append(str(place))


def temporary_place(arguments: argparse.Namespace) -> Path:
    """Take the option `local_directory` out of the command, and return the directory in which that for Dask's temporary files is made.

    Raises
    ------
    LaunchError
        It cannot be made, or others can change what is in it.
    """
    command: list[str] = arguments.command
    given = None
    if "--local-directory" in command:
        at = command.index("--local-directory")
        given = expanded(command[at + 1], os.environ)
        del command[at : at + 2]
    try:
        return scratch.place(given)
    except (NotTrusted, OSError) as error:
        raise LaunchError(scratch.refusal(given, error)) from error


def check_interface(name: str | None, option: str = "interface") -> None:
    """Raise `LaunchError` when this node has no such interface."""
    if name is not None and (trouble := interfaces.missing(name, interfaces.addresses())):
        raise LaunchError(f"{trouble}. Set `{option}` to one of them")


def keep_transports_private() -> None:
    """Set what `settings.private_transports` says, once it is known what UCX would use without it."""
    from dask import config

    from hpcgpu.fabric import settings

    os.environ.update(settings.private_transports(os.environ, config.get("distributed-ucxx", None) or {}))


def agreed_interface(contact: Contact, protocol: str, interface: str | None) -> str | None:
    """Return the interface for what the scheduler's node decided.

    Raises
    ------
    LaunchError
        This node cannot do that.
    """
    ucx = contact.workers.startswith("ucx")
    node = choice.look(ucx=ucx and protocol == "auto")
    chosen = choice.TransportChoice("ucx" if ucx else "tcp", contact.interface or None, contact.network, contact.fabric)
    if why := choice.incompatibility(chosen, node, protocol, interface):
        raise LaunchError(why)
    if interface is not None or not contact.network:
        return interface
    return choice.nearest(
        node, contact.network, contact.interface, interfaces.reaching(contact.workers.split("://", 1)[1].rpartition(":")[0])
    )


def worker_command(arguments: argparse.Namespace, directory: ClusterDirectory, batch: BatchSystem, own: OwnJob) -> list[str]:
    """Wait for the scheduler and return the full command of a worker."""
    check_interface(arguments.interface)
    end = end_of_walltime(own, batch)
    importlib.import_module("dask_cuda.cli" if arguments.gpus else "distributed.cli.dask_worker")
    importlib.import_module("hpcgpu.runtime.hostcopy").register()  # for the nannies, which answer clients too
    if arguments.gpus:
        devices.correct_device_index()
    contact = wait_for_scheduler(directory, batch, arguments.timeout)
    ClusterDirectory.there(directory.path)  # the wait may have been long
    interface = agreed_interface(contact, arguments.protocol, arguments.interface)
    if end is not None:
        os.environ["DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION"] = f"{lifetime(end - time.time(), arguments.walltime_margin):.0f}s"
        # The user's own Dask configuration may have these for other clusters: they would move the end past the walltime.
        os.environ["DASK_DISTRIBUTED__WORKER__LIFETIME__STAGGER"] = "0s"
        os.environ["DASK_DISTRIBUTED__WORKER__LIFETIME__RESTART"] = "False"
    # Names must be unique: the cluster gives each job a name of its own, a job submitted by hand has the cluster's.
    name = own.name if own.name != directory.path.name else f"{own.name}-by-hand-{own.job_id}"
    if arguments.nodes > 1:
        name = f"{name}-{own.node}"
    command = [*arguments.command, "--name", name, "--protocol", contact.workers.split("://", 1)[0]]
    command += ["--preload", "hpcgpu.runtime.worker"]
    os.environ["HPCGPU_GPUS"] = str(arguments.gpus or 0)  # for the preload
    if contact.workers.startswith("ucx"):
        authentication.install()  # for the nannies, which run in this process
        keep_transports_private()
    if interface:
        command += ["--interface", interface]
    return [*command, contact.workers]


def scheduler_command(arguments: argparse.Namespace, directory: ClusterDirectory, own: OwnJob) -> list[str]:
    """Choose protocol and interfaces and return the full command of the scheduler."""
    check_interface(arguments.interface)
    check_interface(arguments.client_interface, "client_interface")
    node = choice.look(ucx=arguments.protocol in ("auto", "ucx") and bool(arguments.gpus))
    chosen = choice.decide(node, arguments.protocol, arguments.interface, gpu=bool(arguments.gpus))
    if arguments.protocol == "ucx" and arguments.gpus and (unused := choice.without_rdma(node, chosen)):
        chosen = replace(chosen, why=f"{chosen.why}; {unused}")
    if chosen.protocol == "ucx":
        authentication.install()
        keep_transports_private()
        if arguments.gpus:
            os.environ.setdefault("DASK_DISTRIBUTED_UCXX__CREATE_CUDA_CONTEXT", "True")
            if arguments.rmm_pool:  # the scheduler only holds what passes through it
                os.environ.setdefault("DASK_DISTRIBUTED_UCXX__RMM__POOL_SIZE", _SCHEDULER_POOL)
    stream = "tls" if directory.encrypted else "tcp"
    workers = "ucx" if chosen.protocol == "ucx" else stream
    command = [*arguments.command, "--protocol", f"{workers},{stream}"]
    default = interfaces.default_interface(node.addresses)
    outer = arguments.client_interface or default or chosen.interface
    if outer:
        command += ["--interface", f"{chosen.interface or default or outer},{outer}"]
    if "--dashboard-address" not in command:  # where clients and their proxies reach the scheduler, and nowhere else
        command += ["--dashboard-address", f"{node.addresses.get(outer or '', '127.0.0.1')}:0"]
    os.environ["HPCGPU_SCHEDULER_JOB"] = own.job_id
    os.environ["HPCGPU_FABRIC"] = json.dumps({"fabric": chosen.why, "network": chosen.network, "interface": chosen.interface or ""})
    os.environ["HPCGPU_LEASE"] = f"{arguments.lease:g}"
    print(f"hpcgpu: {chosen.why}", file=sys.stderr)
    return command


def check_alone(directory: ClusterDirectory, job_id: str) -> None:
    """Refuse to be a second scheduler of a cluster: the script may be submitted by hand while the cluster runs.

    Raises
    ------
    LaunchError
        Another job runs its scheduler.
    """
    contact, name = directory.contact(), directory.path.name
    if contact is None or contact.job_id == job_id:
        return
    host, _, port = contact.client.partition("://")[2].rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection((host, int(port)), timeout=5).close()  # one that is too busy for a handshake takes a connection too
        raise LaunchError(
            f"cluster {name} has a scheduler, in job {contact.job_id}: a second one would take its clients and workers away. To start "
            f"anew, first run: hpcgpu stop {name}"
        )


def remove_secrets(directory: ClusterDirectory, token: str, job_id: str) -> None:
    """Remove the credentials of a cluster whose scheduler job ends; scripts of ``hpcgpu render`` may be launched again, with theirs.

    Only the job of the contact does; where there is none (any more) that of the journal.
    """
    with contextlib.suppress(OSError):
        contact = directory.contact()
        known = {submit.job_id for submit in directory.submits() if submit.kind == "scheduler"} - {None}
        own = contact.job_id == job_id if contact is not None else job_id in known or not known
        if own and directory.has(token) and not (directory.path / "launch.sh").exists():
            directory.remove_secrets()


def become(command: Sequence[str], place: Path, at_end: contextlib.ExitStack) -> None:
    """Run ``python -m MODULE ARGUMENTS`` in this process, with a fresh directory for temporary files in `place`; then what `at_end` holds.

    Over UCX the process ends without Python's own tidying up: UCX's thread may still be at work then, and a segmentation fault would make
    a failure of a job that did well (seen with UCX 1.21 at the end of schedulers).
    """
    _, flag, module, *arguments = command
    assert flag == "-m", "the templates start Dask as a module"
    with at_end, scratch.made(place) as temporary:
        os.environ["DASK_TEMPORARY_DIRECTORY"] = str(temporary)
        if "dask" in sys.modules:  # imported before the environment was complete
            sys.modules["dask"].config.refresh()
        importlib.import_module("hpcgpu.fabric.tls").install()
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code not in (None, 0) or not _speaks_ucx(arguments):
                raise
    if _speaks_ucx(arguments):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _speaks_ucx(arguments: Sequence[str]) -> bool:
    return any(flag == "--protocol" and value.startswith("ucx") for flag, value in pairwise(arguments))


def job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of what runs first in a job, whichever it is."""
    parser.add_argument("kind", choices=["scheduler", "worker"])
    parser.add_argument("system", help="batch system")
    parser.add_argument("directory", type=Path, help="cluster directory")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that the job asked for, per node")
    parser.add_argument("--whole-nodes", action="store_true", help="all GPUs of a node are the job's")
    parser.add_argument("--protocol", default="auto", help="auto, ucx, tcp or tls")
    parser.add_argument("--interface", help="network interface of the workers")
    parser.add_argument("--client-interface", help="network interface for clients")


def main(argv: Sequence[str]) -> None:
    """Check, complete the command, become it."""
    parser = argparse.ArgumentParser(prog="python -m hpcgpu.runtime.launch", description=__doc__.splitlines()[0] if __doc__ else "")
    job_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the scheduler")
    parser.add_argument("--walltime-margin", type=float, help="seconds before the end of the walltime at which workers retire")
    parser.add_argument("--lease", type=float, default=0.0, help="seconds without a manager after which the scheduler ends; 0: never")
    parser.add_argument("--rmm-pool", action="store_true", help="give the scheduler a small pool of GPU memory under UCX, as workers have")
    split = list(argv).index("--")
    arguments = parser.parse_args(argv[:split])
    arguments.command = list(argv[split + 1 :])
    at_end = contextlib.ExitStack()
    try:
        if not (arguments.directory / "cluster.json").exists():
            raise LaunchError(
                f"{arguments.directory} is not a cluster directory, or this node does not see it: it must be on a filesystem "
                f"that login and compute nodes share (option cluster_directory)"
            )
        directory = ClusterDirectory.there(arguments.directory)
        if directory.closing or (directory.encrypted and not directory.tls.is_dir()):
            raise LaunchError(f"the cluster of {directory.path} was closed: there is nothing to do")
        if trouble := credentials.trouble(directory, now=time.time()):
            raise LaunchError(trouble)
        batch = batch_system(arguments.system)
        own = batch.own_job(os.environ)
        if own is None:
            raise LaunchError(f"this does not run inside a job of the batch system {arguments.system!r}: submit the script")
        listed = "CUDA_VISIBLE_DEVICES" in os.environ or not arguments.gpus
        on_node = None if listed else gpus_on_node()
        visible = visible_gpus(arguments.gpus, os.environ, on_node, whole_nodes=arguments.whole_nodes, kind=arguments.kind)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        place = temporary_place(arguments)
        import_from_working_directory()
        os.environ["HPCGPU_CLUSTER_DIRECTORY"] = str(directory.path)
        os.environ.update(credentials.environment(directory))
        if arguments.kind == "worker":
            command = worker_command(arguments, directory, batch, own)
        else:
            check_alone(directory, own.job_id)
            at_end.callback(remove_secrets, directory, directory.token(), own.job_id)
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # until Dask has its own handler
            command = scheduler_command(arguments, directory, own)
            from hpcgpu.runtime.dashboard import guard_servers_of_this_process  # imports Dask

            guard_servers_of_this_process()
    except (LaunchError, NotTrusted, Damaged, OtherFormat) as error:
        print(f"hpcgpu: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    print(
        f"hpcgpu: on {socket.gethostname()}, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}: {shlex.join(command)}",
        file=sys.stderr,
        flush=True,
    )
    become(command, place, at_end)


if __name__ == "__main__":
    main(sys.argv[1:])
