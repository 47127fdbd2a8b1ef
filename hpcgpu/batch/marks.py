"""Which jobs of a queue are hpcgpu's, where nothing but the queue is left to say so. Pure."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["is_job_script", "runs_hpcgpu"]

_NAME = re.compile(r"(scheduler|worker(-[\w.-]+)?)\.\w+")


def is_job_script(path: Path) -> bool:
    """Whether a script is named as hpcgpu names its own."""
    return path.is_absolute() and _NAME.fullmatch(path.name) is not None


def runs_hpcgpu(script: str) -> bool:
    """Whether the text of a job script is one that hpcgpu has written: another tool's may have the same name."""
    return re.search(r"^(?!\s*#).*\shpcgpu\.runtime\.launch (scheduler|worker) ", script, re.MULTILINE) is not None
