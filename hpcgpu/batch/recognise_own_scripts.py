"""Finds hpcgpu's jobs in a queue when only the queue still has a record of them. Pure."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(scheduler|worker(-[\w.-]+)?)\.\w+")


def is_job_script(path: Path) -> bool:
    """Whether a script is named as hpcgpu names its own."""
    return path.is_absolute() and _NAME.fullmatch(path.name) is not None


def runs_hpcgpu(script: str) -> bool:
    """Whether hpcgpu has written the text of a job script: the script of another tool may have the same name."""
    return re.search(r"^(?!\s*#).*\shpcgpu\.runtime\.launch (scheduler|worker) ", script, re.MULTILINE) is not None
