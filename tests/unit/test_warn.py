"""Warnings point to the user's own line, or to none: never to a line of this package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import hpcgpu

PROGRAM = """
import asyncio, threading
from hpcgpu.display.warn import warn

exec("def inside(text): warn(text)", ours := {"__name__": "hpcgpu.somewhere", "warn": warn})
inside = ours["inside"]
inside("called by the user")  # this line
thread = threading.Thread(target=inside, args=["called by a thread"])
thread.start()
thread.join()

async def main():
    asyncio.get_running_loop().call_soon(inside, "called by the loop")

asyncio.run(main())
"""


def test_a_warning_points_to_the_line_of_the_user_or_to_none(tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        f"{script}:7: ClusterWarning: called by the user",
        '  inside("called by the user")  # this line',
        "ClusterWarning: called by a thread",
        "ClusterWarning: called by the loop",
    ]


def test_there_is_one_category_of_warnings_which_users_can_filter() -> None:
    assert issubclass(hpcgpu.ClusterWarning, UserWarning)
    package = Path(hpcgpu.__file__).parent
    others = {
        path.name for path in package.rglob("*.py") if re.search(r"\b(?!Cluster)[A-Z]\w*Warning\b", path.read_text())
    }
    assert others == {"errors.py"}, "where ClusterWarning is made from UserWarning"
