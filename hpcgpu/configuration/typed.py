"""What users may write for each option, as type checkers and editors read it.

Made from the options by tests/unit/test_typed.py, which compares it with them: HPCGPU_UPDATE_GOLDEN=1 writes it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict


class JobArguments(TypedDict, total=False):
    queue: str | int | None
    account: str | int | None
    walltime: str | timedelta | None
    cores: int | None
    memory: str | float | None
    gpus_per_node: int | None
    gpu_type: str | int | None
    job_extra_directives: list[str] | tuple[str, ...] | None
    job_directives_skip: list[str] | tuple[str, ...] | None
    job_script_prologue: list[str] | tuple[str, ...] | str | Path | None
    env: Mapping[str, str | float] | None
    python: str | Path | None
    container: str | Path | None
    container_runtime: str | int | None
    container_mounts: list[str] | tuple[str, ...] | None
    container_args: list[str] | tuple[str, ...] | None
    stage: str | Path | None
    shebang: str | None
    local_directory: str | Path | None
    interface: str | None
    ucx_env: Mapping[str, str | float] | None
    partition: str | int | None
    project: str | int | None


class WorkerArguments(JobArguments, total=False):
    nodes_per_job: int | None
    nthreads: int | None
    resources: Mapping[str, float] | None
    death_timeout: str | float | timedelta | None
    walltime_margin: str | float | timedelta | None
    worker_start: Literal["forkserver", "spawn"] | None
    worker_extra_args: list[str] | tuple[str, ...] | None
    device_memory_limit: str | float | None
    rmm_pool_size: str | float | None
    rmm_maximum_pool_size: str | float | None
    rmm_managed_memory: bool | None
    rmm_async: bool | None
    rmm_release_threshold: str | float | None
    enable_cudf_spill: bool | None
    pre_import: str | int | None
    enable_tcp_over_ucx: bool | None
    enable_infiniband: bool | None
    enable_nvlink: bool | None
    enable_rdmacm: bool | None


class SchedulerArguments(JobArguments, total=False):
    dashboard_address: str | None


class ClusterArguments(TypedDict, total=False):
    name: str | None
    profile: str | None
    jobs: int | None
    protocol: Literal["auto", "ucx", "tcp", "tls"] | None
    client_interface: str | None
    security: bool | Literal["authenticated"] | None
    cluster_directory: str | Path | None
    log_directory: str | Path | None
    checkpoint_directory: str | Path | None
    checkpoint_every: str | float | timedelta | None
    template_directory: str | Path | None
    idle_timeout: str | float | timedelta | None
    lease: str | float | timedelta | None
    worker_restarts: int | None
    on_scheduler_end: Literal["end", "restart"] | None
    restart_wait: str | float | timedelta | None
    poll_interval: str | float | timedelta | None
    shutdown_on_close: bool | None
    wait: bool | None
    if_exists: Literal["error", "connect"] | None
    environment_check: Literal["error", "warn", "off"] | None
    container_runtimes: Mapping[str, str] | None
    notify: str | Callable[[Any], object] | None
    ending_notice: str | float | timedelta | None
    quiet: bool | None
    n_jobs: int | None


class SlurmWorkerArguments(WorkerArguments, total=False):
    gpu_request: Literal["gres", "gpus-per-node", "gpus", "none"] | None
    qos: str | int | None
    reservation: str | int | None
    constraint: str | Path | None
    prefer: str | Path | None


class SlurmSchedulerArguments(SchedulerArguments, total=False):
    gpu_request: Literal["gres", "gpus-per-node", "gpus", "none"] | None
    qos: str | int | None
    reservation: str | int | None
    constraint: str | Path | None
    prefer: str | Path | None


class SlurmArguments(ClusterArguments, SlurmWorkerArguments, total=False):
    pass


class PBSWorkerArguments(WorkerArguments, total=False):
    select_extra: str | None
    resource_list: Mapping[str, str | int] | None
    place: str | int | None
    pbs_shape: Literal["select", "flat"] | None
    pbs_launcher: str | None
    gpu_request: Literal["none"] | None


class PBSSchedulerArguments(SchedulerArguments, total=False):
    select_extra: str | None
    resource_list: Mapping[str, str | int] | None
    place: str | int | None
    pbs_shape: Literal["select", "flat"] | None
    gpu_request: Literal["none"] | None


class PBSArguments(ClusterArguments, PBSWorkerArguments, total=False):
    pass


class LocalWorkerArguments(WorkerArguments, total=False):
    gpu_request: Literal["none"] | None


class LocalSchedulerArguments(SchedulerArguments, total=False):
    gpu_request: Literal["none"] | None


class LocalArguments(ClusterArguments, LocalWorkerArguments, total=False):
    pass


class RunnerArguments(TypedDict, total=False):
    protocol: Literal["auto", "ucx", "tcp", "tls"] | None
    client_interface: str | None
    security: bool | Literal["authenticated"] | None
    cluster_directory: str | Path | None
    quiet: bool | None
    memory: str | float | None
    local_directory: str | Path | None
    interface: str | None
    ucx_env: Mapping[str, str | float] | None
    nthreads: int | None
    resources: Mapping[str, float] | None
    death_timeout: str | float | timedelta | None
    walltime_margin: str | float | timedelta | None
    worker_extra_args: list[str] | tuple[str, ...] | None
    device_memory_limit: str | float | None
    rmm_pool_size: str | float | None
    rmm_maximum_pool_size: str | float | None
    rmm_managed_memory: bool | None
    rmm_async: bool | None
    rmm_release_threshold: str | float | None
    enable_cudf_spill: bool | None
    pre_import: str | int | None
    enable_tcp_over_ucx: bool | None
    enable_infiniband: bool | None
    enable_nvlink: bool | None
    enable_rdmacm: bool | None
