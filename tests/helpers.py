"""What several test modules use, and pytest need not know."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass
class Clock:
    """Stands in for the module `time`: an hour of waiting takes no time."""

    now: float = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
