"""What `hpcgpu check --in-job` runs in each job.

It examines the node, writes its report into the directory, and lets the login node connect.

It only collects facts. The login node judges them (`hpcgpu.checks.judge_job_reports`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from hpcgpu.batch import batch_system
from hpcgpu.errors import BatchError, LaunchError, NotTrusted, OtherFormat
from hpcgpu.fabric import collectives_interface, interface_addresses, protocol_and_interface
from hpcgpu.fabric.node_gpus import gpus_on_node
from hpcgpu.posix import checked_files
from hpcgpu.posix.filesystems import filesystem, is_shared
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written, write_stderr
from hpcgpu.runtime import complete_dask_commands, scratch, stage
from hpcgpu.runtime.gpus_of_job import visible_gpus
from hpcgpu.runtime.launch import job_arguments
from hpcgpu.software import compare_environments
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Most seconds that the job waits until the login node has read its report.
_TIMEOUT = 240.0
#: Most seconds for the import of Dask: the job has other checks to do.
_IMPORT = 120.0
#: Most seconds that a worker job waits for the report of the scheduler job.
_SCHEDULER = 20.0
#: Seconds for a peer's handshake, and for its request.
_PEER_TIMEOUT = 10.0
#: The devices through which UCX uses InfiniBand.
_VERBS = Path("/dev/infiniband")
#: Most peers that may be connected before they have shown a certificate.
_SILENT = 64


class Examination(TypedDict):
    """The facts that a job collects. An error is an empty text if there is none."""

    kind: str
    job: str
    host: str
    python: str
    token: str
    environment: dict[str, str]
    #: CUDA_VISIBLE_DEVICES.
    visible: str | None
    gpus_on_node: int | None
    #: The fields of `TransportChoice` and of `Node` in `hpcgpu.fabric.protocol_and_interface`.
    transport: dict[str, Any]
    node: dict[str, Any]
    open_files: int
    gpu_error: str
    interface_error: str
    queue_error: str
    local_directory: str
    #: Empty outside of a container.
    container: str
    #: What is wrong with the container.
    container_warning: str
    #: Seconds of ``import dask.distributed`` in a new process; None if it fails. Earlier releases report none of these.
    import_seconds: NotRequired[float | None]
    #: The filesystem that Dask is imported from, and whether other machines share it.
    import_filesystem: NotRequired[str]
    import_shared: NotRequired[bool]
    #: The address at which a scheduler on this node would listen for workers.
    for_workers: NotRequired[str]
    #: The variables of libraries of collectives that workers would have.
    collectives: NotRequired[str]


class JobReport(Examination):
    """The report that a job writes for the login node: its facts, and where it listens."""

    address: list[Any]
    via: str
    time: float


def examine(arguments: argparse.Namespace, directory: ClusterDirectory) -> Examination:
    """Return the facts of this job: its node, GPUs, software and networks."""
    import_seconds = _seconds_to_import()  # first, before this process has read the same files
    batch = batch_system(arguments.system)
    own = batch.own_job(os.environ)
    node = protocol_and_interface.this_node()
    chosen = protocol_and_interface.decide(
        node, arguments.protocol, arguments.interface, gpu=bool(arguments.gpus) or arguments.kind == "worker"
    )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    on_node = gpus_on_node()
    found: Examination = {
        "kind": arguments.kind,
        "job": own.job_id if own is not None else "",
        "host": socket.gethostname(),
        "python": sys.executable,
        "token": directory.token(),
        "environment": compare_environments.collect(),
        "visible": listed,
        "gpus_on_node": on_node,
        "transport": asdict(chosen),
        "node": asdict(node),
        "open_files": _open_files(),
        "gpu_error": "",
        "interface_error": "",
        "queue_error": "",
        "local_directory": "",
        "container": _container(arguments) if arguments.container else "",
        "container_warning": _container_warning(node) if arguments.container else "",
        "import_seconds": import_seconds,
        "import_filesystem": filesystem(Path(sysconfig.get_path("purelib"))),
        "import_shared": is_shared(Path(sysconfig.get_path("purelib"))),
    }
    inner, _ = complete_dask_commands.interfaces(chosen, node, arguments.client_interface)
    found["for_workers"] = node.addresses.get(inner or "", "")
    found["collectives"] = _collectives(arguments, node, _scheduler(arguments, directory) or found)
    try:
        visible_gpus(arguments.gpus, os.environ, on_node, whole_nodes=arguments.whole_nodes, kind=arguments.kind)
    except LaunchError as error:
        found["gpu_error"] = str(error)
    for name in (arguments.interface, arguments.client_interface):
        if name is not None and (problem := interface_addresses.missing(name, node.addresses)):
            found["interface_error"] = problem
    try:
        batch.check()
    except BatchError as error:
        found["queue_error"] = str(error)
    if arguments.local_directory:
        found["local_directory"] = _local_directory(arguments.local_directory)
    return found


def _scheduler(arguments: argparse.Namespace, directory: ClusterDirectory) -> Examination | None:
    """Return the report of the scheduler job for a worker job; None if there is none within seconds."""
    if arguments.kind != "worker" or not any(one.kind == "scheduler" for one in directory.submits()):
        return None
    until = time.monotonic() + _SCHEDULER
    while True:
        directory.refresh()
        with contextlib.suppress(OSError, ValueError):
            report: Examination = json.loads(checked_files.read(directory.path / "scheduler.json"))
            return report
        if time.monotonic() > until or directory.closed:
            return None
        time.sleep(0.2)


def _collectives(arguments: argparse.Namespace, node: protocol_and_interface.Node, scheduler: Examination) -> str:
    """Return the variables of collectives that a worker on this node has if this is its scheduler's node."""
    chosen = protocol_and_interface.TransportChoice(**scheduler["transport"])
    contact = Contact(
        token="",
        job_id="",
        workers=f"{chosen.protocol}://{scheduler.get('for_workers', '')}:0",
        client="",
        fabric=chosen.why,
        network=chosen.network,
        interface=chosen.interface or "",
    )
    try:
        interface = complete_dask_commands.agreed_interface(contact, arguments.protocol, arguments.interface, node)
    except LaunchError:  # another line of the check has the reason
        return ""
    host = complete_dask_commands.host_for_workers(contact)
    return collectives_interface.effective(os.environ, interface, host)


