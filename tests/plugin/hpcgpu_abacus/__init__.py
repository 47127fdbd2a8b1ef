"""Abacus for hpcgpu. It is imported by every command and every job, so it imports nothing itself."""

from __future__ import annotations

from pathlib import Path

from hpcgpu.batch.system_registry import System

__all__ = ["system"]

system = System(
    name="abacus",
    title="Abacus",
    client="hpcgpu_abacus.client:Abacus",
    syntax="hpcgpu_abacus.directives:SYNTAX",
    cluster_class="hpcgpu_abacus.cluster:AbacusGPUCluster",
    templates=Path(__file__).parent / "templates",
    suffix="ab",
    command="ab-submit",
    queues="hpcgpu_abacus.client:queues",
    worker_options="hpcgpu_abacus.options:AbacusWorkerOptions",
    scheduler_options="hpcgpu_abacus.options:AbacusSchedulerOptions",
    check_options="hpcgpu_abacus.options:check",
)
