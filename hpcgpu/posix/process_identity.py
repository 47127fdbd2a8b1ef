"""Identifies a process by its pid and start time, because a pid is used again. Linux only, from ``/proc``."""

from __future__ import annotations

from pathlib import Path


def identity(pid: int) -> list[int]:
    """Pid and start time of a live process, else nothing.

    The time is in ticks since boot: psutil's `create_time` counts from the epoch, so it moves whenever the clock is
    set.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, OverflowError, ValueError):
        return []
    return [] if state in "ZX" else [pid, int(fields[18])]


def alive(process: list[int]) -> bool:
    """Whether the process of this identity lives on this machine."""
    return bool(process) and identity(process[0]) == process
