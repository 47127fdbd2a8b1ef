"""What software and GPU a process has, and where the processes of one cluster differ.

`collect` reads. `compare` is pure. `EnvironmentCheck` reports each difference once.

Dask requires the same software in client, scheduler and workers. Graphs with GPU objects need a GPU of matching
capability on the scheduler.
"""

from __future__ import annotations

import contextlib
import enum
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcgpu.display.text_columns import columns
from hpcgpu.fabric.node_gpus import first_device, nvml

#: What is compared, and the distributions that provide it.
_PACKAGES = {
    "hpcgpu": ("hpcgpu",),
    "dask": ("dask",),
    "distributed": ("distributed",),
    "dask-cuda": ("dask-cuda",),
    "distributed-ucxx": ("distributed-ucxx-cu13", "distributed-ucxx-cu12", "distributed-ucxx"),
    "rmm": ("rmm-cu13", "rmm-cu12", "rmm"),
    "cudf": ("cudf-cu13", "cudf-cu12", "cudf"),
    "cudf-polars": ("cudf-polars-cu13", "cudf-polars-cu12", "cudf-polars"),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "numba": ("numba",),
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "msgpack": ("msgpack",),
    "cloudpickle": ("cloudpickle",),
}
#: How distributions for one major version of CUDA are named: rmm-cu13, cupy-cuda13x.
_FOR_CUDA = re.compile(r"-cu(?:da)?(\d+)x?$")
#: Processes with different versions of these cannot work together: Dask's releases promise no compatibility.
_FATAL = ("dask", "distributed")
#: What only processes on GPUs need.
_ON_GPUS = ("dask-cuda", "distributed-ucxx", "rmm", "cudf", "cudf-polars", "cupy", "numba", "CUDA runtime")
_GPU = ("driver", "CUDA of the driver", "compute capability", "GPU", "GPU memory", "MIG")
CLIENT, SCHEDULER = "client", "scheduler"


class Grade(enum.IntEnum):
    """How bad a difference is."""

    NOTE = 0
    WARNING = 1
    FATAL = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Difference:
    """One thing in which the processes of a cluster differ.

    Attributes
    ----------
    what : str
    grade : Grade
    values : mapping of str to str
        Values by process; ``-`` if a process has none.
    advice : str
        The effect of the difference, and what to do.
    """

    what: str
    grade: Grade
    values: Mapping[str, str]
    advice: str


