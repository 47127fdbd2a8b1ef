"""When the jobs of a cluster would start, what prevents them, and what they cost. Submits nothing."""

from __future__ import annotations

import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, overload

from hpcgpu.batch import batch_system, system_registry
from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.estimate import Estimate
from hpcgpu.checks.queue_limits import Finding, refusals
from hpcgpu.configuration.resolve import resolve
from hpcgpu.display.counts_and_durations import counted, duration
from hpcgpu.display.html import html
from hpcgpu.display.text_columns import columns
from hpcgpu.errors import BatchError
from hpcgpu.notify import Callbacks
from hpcgpu.options.shared_options_and_defaults import JobOptions, Options
from hpcgpu.posix.printable import printable
from hpcgpu.scripts import render

_COLUMNS = ("queue", "job", "would start", "nodes", "what the batch system says")
#: Seconds within which a start is "now".
_NOW = 5.0
#: What a batch system's own test of a submit does not check: whether the queue starts jobs, and its longest walltime.
_NOT_TESTED = frozenset({"queue", "walltime"})


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A kind of job in one queue.

    Attributes
    ----------
    queue : str
        Empty: the batch system's default queue.
    kind : str
        ``"scheduler"`` or ``"worker"``.
    nodes, gpus_per_node : int
    walltime : float or None
        Seconds; None if none is requested.
    start : float or None
        Seconds since 1970 at which one such job would start, by the batch system's own estimate; None if it gives none.
    place : str
        The nodes on which it would start.
    limits : tuple of str
        Why it would be refused, or would never start.
    known : tuple of str
        What else the batch system reports.
    """

    queue: str
    kind: str
    nodes: int
    gpus_per_node: int
    walltime: float | None
    start: float | None = None
    place: str = ""
    limits: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What a cluster would get and cost. It shows itself as a table.

    Attributes
    ----------
    system : str
        The name of the batch system.
    at : float
        Seconds since 1970 at which the batch system was queried.
    worker_jobs : int
        Worker jobs.
    gpu_hours : float or None
        GPUs of all jobs, for their whole walltime; None if a job with GPUs requests no walltime.
    jobs : tuple of PlannedJob
        For each queue the scheduler job and one worker job.
    """

    system: str
    at: float
    worker_jobs: int
    gpu_hours: float | None
    jobs: tuple[PlannedJob, ...]

    def __repr__(self) -> str:
        return self.text(140)

    def text(self, width: int) -> str:
        """Return the plan as text of this width."""
        sentences = (textwrap.fill(sentence, width) for sentence in self._sentences())
        return "\n".join([columns(_COLUMNS, self._rows(), width), "", *sentences])

    def _repr_html_(self) -> str:
        template = "{{ table(columns, rows) }}{{ paragraphs(sentences) }}"
        return html(template, columns=_COLUMNS, rows=self._rows(), sentences=self._sentences())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                job.queue or "(default)",
                f"{job.kind}, {_size(job)}",
                _start(job, self.at),
                job.place,
                "; ".join([*job.limits, *job.known]),
            )
            for job in self.jobs
        ]

    def _sentences(self) -> Iterator[str]:
        scheduler = any(job.kind == "scheduler" for job in self.jobs)
        what = counted(self.worker_jobs, "worker job") + (" and the scheduler job" if scheduler else "")
        if self.gpu_hours is None:
            yield f"The cost of {what} is not known: give a walltime."
        else:
            cost = counted(round(self.gpu_hours, 2), "GPU hour")
            yield f"If {what} run for their whole walltime, they cost {cost}."
        if not self.worker_jobs:
            yield "No worker job is requested: give jobs."
        yield (
            "Each estimate is for one job alone, as if it were submitted now."
            + (" It does not say when the last of several worker jobs would start." if self.worker_jobs > 1 else "")
            + (" Worker jobs start after the scheduler job." if scheduler else "")
        )
        yield "Nothing was submitted."


def plan(cls: type[Any], *, scheduler: dict[str, Any] | str | None = None, **options: Any) -> Plan:
    """Query the batch system for when the jobs of a cluster would start, and what prevents them; submit nothing.

    Parameters
    ----------
    scheduler : dict or "local", optional
    **options
        The options with which the cluster would be started. Several queues, joined by commas, are all queried.

    Returns
    -------
    Plan
        A table with the batch system's own estimates, the limits that prevent jobs, and the cost in GPU hours.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed.
    BatchError
        The batch system is not installed here, or it does not answer.
    """
    # a start would use the callbacks; a plan calls none
    Callbacks.from_options(options, options.pop("on_ending", None))
    requested = resolve(cls.system, {"scheduler": scheduler, **options})
    batch = batch_system(cls.system)
    batch.check()
    cls._check(requested)
    system = system_registry.system(cls.system)
    try:
        machine = system.machine(accounts=False)
    except BatchError:  # then only the batch system's own test of a job is used
        machine = None
    return make(
        requested, batch, None if machine is None else partial(refusals, machine=machine, accounts=system.who_may)
    )


