"""Converts sizes into numbers of jobs: workers, GPUs, cores, memory, and the limits of `adapt`. Pure functions."""

from __future__ import annotations

import math
import numbers
from contextlib import suppress
from typing import Any

from dask import config
from dask.utils import format_bytes, parse_bytes

from hpcgpu.display.counts_and_durations import counted
from hpcgpu.errors import OptionError
from hpcgpu.options.shared_options_and_defaults import WorkerOptions
from hpcgpu.options.values import duration, natural, positive
from hpcgpu.options.values import memory as parse_memory
from hpcgpu.scaling.policy_data import Limits


def threads_per_worker(worker: WorkerOptions) -> int:
    """Return the threads of one Dask worker."""
    return worker.nthreads or (1 if worker.gpus_per_node else worker.cores or 1)


def memory_per_worker(worker: WorkerOptions, name: str = "memory") -> int:
    """Return the bytes of memory of one Dask worker: its share of the node's memory.

    Parameters
    ----------
    worker : WorkerOptions
    name : str, optional
        The argument whose value is converted, for the error message.

    Raises
    ------
    OptionError
        The memory of a node is not known.
    """
    if worker.memory_per_worker is None:
        raise OptionError(
            f"{name} cannot be converted to jobs, because the memory of a node is not known: set the option memory of "
            "the workers, or give a number of jobs instead"
        )
    return worker.memory_per_worker


def jobs_for(worker: WorkerOptions, *, call: str = "scale: {}", **given: Any) -> int:
    """Return the number of jobs that have this number of workers, this much memory, and so on.

    The largest of these numbers counts, rounded up.

    Parameters
    ----------
    call : str, optional
        The beginning of error messages; the unit's name replaces its braces.
    **given
        Amounts by unit: ``n`` (workers), ``jobs``, ``gpus``, ``cores``, ``memory``. None means not given.

    Raises
    ------
    OptionError
        A negative number or a fraction, no number at all, or a unit that these workers do not have.
    """
    wanted = []
    for unit, value in given.items():
        if value is not None:
            name = call.format(unit)
            amount = _amount(name, unit, value)
            wanted.append(math.ceil(amount / _brings(worker, unit, name)) if amount else 0)
    if not wanted:
        raise OptionError("scale: give a number of workers, or jobs=, gpus=, cores= or memory=")
    return max(wanted)


def limits(
    worker: WorkerOptions,
    *,
    backlog: int | None = None,
    idle_timeout: float | str | None = None,
    interactive: bool | None = None,
    maximum_gpu_hours: float | None = None,
    **sizes: Any,
) -> Limits:
    """Return the limits of adaptive scaling in jobs: the minimum rounded up, the maximum down.

    Parameters
    ----------
    worker : WorkerOptions
    backlog, idle_timeout, interactive, maximum_gpu_hours
        See `hpcgpu.cluster.gpucluster.GPUCluster.adapt`.
    **sizes
        ``minimum``, ``maximum``, ``minimum_jobs`` and so on, as `adapt` takes them. None means not given.

    Raises
    ------
    OptionError
        A number is not valid, there is no maximum, or it is below the minimum or below one job.
    """
    given = {name: value for name, value in sizes.items() if value is not None}
    least, most = (
        {unit: given.pop(f"{end}{suffix}") for unit, suffix in _UNITS.items() if f"{end}{suffix}" in given}
        for end in ("minimum", "maximum")
    )
    if given:
        raise OptionError(f"adapt: there is no argument {next(iter(given))!r}")
    if not most:
        raise OptionError("adapt: give a maximum, such as maximum_jobs=4")
    smallest = max((jobs_for(worker, **{u: v}, call=f"adapt: minimum{_UNITS[u]}") for u, v in least.items()), default=0)
    largest = min(_jobs_within(worker, unit, value) for unit, value in most.items())
    if largest < smallest:
        words = ", ".join(f"maximum{_UNITS[unit]}={value!r}" for unit, value in most.items())
        raise OptionError(
            f"adapt: the minimum ({counted(smallest, 'job')}) is above the maximum ({counted(largest, 'job')}: {words})"
        )
    if backlog is not None:
        positive("adapt: backlog", backlog)
    if maximum_gpu_hours is not None:
        number = isinstance(maximum_gpu_hours, numbers.Real) and not isinstance(maximum_gpu_hours, bool)
        if not number or not 0 < maximum_gpu_hours < math.inf:
            raise OptionError(f"adapt: maximum_gpu_hours must be a number above 0, not {maximum_gpu_hours!r}")
        if not worker.gpus_per_node:
            raise OptionError("adapt: maximum_gpu_hours needs workers with GPUs, but gpus_per_node is 0")
    return Limits(
        minimum=smallest,
        maximum=largest,
        backlog=backlog,
        idle_timeout=duration("adapt: idle_timeout", idle_timeout) if idle_timeout is not None else None,
        interactive=bool(interactive),
        gpu_seconds=maximum_gpu_hours * 3600 if maximum_gpu_hours is not None else None,
    )


def target_duration(given: float | str | None = None) -> float:
    """Return the seconds in which the known work should be done: as given, or from Dask's configuration."""
    configured = config.get("distributed.adaptive.target-duration") if given is None else given
    return duration("target_duration", configured)


def _jobs_within(worker: WorkerOptions, unit: str, value: Any) -> int:
    """Return how many whole jobs have no more than this amount."""
    name = _MAXIMUM.format(_UNITS[unit])
    amount, brings = _amount(name, unit, value), _brings(worker, unit, name)
    if amount < brings:
        shown = f"{format_bytes(brings)} of memory" if unit == "memory" else counted(brings, *_WORDS[unit])
        raise OptionError(f"{name}={value!r} is less than one job, which has {shown}")
    return amount // brings


def _brings(worker: WorkerOptions, unit: str, name: str) -> int:
    """Return how much of a unit one job has."""
    if unit == "gpus" and worker.gpus_per_node == 0:
        raise OptionError(f"{name} needs workers with GPUs, but gpus_per_node is 0")
    if unit == "jobs":
        return 1
    workers = worker.workers_per_job
    if unit == "memory":
        return workers * memory_per_worker(worker, name)
    return workers * threads_per_worker(worker) if unit == "cores" else workers


def _amount(name: str, unit: str, value: Any) -> int:
    """Return an amount of a unit, 0 or more.

    A float without a fraction, or an integer of numpy, is a whole number too.
    """
    if unit == "memory":
        with suppress(ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError):
            if parse_bytes(value) == 0:
                return 0
        return parse_memory(name, value)
    if isinstance(value, float | numbers.Integral) and not isinstance(value, bool):
        if value == math.inf:
            raise OptionError(f"{name}={value!r} is not a limit: write the largest number that you want")
        if math.isfinite(value) and value == int(value):
            value = int(value)
    return natural(name, value)


#: By unit, its name in the arguments of `adapt`, and its singular and plural.
_UNITS = {"n": "", "jobs": "_jobs", "gpus": "_gpus", "cores": "_cores", "memory": "_memory"}
_WORDS = {
    "n": ("worker", "workers"),
    "jobs": ("job", "jobs"),
    "gpus": ("GPU", "GPUs"),
    "cores": ("thread of workers (nthreads)", "threads of workers (nthreads)"),
}
_MAXIMUM = "adapt: maximum{}"
