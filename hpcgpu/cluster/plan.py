"""When the jobs of a cluster would start, what is in their way, and what they cost. Submits nothing."""

from __future__ import annotations

import html
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypedDict, overload

from hpcgpu.batch import batch_system, registry
from hpcgpu.batch.base import BatchSystem
from hpcgpu.batch.estimate import Estimate
from hpcgpu.checks.limits import Finding, refusals
from hpcgpu.cluster.notify import Callbacks
from hpcgpu.configuration.resolve import resolve
from hpcgpu.display.progress import duration
from hpcgpu.display.text import columns
from hpcgpu.display.words import counted
from hpcgpu.errors import BatchError
from hpcgpu.options.common import JobOptions, Options
from hpcgpu.posix.printable import printable
from hpcgpu.scripts import render

__all__ = ["Plan", "PlanJSON", "PlannedJob", "PlannedJobJSON", "Planner", "gpu_hours", "make", "plan"]

_COLUMNS = ("queue", "job", "would start", "nodes", "what the batch system says")
#: Seconds within which a start is "now".
_NOW = 5.0
#: What a batch system's own test of a submit does not look at: whether the queue starts jobs, and its longest time.
_NOT_TESTED = frozenset({"queue", "walltime"})


class PlannedJobJSON(TypedDict):
    """A kind of job in one queue."""

    #: Empty: the batch system's default queue.
    queue: str
    #: ``scheduler`` or ``worker``.
    kind: str
    nodes: int
    gpus_per_node: int
    #: Seconds; null if none is requested.
    walltime: float | None
    #: Seconds since 1970 at which one such job would start, by the batch system's own estimate; null if it gives none.
    start: float | None
    #: The nodes on which it would start.
    place: str
    #: Why it would be refused, or would never start.
    limits: list[str]
    #: What else the batch system says.
    known: list[str]


class PlanJSON(TypedDict):
    """What a cluster would get and cost."""

    #: The name of the batch system.
    system: str
    #: Seconds since 1970 at which the batch system was queried.
    at: float
    #: Worker jobs.
    worker_jobs: int
    #: GPUs of all jobs, for their whole walltime; null if a job with GPUs requests no walltime.
    gpu_hours: float | None
    jobs: list[PlannedJobJSON]


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
        Epoch seconds at which one such job would start, by the batch system's own estimate; None if it gives none.
    place : str
        The nodes on which it would start.
    limits : tuple of str
        Why it would be refused, or would never start.
    known : tuple of str
        What else the batch system says.
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

    def as_json(self) -> PlannedJobJSON:
        """Return it as JSON has it."""
        json: PlannedJobJSON = asdict(self)  # type: ignore[assignment]
        return json | {"limits": list(self.limits), "known": list(self.known)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """When the jobs of a cluster would start, and what they cost; shows itself as a table.

    Attributes
    ----------
    system : str
        The name of the batch system.
    at : float
        Epoch seconds at which the batch system was queried.
    worker_jobs : int
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
        """Return the plan for this width of text."""
        return "\n".join([columns(_COLUMNS, self._rows(), width), "", *self._notes(width)])

    def as_json(self) -> PlanJSON:
        """Return it as JSON has it."""
        return {
            "system": self.system,
            "at": self.at,
            "worker_jobs": self.worker_jobs,
            "gpu_hours": self.gpu_hours,
            "jobs": [job.as_json() for job in self.jobs],
        }

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._sentences())
        return f"<table><tr>{head}</tr>{body}</table>{notes}"

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

    def _notes(self, width: int) -> list[str]:
        return [textwrap.fill(sentence, width) for sentence in self._sentences()]


def plan(cls: type[Any], *, scheduler: dict[str, Any] | str | None = None, **options: Any) -> Plan:
    """Ask the batch system when the jobs of a cluster would start, and what is in their way; submit nothing.

    Parameters
    ----------
    scheduler : dict or "local", optional
    **options
        Those with which the cluster would be started. Each of several queues, joined by commas, is asked.

    Returns
    -------
    Plan
        A table with the batch system's own estimates, the limits in the way, and the cost in GPU hours.

    Raises
    ------
    OptionError
        An unknown option, or a value that is not allowed.
    BatchError
        The batch system is not installed here, or it does not answer.
    """
    Callbacks.taken(options, options.pop("on_ending", None))  # those of a start: a plan calls none
    asked = resolve(cls.system, {"scheduler": scheduler, **options})
    batch = batch_system(cls.system)
    batch.check()
    cls._check(asked)
    system = registry.system(cls.system)
    try:
        machine = system.machine(accounts=False)
    except BatchError:  # what the batch system says of a job must do
        machine = None
    return make(asked, batch, None if machine is None else partial(refusals, machine=machine, accounts=system.who_may))


class Planner:
    """`plan` of the cluster classes: of a class the function `plan`, of a cluster the names that upstream wants.

    distributed's SpecCluster has a property of this name, which its adaptive scaling and its widget read.

    Parameters
    ----------
    names : callable
        Returns the names of the workers that a cluster is to have.
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
        Returns which limits a job breaks, see `hpcgpu.checks.limits.refusals`. Default: they are not known.

    Raises
    ------
    OptionError
        An option that the batch system does not accept.
    BatchUnavailable
        The batch system does not answer.
    """
    jobs: list[PlannedJob] = []
    with tempfile.TemporaryDirectory(prefix="hpcgpu-plan-") as folder:
        for one in _by_queue(options):
            for kind in ("scheduler", "worker"):
                planned = _planned(one, kind)
                if planned is not None and not any(_same(planned, other) for other in jobs):
                    jobs.append(_estimated(planned, one, batch, Path(folder), judge))
    return Plan(
        system=options.system,
        at=time.time(),
        worker_jobs=options.cluster.jobs,
        gpu_hours=gpu_hours(options),
        jobs=tuple(jobs),
    )


def gpu_hours(options: Options) -> float | None:
    """Return what all jobs cost if they run for their whole walltime; None if a job with GPUs requests none."""
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


def _same(job: PlannedJob, other: PlannedJob) -> bool:
    return (job.queue, job.kind) == (other.queue, other.kind)


def _estimated(job: PlannedJob, options: Options, batch: BatchSystem, folder: Path, judge: _Judge | None) -> PlannedJob:
    directory = options.cluster.cluster_directory / options.cluster.name
    script = folder / render.script_name(options.system, job.kind)
    script.write_text(render.render(options.system, job.kind, options, directory))
    found: Estimate = batch.estimate(script, queue=job.queue or None, walltime=job.walltime)
    asked = options.worker if job.kind == "worker" else options.scheduler
    limits = list(found.limits)
    if judge is not None and asked is not None:
        broken = judge(replace(asked, queue=asked.queue or found.queue or None))
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
