"""Whether the engine binds workers to cores near their GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HardwareBindingPolicy:
    enabled: bool = True
