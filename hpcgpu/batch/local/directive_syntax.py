"""Directives for the embedded queue: ``#HPCGPU --option=value`` lines, which `hpcgpu.batch.local.jobs` reads."""

from __future__ import annotations

from hpcgpu.batch.directive_syntax import CLUSTER_SETS, Syntax

SYNTAX = Syntax(prefix="#HPCGPU", refused={"--dependency": CLUSTER_SETS}, few=True)