def collect(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the software and the GPU of this process, by name; absent ones are left out. Uses NVML, never CUDA.

    The CUDA runtime is the one in the names of Dask's GPU libraries, or conda's. Its pip packages
    (``nvidia-cuda-runtime``) do not count: other libraries install them too.
    """
    found = {"python": platform.python_version(), "architecture": platform.machine()}
    made_for = set()
    for what, names in _PACKAGES.items():
        installed = [(name, version) for name in names if (version := _version(name))]
        if installed:
            found[what] = installed[0][1]
        made_for |= {match[1] for name, _ in installed if (match := _FOR_CUDA.search(name))}
    if runtime := max(made_for, key=int, default="") or _conda_cuda():
        found["CUDA runtime"] = runtime
    return found | _gpu(environ.get("CUDA_VISIBLE_DEVICES"))


def _version(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def _conda_cuda() -> str:
    """Return the version of conda's CUDA runtime, which is no Python distribution."""
    names = sorted(path.stem for path in Path(sys.prefix, "conda-meta").glob("cuda-cudart-[0-9]*.json"))
    return names[-1].split("-")[2] if names else ""


def _gpu(visible: str | None) -> dict[str, str]:
    """Return what NVML reports about the first GPU that this process sees."""
    found: dict[str, str] = {}

    def note(what: str, ask: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):  # old drivers, and MIG, do not answer every query
            found[what] = str(ask())

    with nvml() as library:
        if library is None:
            return {}
        note("driver", lambda: _text(library.nvmlSystemGetDriverVersion()))
        note("CUDA of the driver", lambda: "{}.{}".format(*divmod(library.nvmlSystemGetCudaDriverVersion() // 10, 100)))
        with contextlib.suppress(Exception):
            device = first_device(library, visible)
            note("compute capability", lambda: "{}.{}".format(*library.nvmlDeviceGetCudaComputeCapability(device)))
            note("GPU", lambda: _text(library.nvmlDeviceGetName(device)))
            note("GPU memory", lambda: f"{library.nvmlDeviceGetMemoryInfo(device).total / 2**30:.0f} GiB")
            note(
                "MIG",
                lambda: (
                    "yes" if (visible or "").startswith("MIG-") or library.nvmlDeviceGetMigMode(device)[0] else "no"
                ),
            )
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def compare(
    client: Mapping[str, str] | None, scheduler: Mapping[str, str] | None, workers: Mapping[str, Mapping[str, str]]
) -> list[Difference]:
    """Return the differences, the worst first.

    Parameters
    ----------
    client, scheduler : mapping or None
        What `collect` returned there; None where that is not known.
    workers : mapping of mappings
        By the worker's name.
    """
    known = {name: party for name, party in ((CLIENT, client), (SCHEDULER, scheduler)) if party is not None}
    parties = known | _grouped(workers)
    found = []
    for what in dict.fromkeys(key for party in parties.values() for key in party):
        values = {name: party.get(what, "-") for name, party in parties.items()}
        judged = _judge(what, values)
        if judged is not None:
            found.append(Difference(what, judged[0], values, judged[1]))
    for alone in (_old_driver, _without_numba):
        found += [difference for name, party in parties.items() if (difference := alone(name, party)) is not None]
    return sorted(found, key=lambda difference: -difference.grade)


def _grouped(workers: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Return workers with the same environment as one."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, party in workers.items():
        kinds.setdefault(tuple(sorted(party.items())), []).append(name)
    return {
        f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]: dict(kind)
        for kind, names in kinds.items()
    }


def _judge(what: str, values: Mapping[str, str]) -> tuple[Grade, str] | None:
    """Return the grade of a difference, and what to do; None if the values are equal, or the difference is harmless."""
    if what in (*_ON_GPUS, *_GPU):
        values = {
            name: value for name, value in values.items() if name != CLIENT or (value != "-" and what in _ON_GPUS)
        }
    if len(set(values.values())) < 2:
        return None
    if what in ("python", "architecture"):  # Dask itself works between architectures
        fatal = what == "python" and len({_minor(value) for value in values.values()}) > 1
        advice = (
            "Dask cannot send functions between minor versions of Python: use the same environment everywhere "
            "(option `python`)"
        )
        return (Grade.FATAL, advice) if fatal else (Grade.NOTE, "")
    if what in _FATAL:
        return Grade.FATAL, f"{what} must have the same version in all processes: install one version everywhere"
    if what in _GPU:
        other = what == "compute capability" and values.get(SCHEDULER, "-") not in ("-", *_of_workers(values))
        advice = "the scheduler may fail to rebuild GPU objects: give it a GPU of the workers' type" if other else ""
        return Grade.WARNING if other else Grade.NOTE, advice
    if what in ("cudf", "cupy") and values.get(SCHEDULER) == "-":
        return Grade.WARNING, f"the scheduler cannot rebuild graphs that hold objects of {what}: install it there too"
    return Grade.WARNING, "Dask may fail to send objects between them: install one version everywhere"


def _of_workers(values: Mapping[str, str]) -> set[str]:
    return {value for name, value in values.items() if name not in (CLIENT, SCHEDULER)}


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _old_driver(name: str, party: Mapping[str, str]) -> Difference | None:
    """Return a difference if the driver is too old for the CUDA runtime.

    Each driver runs all releases of its major version (CUDA compatibility guide).
    """
    driver, runtime = party.get("CUDA of the driver", ""), party.get("CUDA runtime", "")
    if name == CLIENT or not driver or not runtime or int(runtime.split(".")[0]) <= int(driver.split(".")[0]):
        return None
    major = driver.split(".")[0]
    advice = (
        f"the driver {party.get('driver', '')} supports CUDA {driver}: install hpcgpu with the extra cu{major}, or "
        "use newer drivers"
    )
    return Difference("CUDA runtime", Grade.FATAL, {name: f"{runtime}; the driver supports {driver}"}, advice)


def _without_numba(name: str, party: Mapping[str, str]) -> Difference | None:
    """Return a difference if numba is missing: then Dask cannot send GPU arrays.

    Dask's serialization uses numba (``distributed/protocol/{rmm,numba}.py``).
    """
    if name == CLIENT or "cupy" not in party or "numba" in party:
        return None
    advice = "without it Dask cannot send CuPy arrays: install numba-cuda"
    return Difference("numba", Grade.WARNING, {name: "-"}, advice)


def overview(parties: Mapping[str, Mapping[str, str]]) -> str:
    """Return all software and GPUs of processes, as a table.

    Parameters
    ----------
    parties : mapping of mappings
        What `collect` returned, by process.
    """
    names = dict.fromkeys(name for party in parties.values() for name in party)
    return columns(("", *parties), [(name, *(party.get(name, "-") for party in parties.values())) for name in names])


def table(differences: Sequence[Difference]) -> str:
    """Return the differences as one table, and what to do below it."""
    parties = list(dict.fromkeys(name for difference in differences for name in difference.values))
    rows = [(str(d.grade), d.what, *(d.values.get(name, "") for name in parties)) for d in differences]
    advice = [f"{d.what}: {d.advice}" for d in differences if d.advice]
    return "\n".join([columns(("", "", *parties), rows), *advice])


class EnvironmentCheck:
    """Compares the environments of one cluster.

    Parameters
    ----------
    mode : str
        The option `environment_check`: ``"error"`` makes fatal differences errors, ``"warn"`` warnings, ``"off"``
        reports nothing.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.scheduler: Mapping[str, str] | None = None
        self._client = collect() if mode != "off" else {}
        self._reported: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._kinds: set[frozenset[tuple[str, str]]] = set()

    def check(
        self,
        workers: Mapping[str, Mapping[str, str]],
        everybody: Callable[[], Mapping[str, Mapping[str, str]]] | None = None,
    ) -> tuple[str, str]:
        """Compare again.

        Parameters
        ----------
        workers : mapping
            What the workers have, by name; see `environments`. Workers that were compared before may be left out.
        everybody : callable, optional
            Returns the environments of all workers, if `workers` has only the new ones.

        Returns
        -------
        tuple of str
            The errors and the warnings, each as a table; empty if there is nothing new.
        """
        if self.mode == "off" or self.scheduler is None or not self._has_new(workers):
            return "", ""
        new = [
            difference
            for difference in compare(self._client, self.scheduler, everybody() if everybody is not None else workers)
            if _key(difference) not in self._reported
        ]
        self._reported |= {_key(difference) for difference in new}
        fatal = [d for d in new if d.grade is Grade.FATAL]
        if fatal and self.mode == "error":
            return (
                "client, scheduler and workers are incompatible (environment_check='warn' makes this a "
                f"warning):\n{table(new)}",
                "",
            )
        serious = [d for d in new if d.grade is not Grade.NOTE]
        return "", f"client, scheduler and workers have different software or GPUs:\n{table(new)}" if serious else ""

    def _has_new(self, workers: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether there is an environment that was not compared yet.

        In a large cluster, most new workers have an environment that was compared before.
        """
        kinds = {frozenset(worker.items()) for worker in workers.values()}
        new = not self._kinds or not kinds <= self._kinds
        self._kinds |= kinds | {frozenset((self.scheduler or {}).items())}
        return new


def _key(difference: Difference) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return the key of a difference, to recognise it again; the key does not depend on which worker has it."""
    return difference.what, frozenset(
        (name if name in ("client", "scheduler") else "", value) for name, value in difference.values.items()
    )


def environments(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the environments of workers by name, from the scheduler's list of them by address.

    Workers without our preload report nothing.
    """
    return {str(worker["name"]): worker["hpcgpu"] for worker in workers.values() if "hpcgpu" in worker}