class Planner:
    """The attribute `plan` of cluster classes and clusters.

    On a class it is the function `plan`. On a cluster it is the set of names that distributed's SpecCluster has under
    this name: upstream's adaptive scaling and widget read it.

    Parameters
    ----------
    names : callable
        Returns the names of the workers that a cluster should have.
    """

    def __init__(self, names: Callable[[Any], set[str]]) -> None:
        self.names = names

    @overload
    def __get__(self, cluster: None, cls: type[Any]) -> Callable[..., Plan]: ...

    @overload
    def __get__(self, cluster: object, cls: type[Any]) -> set[str]: ...

    def __get__(self, cluster: object, cls: type[Any]) -> Callable[..., Plan] | set[str]:
        return MethodType(plan, cls) if cluster is None else self.names(cluster)


#: Returns why the batch system would refuse a job, or never start it.
_Judge = Callable[[JobOptions], Sequence[Finding]]


def make(options: Options, batch: BatchSystem, judge: _Judge | None = None) -> Plan:
    """Query the batch system for each queue that the options name, and for each kind of job.

    Parameters
    ----------
    options : Options
        Several queues are joined by commas.
    batch : BatchSystem
    judge : callable, optional
        Returns the limits that a job exceeds, see `hpcgpu.checks.queue_limits.refusals`. Default: limits are unknown.

    Raises
    ------
    OptionError
        An option that the batch system does not accept.
    BatchUnavailable
        The batch system does not answer.
    """
    jobs: dict[tuple[str, str], PlannedJob] = {}
    with tempfile.TemporaryDirectory(prefix="hpcgpu-plan-") as folder:
        for one in _by_queue(options):
            for kind in ("scheduler", "worker"):
                planned = _planned(one, kind)
                if planned is not None and (planned.queue, kind) not in jobs:
                    jobs[planned.queue, kind] = _estimated(planned, one, batch, Path(folder), judge)
    return Plan(
        system=options.system,
        at=time.time(),
        worker_jobs=options.cluster.jobs,
        gpu_hours=gpu_hours(options),
        jobs=tuple(jobs.values()),
    )


def gpu_hours(options: Options) -> float | None:
    """Return the cost of all jobs for their whole walltime; None if a job with GPUs requests no walltime."""
    worker, scheduler, hours = options.worker, options.scheduler, 0.0
    gpus = [(worker.walltime, options.cluster.jobs * worker.nodes_per_job * worker.gpus_per_node)]
    gpus += [(scheduler.walltime, scheduler.gpus_per_node)] if scheduler is not None else []
    for walltime, count in gpus:
        if count and walltime is None:
            return None
        hours += count * (walltime or 0) / 3600
    return hours


def _by_queue(options: Options) -> Iterator[Options]:
    """Yield the options for each queue. A scheduler job with a queue of its own keeps it."""
    worker, scheduler = options.worker, options.scheduler
    for queue in (worker.queue or "").split(","):
        shared = scheduler is not None and scheduler.queue == worker.queue
        yield replace(
            options,
            worker=replace(worker, queue=queue or None),
            scheduler=replace(scheduler, queue=queue or None) if scheduler is not None and shared else scheduler,
        )


def _planned(options: Options, kind: str) -> PlannedJob | None:
    job = options.worker if kind == "worker" else options.scheduler
    if job is None:
        return None
    nodes = options.worker.nodes_per_job if kind == "worker" else 1
    return PlannedJob(
        queue=job.queue or "", kind=kind, nodes=nodes, gpus_per_node=job.gpus_per_node, walltime=job.walltime
    )


def _estimated(job: PlannedJob, options: Options, batch: BatchSystem, folder: Path, judge: _Judge | None) -> PlannedJob:
    directory = options.cluster.cluster_directory / options.cluster.name
    script = folder / render.script_name(options.system, job.kind)
    script.write_text(render.render(options.system, job.kind, options, directory))
    found: Estimate = batch.estimate(script, queue=job.queue or None, walltime=job.walltime)
    requested = options.worker if job.kind == "worker" else options.scheduler
    limits = list(found.limits)
    if judge is not None and requested is not None:
        broken = judge(replace(requested, queue=requested.queue or found.queue or None))
        limits += [str(one) for one in broken if not found.tested or one.option in _NOT_TESTED]
    if limits:
        return replace(job, limits=tuple(map(printable, limits)), known=found.known)
    return replace(job, start=found.start, place=found.place, known=found.known)


def _size(job: PlannedJob) -> str:
    """Return what a job requests: ``2 nodes with 4 GPUs, 2 h``."""
    gpus = counted(job.gpus_per_node, "GPU") if job.gpus_per_node else "no GPU"
    nodes = f"{job.nodes} nodes with {gpus}" if job.nodes > 1 else gpus
    return f"{nodes}, {duration(job.walltime)}" if job.walltime else nodes


def _start(job: PlannedJob, now: float) -> str:
    if job.start is None:
        return "never" if job.limits else "not known"
    if job.start - now < _NOW:
        return "now"
    return f"in {duration(job.start - now)} ({time.strftime('%a %F %H:%M', time.localtime(job.start))})"
