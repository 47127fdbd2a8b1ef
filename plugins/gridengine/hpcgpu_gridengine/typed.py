"""What users may write for each option, as type checkers and editors read it.

Made by: python -m hpcgpu.configuration.signatures gridengine
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

from hpcgpu.configuration.typed import ClusterArguments, SchedulerArguments, WorkerArguments


class SGEWorkerArguments(WorkerArguments, total=False):
    node_type: str | int | None
    account_as: Literal["project", "group"] | None
    parallel_environment: str | int | None
    gpu_resource: str | int | None
    gpus_counted: Literal["job", "node", "slot"] | None
    memory_resource: str | int | None
    nodes_environment: str | int | None
    gpu_request: Literal["none"] | None


class SGESchedulerArguments(SchedulerArguments, total=False):
    node_type: str | int | None
    account_as: Literal["project", "group"] | None
    parallel_environment: str | int | None
    gpu_resource: str | int | None
    gpus_counted: Literal["job", "node", "slot"] | None
    memory_resource: str | int | None
    gpu_request: Literal["none"] | None


class SGEArguments(ClusterArguments, SGEWorkerArguments, total=False):
    pass
