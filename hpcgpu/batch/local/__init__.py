"""The embedded queue: a batch system of one machine, for trying and for tests."""

from __future__ import annotations

from hpcgpu.batch.system_registry import System, common_templates

system = System(
    name="local",
    title="the queue embedded in hpcgpu",
    client="hpcgpu.batch.local.queue:LocalQueue",
    syntax="hpcgpu.batch.local.directive_syntax:SYNTAX",
    cluster_class="hpcgpu.cluster.system_classes:LocalGPUCluster",
    templates=common_templates() / "local",
    suffix="sh",
    rank=3,
    fallback=True,
    one_machine=True,
)