def _container(arguments: argparse.Namespace) -> str:
    whose = os.environ.get("HPCGPU_INSTALLED_IN", "image")
    return (
        f"{arguments.container_runtime} runs {arguments.container}, with hpcgpu of the {whose}; the lines below are "
        "from inside it"
    )


def _container_warning(node: protocol_and_interface.Node) -> str:
    if not node.ports or any(_VERBS.glob("uverbs*")):
        return ""
    return f"the node has InfiniBand, and the container has no {_VERBS}: UCX cannot use it. Add it by container_args"


def _seconds_to_import() -> float | None:
    """Return how long a new Python takes to import the modules of a worker; None if it cannot."""
    began = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", "import dask.distributed"], check=True, capture_output=True, timeout=_IMPORT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return time.monotonic() - began


def _open_files() -> int:
    """Return how many files a scheduler here may open; `dask scheduler` raises its limit to half the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if resource.RLIM_INFINITY in (soft, hard) else max(soft, hard // 2)


def _local_directory(path: str) -> str:
    """Return the size of a directory for spilling, or what is wrong with the directory."""
    try:
        path = scratch.expanded(path, os.environ)
        place = scratch.temporary_directory(path)
        probe = place / f".hpcgpu-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
        return f"{place}: {shutil.disk_usage(place).free / 2**30:.0f} GiB free"
    except LaunchError as error:
        return f"error: {error}"
    except (NotTrusted, OSError) as error:
        return f"error: {scratch.refusal(path, error)}"


def serve(address: str, directory: ClusterDirectory) -> tuple[socket.socket, int]:
    """Listen with TLS as the scheduler does, and send the time to clients with the cluster's credentials.

    Each peer has a thread, so that silent strangers delay nobody. When too many peers are silent, the oldest one is
    disconnected.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory.tls / "cert.pem", directory.tls / "key.pem")
    context.load_verify_locations(directory.tls / "cert.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server((address, 0), backlog=_SILENT)
    silent: deque[ssl.SSLSocket] = deque()

    def accept() -> None:
        while listener.fileno() != -1:
            with contextlib.suppress(OSError):  # also if a peer is gone before it was accepted
                connection, _ = listener.accept()
                connection.settimeout(_PEER_TIMEOUT)
                peer = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                silent.append(peer)
                threading.Thread(target=answer, args=(peer,), daemon=True).start()
                if len(silent) > _SILENT:
                    # not SSLSocket's: its thread goes on using TLS
                    socket.socket.shutdown(silent.popleft(), socket.SHUT_RDWR)

    def answer(peer: ssl.SSLSocket) -> None:
        with peer, contextlib.suppress(OSError):
            try:
                peer.do_handshake()  # the time limit is for the whole handshake
            finally:
                with contextlib.suppress(ValueError):
                    silent.remove(peer)
            peer.recv(1)
            peer.sendall(f"{time.time():.6f}".encode())

    threading.Thread(target=accept, daemon=True).start()
    return listener, int(listener.getsockname()[1])


def main(argv: Sequence[str]) -> int:
    """Examine the job, write the result, and wait until the login node has read it."""
    drop_what_cannot_be_written()
    stage.release_at_exit()
    parser = argparse.ArgumentParser(
        prog="python -m hpcgpu.runtime.job_check", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    job_arguments(parser)
    parser.add_argument("--local-directory", help="directory for spilling")
    parser.add_argument("--container", help="image of the container that this runs in")
    parser.add_argument("--container-runtime", help="what runs it")
    arguments = parser.parse_args(argv)
    if not (arguments.directory / "cluster.json").exists():
        write_stderr(
            f"{arguments.directory} does not exist on {socket.gethostname()}: it must be on a shared filesystem"
        )
        return 1
    try:
        directory = ClusterDirectory.existing(arguments.directory)
    except (NotTrusted, OtherFormat) as error:
        write_stderr(error)
        return 1
    found = examine(arguments, directory)
    chosen = protocol_and_interface.TransportChoice(**found["transport"])
    node = protocol_and_interface.Node(**found["node"])
    _, name = complete_dask_commands.interfaces(chosen, node, arguments.client_interface)
    address = node.addresses.get(name or "", socket.gethostname())
    listener, port = serve(address, directory)
    report: JobReport = {**found, "address": [address, port], "via": name or "", "time": time.time()}
    directory.write(f"{arguments.kind}.json", json.dumps(report))
    deadline = time.monotonic() + _TIMEOUT
    while (
        time.monotonic() < deadline
        and not (directory.path / f"{arguments.kind}.seen").exists()
        and not directory.closed
    ):
        directory.refresh()
        time.sleep(0.2)
    listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
