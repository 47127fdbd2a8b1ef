"""Reads what `hpcgpu status --json` and `hpcgpu start --json` have printed on another machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast, get_type_hints

from hpcgpu.dask_scheduler.rpc_types import GroupState
from hpcgpu.display.job_info import JobInfo
from hpcgpu.errors import Damaged
from hpcgpu.existing_clusters.snapshot import Snapshot
from hpcgpu.posix import json_records


def from_printed(printed: bytes, what: str) -> Snapshot:
    """Return a snapshot that was printed as JSON; `what` names it in the message.

    Raises
    ------
    Damaged
        It is something else.
    """
    try:
        found = json.loads(printed)
        groups = [_group(one) for one in found["groups"]]
        snapshot: Snapshot = json_records.convert({**found, "jobs": _with_paths(found["jobs"]), "groups": []}, Snapshot)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{what} is damaged: {error}") from error
    return replace(snapshot, groups=groups)


def jobs_of(printed: Any) -> list[JobInfo]:
    """Return jobs that were printed as JSON.

    Raises
    ------
    ValueError
        They are something else.
    """
    jobs: list[JobInfo] = json_records.convert(_with_paths(printed), list[JobInfo])
    return jobs


def _group(printed: Any) -> GroupState:
    shapes = get_type_hints(GroupState)
    return cast("GroupState", {name: json_records.convert(printed[name], shape) for name, shape in shapes.items()})


def _with_paths(printed: Any) -> list[Any]:
    return [{**job, "log": {"path": job["log"]} if job["log"] is not None else None} for job in printed]
