"""What each command prints with ``--json``."""

from __future__ import annotations

from typing import Any, TypedDict

from hpcgpu.checks.limits import FindingJSON
from hpcgpu.checks.lines import LineJSON
from hpcgpu.cluster.plan import PlanJSON
from hpcgpu.display.jobinfo import JobJSON
from hpcgpu.fabric.report import MeasurementJSON
from hpcgpu.remote.report import ReportJSON
from hpcgpu.remote.snapshot import SnapshotJSON

__all__ = ["OUTPUTS", "CheckJSON", "ListedClusterJSON", "OptionJSON", "ProfileCheckJSON", "ProfileJSON", "StartedJSON"]


class StartedJSON(TypedDict):
    """A cluster that was started."""

    name: str
    #: The cluster directory.
    directory: str
    #: The address of the dashboard; empty while the scheduler does not run.
    dashboard: str
    jobs: list[JobJSON]


class ListedJobJSON(TypedDict):
    """A job of a listed cluster."""

    #: The id that the batch system gave it.
    id: str
    name: str
    state: str
    #: Why it waits, in the words of the batch system.
    reason: str


class ListedClusterJSON(TypedDict):
    """A cluster: with ``--all`` also one that has ended."""

    name: str
    #: The name of its batch system; empty if its files do not tell.
    system: str
    #: Seconds since 1970.
    created: float
    #: The cluster directory.
    directory: str
    #: Its jobs that have not ended.
    jobs: list[ListedJobJSON]
    #: What is not known, and what is wrong with its files; empty if nothing is.
    problem: str
    #: Whether it has ended; such clusters are listed with ``--all``.
    ended: bool
    #: Bytes that its directory takes; null without ``--all``.
    size: int | None


class CheckJSON(TypedDict):
    """A check."""

    #: Whether nothing failed.
    ok: bool
    lines: list[LineJSON]
    #: Software and GPU by place: ``login``, or the kind of a job.
    environments: dict[str, dict[str, str]]
    #: The directory with the scripts and logs of the jobs; null if it was removed.
    kept: str | None


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
    options: list[FindingJSON]


#: By command, the type of what it prints.
OUTPUTS: dict[str, Any] = {
    "start": StartedJSON,
    "plan": PlanJSON,
    "list": list[ListedClusterJSON],
    "status": SnapshotJSON,
    "report": ReportJSON,
    "scale": list[JobJSON],
    "check": CheckJSON,
    "bench-fabric": list[MeasurementJSON],
    "config": dict[str, OptionJSON],
    "profiles list": list[ProfileJSON],
    "profiles check": ProfileCheckJSON,
}
