"""How scripts ask Abacus: ``#AB option value`` lines."""

from __future__ import annotations

from hpcgpu.batch.directive_syntax import CLUSTER_SETS, Syntax

__all__ = ["SYNTAX"]


def minutes(seconds: int | None) -> int | None:
    """Abacus counts walltimes in whole minutes."""
    return None if seconds is None else -(-seconds // 60)


SYNTAX = Syntax(prefix="#AB", refused={"-link": CLUSTER_SETS}, filters={"minutes": minutes})
