"""What each command prints with ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from hpcgpu.checks.queue_limits import Finding
from hpcgpu.checks.result_lines import Line
from hpcgpu.display.job_info import JobInfo
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.fabric.connection_report import Measurement
from hpcgpu.plan import Plan
from hpcgpu.report.bill import JobBill


class StartedJSON(TypedDict):
    """A cluster that was started."""

    name: str
    #: The cluster directory.
    directory: str
    #: The address of the dashboard; empty while the scheduler does not run.
    dashboard: str
    jobs: list[JobInfo]


class ListedJobJSON(TypedDict):
    """A job of a listed cluster."""

    #: The job id of the batch system.
    id: str
    name: str
    state: str
    #: Why it waits, as the batch system reports it.
    reason: str


class ListedClusterJSON(TypedDict):
    """A cluster: with ``--all`` also one that has ended."""

    name: str
    #: The name of its batch system; empty if its files do not contain it.
    system: str
    #: Seconds since 1970.
    created: float
    #: The cluster directory.
    directory: str
    #: Its jobs that have not ended.
    jobs: list[ListedJobJSON]
    #: Unknown facts, and damage of its files; empty if there is none.
    problem: str
    #: Whether it has ended; such clusters are listed with ``--all``.
    ended: bool
    #: Bytes that its directory takes; null without ``--all``.
    size: int | None


class ReportJSON(TypedDict):
    """The bill of a cluster. An unknown value is null."""

    name: str
    #: The name of its batch system.
    system: str
    #: The cluster directory.
    directory: str
    #: Seconds since 1970 at which the report was made.
    time: float
    #: Whether all jobs of the cluster have ended.
    ended: bool
    #: Known GPU hours of all its jobs; the part of the scheduler job in them.
    gpu_hours: float | None
    scheduler_gpu_hours: float | None
    #: GPU hours of workers: before their first task, with tasks, and without tasks after the first one.
    before: float | None
    busy: float | None
    after: float | None
    #: GPU hours in which workers waited for the next scheduler; in no other part.
    waiting: float | None
    tasks_done: int | None
    tasks_lost: int | None
    #: What would have cost less: two sentences at most.
    advice: list[str]
    jobs: list[JobBill]
    #: Unknown facts and their reasons, one sentence for each.
    problems: list[str]
    #: After the end of a scheduler job, until the next scheduler is there: what happens meanwhile, and what it costs.
    restart: list[str]


class CheckJSON(TypedDict):
    """A check."""

    #: Whether nothing failed.
    ok: bool
    lines: list[Line]
    #: Software and GPU by place: ``login``, or the kind of a job.
    environments: Mapping[str, Mapping[str, str]]
    #: The directory with the scripts and logs of the jobs; null if it was removed.
    kept: Path | None


class OptionJSON(TypedDict):
    """An option of a cluster."""

    value: Any
    #: Where the value comes from.
    source: str


class ProfileJSON(TypedDict):
    """A profile of a site."""

    name: str
    #: The name of the batch system that it is for.
    system: str
    about: str
    #: Where its values come from.
    source: str
    #: When they were read.
    date: str
    #: Its file.
    path: str


class ProfileCheckJSON(TypedDict):
    """A profile compared with this machine."""

    name: str
    #: Its file.
    path: str
    #: Whether nothing is wrong. What was not checked is not wrong.
    ok: bool
    options: list[Finding]


#: By command, the type of what it prints.
OUTPUTS: dict[str, Any] = {
    "start": StartedJSON,
    "plan": Plan,
    "list": list[ListedClusterJSON],
    "status": Snapshot,
    "report": ReportJSON,
    "scale": list[JobInfo],
    "check": CheckJSON,
    "bench-fabric": list[Measurement],
    "config": dict[str, OptionJSON],
    "profiles list": list[ProfileJSON],
    "profiles check": ProfileCheckJSON,
}
