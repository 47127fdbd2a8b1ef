"""What users may write for each option, as type checkers and editors read it.

Made by: python -m hpcgpu.configuration.signatures htcondor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

from hpcgpu.configuration.typed import ClusterArguments, SchedulerArguments, WorkerArguments


class HTCondorWorkerArguments(WorkerArguments, total=False):
    requirements: str | None
    gpus_minimum_capability: str | float | None
    gpus_minimum_memory: str | float | None
    concurrency_limits: str | int | None
    walltime_command: Literal["allowed_job_duration", "allowed_execute_duration", "+MaxRuntime"] | None
    gpu_request: Literal["none"] | None


class HTCondorSchedulerArguments(SchedulerArguments, total=False):
    requirements: str | None
    gpus_minimum_capability: str | float | None
    gpus_minimum_memory: str | float | None
    concurrency_limits: str | int | None
    walltime_command: Literal["allowed_job_duration", "allowed_execute_duration", "+MaxRuntime"] | None
    gpu_request: Literal["none"] | None


class HTCondorArguments(ClusterArguments, HTCondorWorkerArguments, total=False):
    pass
