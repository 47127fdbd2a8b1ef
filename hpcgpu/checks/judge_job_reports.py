"""Judges the reports of a check's jobs; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcgpu.batch.cuda_visible_devices import visible_devices
from hpcgpu.checks.result_lines import Grade, Line
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.fabric.protocol_and_interface import Node, TransportChoice, incompatibility, without_rdma
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.posix.printable import printable
from hpcgpu.releases import TESTED
from hpcgpu.software import compare_environments
from hpcgpu.software.compare_environments import CLIENT, Difference

if TYPE_CHECKING:
    from hpcgpu.runtime.job_check import JobReport


#: Seconds by which clocks may differ.
_SKEW = 60.0
#: Seconds for which a job waits for a connection at least (`hpcgpu.runtime.job_check`).
_LISTENS = 200.0
#: Open files that a scheduler of a few hundred workers needs.
_OPEN_FILES = 4096
#: What to do if a compute node lacks the commands of the queue.
_NO_COMMANDS = (
    "`hpcgpu adapt` needs the queue's commands on compute nodes: if they cannot be added, call adapt() in a program on "
    "the login node"
)
#: Options of dask-cuda for what the engine of cudf-polars does by itself.
_FORBIDDEN_BY_POLARS = (
    *("rmm_pool_size", "rmm_maximum_pool_size", "rmm_managed_memory", "rmm_async", "rmm_release_threshold"),
    *("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink", "enable_rdmacm"),
)
#: Duration of `import dask.distributed`, in seconds, from which a packed environment is advised
#: (benchmarks/results/environment.txt).
_SLOW_IMPORT = 20.0
_NO_DRIVER = (
    "the node has no NVIDIA driver, or the job cannot access it: choose a GPU queue or gpu_type, or ask the site's "
    "support"
)
_NO_DRIVER_IN_CONTAINER = (
    "the container lacks the node's NVIDIA driver: the node must have one, and the container runtime must bring it in "
    "(container_args)"
)


@dataclass
class Seen:
    """The facts about one job.

    Attributes
    ----------
    kind : str
        ``"scheduler"`` or ``"worker"``.
    job_id : str
        Empty if the batch system refused the job.
    found : JobReport or None
        The report that the job wrote.
    problem : str
        Why the job wrote no report.
    unread : str or None
        What the submit printed, if its id was not found there, but by the name of the job.
    unreachable : str
        Why the connection to the job failed; empty if it succeeded.
    skew : float or None
        Seconds by which its clock is ahead of ours; None if this is not known.
    late : float
        Seconds that its report may have waited before it was read.
    waited : float
        Seconds from the submit to its report.
    """

    kind: str
    job_id: str = ""
    found: JobReport | None = None
    problem: str = ""
    unread: str | None = None
    unreachable: str = ""
    skew: float | None = None
    late: float = 0.0
    waited: float = 0.0


def untested_lines(where: str, installed: Mapping[str, str]) -> Iterator[Line]:
    """Yield lines on releases with which hpcgpu was not tested; pure.

    Parameters
    ----------
    where : str
        The first column of the lines.
    installed : mapping of str to str
        Version by name of the distribution.
    """
    for name, release in TESTED.items():
        if name in installed and not release.holds(installed[name]):
            found = f"{name} {installed[name]}: hpcgpu is tested with {release.lowest} to {release.highest}"
            advice = "if something fails, try again with a release that is tested"
            if name == "distributed" and release.precedes(installed[name]):
                advice = (
                    f"update it there: before {release.lowest} a link to the dashboard can bring a script of somebody "
                    "else into a page of it (GHSA-c336-7962-wfj2)"
                )
            yield Line(where, "releases", "warning", found, advice)


def _id_lines(where: str, unread: str | None) -> Iterator[Line]:
    if unread is not None:
        found_by_name = f"the submit printed no id that hpcgpu can read: {printable(unread.strip(), 200)!r}"
        advice = (
            "hpcgpu finds its jobs by their names, and submits one again that ends at once. Report what was printed to "
            "the authors of hpcgpu, or of the package for this batch system"
        )
        yield Line(where, "job id", "warning", found_by_name, advice)


def judge(seen: Seen, gpus: int) -> Iterator[Line]:
    """Yield the lines of one job.

    Parameters
    ----------
    seen : Seen
    gpus : int
        GPUs that it requested, per node.
    """
    where, found = f"{seen.kind} job", seen.found
    if not found:
        yield Line(where, "job", "failure", seen.problem)
        return
    yield Line(
        where, "job", "ok", f"{found['job']} ran on {found['host']}, {duration(seen.waited)} after it was submitted"
    )
    yield from (*_id_lines(where, seen.unread), *_software_lines(where, found))
    yield from untested_lines(where, found["environment"])
    yield from _import_lines(where, found)
    yield Line(where, "filesystem", "ok", "the login node and the job read each other's files")
    if seen.skew is not None and abs(seen.skew) > _SKEW:
        advice = "the clocks of login node and compute node should agree: tell the site's support"
        yield Line(
            where, "clock", "warning", f"{abs(seen.skew):.0f} s {'ahead' if seen.skew > 0 else 'behind'}", advice
        )
    elif seen.skew is not None:
        yield Line(where, "clock", "ok", f"{seen.skew:+.1f} s")
    address = f"{found['address'][0]} ({found['via'] or 'default route'})"
    if not seen.unreachable:
        yield Line(where, "reachable from here", "ok", f"{address}, by TLS")
    elif seen.late > _LISTENS:
        found_late = f"not known: the queue answered only after {seen.late:.0f} s, when the job had ended"
        yield Line(where, "reachable from here", "warning", found_late, "run the check again")
    elif seen.kind == "scheduler":
        others = ", ".join(
            f"{name} ({a})"
            for name, a in sorted(found["node"]["addresses"].items())
            if name not in ("lo", found["via"])
        )
        other = f"set client_interface to a network that the login node reaches: {others}; or " if others else ""
        advice = f"{other}ask the site to open the connection, or run your program on a compute node"
        yield Line(where, "reachable from here", "failure", f"{address}: {seen.unreachable}", advice)
    yield from _gpu_lines(where, found, gpus)
    yield from _fabric_lines(where, found)
    if seen.kind == "scheduler" and 0 <= found["open_files"] < _OPEN_FILES:
        advice = "large clusters need more: raise the limit with `ulimit -n` in job_script_prologue"
        yield Line(where, "open files", "warning", f"at most {found['open_files']}", advice)
    if found["local_directory"]:
        bad = found["local_directory"].startswith("error: ")
        advice = "set local_directory to a directory of your own that the node has" if bad else ""
        yield Line(
            where,
            "local_directory",
            "failure" if bad else "ok",
            found["local_directory"].removeprefix("error: "),
            advice,
        )
    if seen.kind == "scheduler" and found["queue_error"]:
        yield Line(where, "queue commands in the job", "warning", found["queue_error"], _NO_COMMANDS)


def _software_lines(where: str, found: JobReport) -> Iterator[Line]:
    if found.get("container"):  # the hpcgpu of an image may not report it
        yield Line(where, "container", "ok", found["container"])
    yield Line(where, "python", "ok", f"{found['environment']['python']} at {found['python']}")


def _import_lines(where: str, found: JobReport) -> Iterator[Line]:
    """Yield how long an import takes in a job; a packed environment helps if many nodes read the same files."""
    seconds = found.get("import_seconds")
    if seconds is None:
        return
    slow = seconds > _SLOW_IMPORT and found.get("import_shared", False) and not found.get("container")
    advice = (
        "a node can unpack the environment on its own disk: set stage to an archive made by conda-pack or venv-pack"
    )
    source = found.get("import_filesystem") or "an unknown filesystem"
    yield Line(
        where,
        "import",
        "warning" if slow else "ok",
        f"importing dask.distributed takes {seconds:.1f} s from {source}",
        advice if slow else "",
    )


def _gpu_lines(where: str, found: JobReport, gpus: int) -> Iterator[Line]:
    if not gpus:
        return
    if found["gpu_error"]:
        yield Line(where, "GPUs", "failure", found["gpu_error"])
        return
    about = found["environment"]
    named = f"{gpus} x {about.get('GPU', 'GPU')}" + (f", {about['GPU memory']}" if "GPU memory" in about else "")
    yield Line(where, "GPUs", "ok", f"{named}; CUDA_VISIBLE_DEVICES holds {visibility(found['visible'])}")
    if "driver" in about:
        capability = about.get("compute capability", "unknown")
        yield Line(
            where,
            "driver",
            "ok",
            f"{about['driver']}, CUDA {about.get('CUDA of the driver', '')}, compute capability {capability}",
        )
    else:
        yield Line(
            where,
            "driver",
            "failure",
            "NVML does not answer",
            _NO_DRIVER_IN_CONTAINER if found.get("container") else _NO_DRIVER,
        )


def visibility(value: str | None) -> str:
    """Return in which form a job sees its GPUs."""
    devices = visible_devices(value)
    if devices is None:
        return "nothing (it is not set): the job sees every GPU of the node"
    if not devices:
        return "no GPU"
    first = devices[0]
    kind = "MIG UUIDs" if first.startswith("MIG-") else "UUIDs" if first.startswith("GPU-") else "indices"
    return f"{kind} ({value})" if kind == "indices" else kind


def _fabric_lines(where: str, found: JobReport) -> Iterator[Line]:
    if found["interface_error"]:
        yield Line(
            where, "fabric", "failure", found["interface_error"], "set interface, or client_interface, to one of them"
        )
        return
    transports = ", ".join(found["node"]["transports"])
    node, chosen = Node(**found["node"]), TransportChoice(**found["transport"])
    lacking = without_rdma(node, chosen)
    yield Line(
        where,
        "fabric",
        "warning" if lacking else "ok",
        chosen.why + (f"; UCX has {transports}" if transports else ""),
        lacking,
    )
    if found.get("container_warning"):
        yield Line(where, "InfiniBand in the container", "warning", found["container_warning"])
    if found["kind"] == "worker" and (collectives := found.get("collectives")):
        yield Line(where, "collectives", "ok", collectives)
    limit = node.locked_memory
    yield Line(where, "locked memory", "ok", "no limit" if limit is None else f"at most {limit // 1024} KiB")


def fabric_line(scheduler: JobReport, worker: JobReport, options: Options) -> Line:
    """Return whether a worker job can use the transport that the scheduler job would choose for all."""
    chosen, node = TransportChoice(**scheduler["transport"]), Node(**worker["node"])
    why = incompatibility(chosen, node, options.cluster.protocol, options.worker.interface)
    if why:
        return Line("worker job", "the scheduler's fabric", "failure", why)
    own = TransportChoice(**worker["transport"])
    if own.protocol == "ucx" != chosen.protocol:
        advice = (
            "the scheduler's node chooses the protocol of all jobs. To use ucx, run the scheduler job on a node with "
            "the same network as the workers' nodes"
        )
        return Line(
            "worker job",
            "the scheduler's fabric",
            "warning",
            f"the worker's node chose {own.why}; the scheduler's node chose {chosen.why}",
            advice,
        )
    return Line("worker job", "the scheduler's fabric", "ok", "the worker job can use it")


def polars_lines(worker: JobReport, options: Options) -> Iterator[Line]:
    """Yield a warning if the workers have cudf-polars, and options that its engine forbids; see docs/libraries.rst.

    The engine sets up GPU memory and UCX by itself, and does not check whether dask-cuda has done so.
    """
    given = [name for name in _FORBIDDEN_BY_POLARS if getattr(options.worker, name) not in (None, False)]
    if "cudf-polars" in worker["environment"] and given:
        advice = "leave them out if you use its DaskEngine, which sets up GPU memory and UCX by itself"
        yield Line(
            "worker job", "cudf-polars", "warning", f"it is installed, and these are set: {', '.join(given)}", advice
        )


def environment_lines(differences: list[Difference]) -> Iterator[Line]:
    """Yield the differences of software and GPUs as lines."""
    if not differences:
        yield Line("all", "environment", "ok", "login node and jobs have the same software")
    grades: dict[compare_environments.Grade, Grade] = {
        compare_environments.Grade.FATAL: "failure",
        compare_environments.Grade.WARNING: "warning",
        compare_environments.Grade.NOTE: "ok",
    }
    for d in differences:
        values = ", ".join(f"{'login' if name == CLIENT else name} {value}" for name, value in d.values.items())
        yield Line("all", d.what, grades[d.grade], values, d.advice)
