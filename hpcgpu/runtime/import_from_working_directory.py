"""Lets tasks import modules from the submit directory."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from hpcgpu.posix.ownership import weaknesses
from hpcgpu.posix.standard_streams import write_stderr


def import_from_working_directory() -> None:
    """Let tasks import modules from the submit directory, unless others can write there.

    Dask's own command allows this too.

    The job script starts Python with ``-P``. Without it, Python would search there first, also for its own modules.
    """
    with contextlib.suppress(OSError):
        place = Path.cwd()
        found = [weakness for weakness in weaknesses(place, group_may_write=True) if not weakness.by_group]
        if found:
            write_stderr(f"tasks cannot import modules from {place}: {found[0].why}")
        elif sys.flags.safe_path:
            sys.path.append(str(place))
